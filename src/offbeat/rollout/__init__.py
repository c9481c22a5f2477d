"""Rollout: engines that generate and score, the probe that checks them, the worker that turns prompts into groups.

engines   engine.py (the protocol), hf.py (transformers), vllm.py, scripted.py (for tests)
the proof probe.py
the work  leases.py, worker.py
"""
