"""Rollout: engines that generate and score, the probe that checks them, the worker that turns prompts into groups.

engines   engine.py (the protocol), hf.py with sampling.py (transformers), scripted.py (for tests),
          vllm.py with vllm_settings.py and vllm_worker.py: the only files that import vLLM
the proof probe.py
the work  leases.py, groups.py (episodes.py for several turns), worker.py, waits.py
"""
