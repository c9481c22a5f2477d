"""Rollout: engines that generate completions, and the worker that turns prompts into scored groups.

Engines    engine.py is the protocol, hf.py the engine on transformers; vllm.py, vllm_settings.py and vllm_worker.py are
           the only files that import vLLM; vllm_twin.py loads a version while the one before it generates
Parity     parity.py: does an engine compute what the trainer published?
Groups     prompt_leases.py hands out prompts, generation.py makes groups of them, worker.py runs it all
"""
