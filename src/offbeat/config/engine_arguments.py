"""Which of vLLM's engine arguments `engine.extra` may set. No torch, and no vLLM.

Arguments about speed and memory pass. Three kinds do not: those that offbeat sets itself, those that change which
tokens are sampled or which log-probs are reported for them, and those that run other code or other processes. Training
assumes that completions come from the published policy, so the second kind would make its importance ratios wrong
without an error.
"""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Final

_SETTINGS: Final = {
    "model": "model.path",
    "dtype": "model.serve",
    "max_model_len": "engine.max_prompt_tokens and sampling.max_tokens",
    "max_num_seqs": "workers.groups_at_once and group_size",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "tensor_parallel_size": "engine.tensor_parallel",
    "seed": "seed",
}
"""Arguments of vLLM that have a setting of their own."""
_SET_BY_OFFBEAT: Final = (
    "disable_log_stats",
    "enable_log_requests",
    "enable_prefix_caching",
    "enable_sleep_mode",
    "generation_config",
    "load_format",
    "logprobs_mode",
    "prefix_caching_hash_algo",
    "stream_interval",
    "tokens_only",
    "trust_remote_code",
)
_SAMPLING: Final = (
    "*dtype*",
    "*gumbel*",
    "*lora*",
    "*quantization*",
    "*replay*",
    "*revision*",
    "*rounding*",
    "*tokenizer*",
    "additional_config",
    "config_format",
    "convert",
    "diffusion_config",
    "disable_sliding_window",
    "enable_prompt_embeds",
    "hf_*",
    "kv_sharing_fast_prefill",
    "logits_processor*",
    "mamba_cache_philox_rounds",
    "model_*",
    "override_generation_config",
    "pooler_config",
    "reasoning*",
    "return_sampling_mask",
    "runner",
    "spec_*",
    "speculative*",
    "structured_outputs_config",
    "watermark_config",
)
_PROCESSES: Final = (
    "*_cls",
    "*_transfer_config",
    "*context_parallel*",
    "*elastic*",
    "*plugin*",
    "*pipeline_parallel*",
    "data_parallel*",
    "device_ids",
    "distributed_executor_backend",
    "download_dir",
    "fault_tolerance*",
    "enable_fault_tolerance",
    "kv_events_config",
    "master_*",
    "nnodes",
    "node_rank",
    "ray_*",
)
_NO_RELOAD: Final = ("cpu_offload*", "offload_*")


def refusals(names: Iterable[str]) -> list[str]:
    """Return why some of these arguments are refused; nothing if all of them may be set.

    >>> refusals(["max_num_batched_tokens", "seed", "kv_cache_dtype"])
    ['seed has a setting of its own: seed', 'kv_cache_dtype changes what is sampled or its log-probs']
    """
    return [why for name in names if (why := _refusal(name))]


def _refusal(name: str) -> str:
    if name in _SETTINGS:
        return f"{name} has a setting of its own: {_SETTINGS[name]}"
    kinds = (
        (_SET_BY_OFFBEAT, "is set by offbeat"),
        (_SAMPLING, "changes what is sampled or its log-probs"),
        (_PROCESSES, "runs code or processes that offbeat does not know of"),
        (_NO_RELOAD, "does not work with vLLM's reload of weights"),
    )
    return next((f"{name} {why}" for patterns, why in kinds if any(fnmatchcase(name, one) for one in patterns)), "")
