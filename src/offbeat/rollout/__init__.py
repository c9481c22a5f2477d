"""Rollout: engines that generate completions, and the worker that turns prompts into scored groups.

Engines    engine.py is the protocol, hf.py the engine on transformers, vllm*.py the one on vLLM
Parity     parity.py: does an engine compute what the trainer published?
Groups     prompt_leases.py hands out prompts, generation.py makes groups of them, worker.py runs it all
"""
