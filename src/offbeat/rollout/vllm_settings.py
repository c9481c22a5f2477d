"""What vLLM is told: its environment, its arguments, how it samples. All of it is said, nothing left to a default."""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import torch

from offbeat.imports import environment_of
from offbeat.rollout.engine import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

_NEVER: Final = 2**31 - 1
_GREEDY_BELOW: Final = 0.01
"""vLLM raises temperatures below this silently, and takes 0 for greedy."""


def sampling_params(sampling: Sampling, seed: int) -> "SamplingParams":
    """Every parameter that decides what is drawn; what others call default is left to nobody."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if not sampling.temperature >= _GREEDY_BELOW:
        raise ValueError(
            f"temperature {sampling.temperature} is not what vLLM would sample at: use {_GREEDY_BELOW} or more"
        )
    return SamplingParams(
        n=1,
        seed=seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        max_tokens=sampling.max_tokens,
        min_tokens=0,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=True,  # only the stop tokens that were sent end a completion
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=_NEVER,  # the first token, which says that it has begun, and then all the others
        skip_clone=True,
    )


def logprob_params() -> "SamplingParams":
    """For the log-probs of given tokens; the one token that vLLM insists on generating is thrown away."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=1.0,
        max_tokens=1,
        prompt_logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def import_vllm() -> None:
    """Or say how to get it."""
    try:
        import vllm.v1.engine.async_llm  # noqa: F401
    except ImportError as missing:
        raise ImportError("this engine is vLLM: pip install 'offbeat[vllm]', on CPU scripts/install-cpu") from missing


def start_llm(settings: dict[str, object]) -> "AsyncLLM":
    """An `AsyncLLM` with these arguments and those that are the same for every engine; blocks until it is ready."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    on_cpu = {} if _on_gpu() else {"enforce_eager": True, "block_size": 32}
    arguments = AsyncEngineArgs(
        **settings,
        **on_cpu,
        load_format="safetensors",  # never a pickle
        trust_remote_code=False,
        generation_config="vllm",  # the model's own sampling defaults stay out
        logprobs_mode="processed_logprobs",  # of the distribution sampled from
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    return AsyncLLM.from_engine_args(arguments)


def _on_gpu() -> bool:
    return torch.accelerator.is_available()


@contextlib.contextmanager
def environment(threads: int, kv_cache_gib: int) -> Iterator[None]:
    """What vLLM's processes inherit; afterwards this process has its own environment back."""
    ours = {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        ours["VLLM_LOGGING_LEVEL"] = "ERROR"
    if not _on_gpu():  # half a minute of compiling before the first token, for what gains nothing measurable
        ours["TORCH_COMPILE_DISABLE"] = "1"
    with environment_of(ours):
        yield
