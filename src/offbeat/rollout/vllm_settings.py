"""The settings of vLLM: environment, engine arguments and sampling parameters, all explicit."""

import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

import torch

from offbeat.imports import temporary_environment
from offbeat.rollout.engine import Sampling

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

_NEVER: Final = 2**31 - 1
_GREEDY_BELOW: Final = 0.01
"""vLLM silently raises temperatures below this, and treats 0 as greedy."""


def sampling_params(sampling: Sampling, seed: int) -> "SamplingParams":
    """Set every parameter that affects sampling, so that no default does."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if not sampling.temperature >= _GREEDY_BELOW:
        raise ValueError(
            f"temperature {sampling.temperature}: vLLM would sample with another one; use {_GREEDY_BELOW} or more"
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
        ignore_eos=True,  # only `stop_token_ids` end a completion
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        stream_interval=_NEVER,  # two outputs: the first token, which shows that it has started, then the rest
        skip_clone=True,
    )


def logprob_params() -> "SamplingParams":
    """Return the parameters for log-probs of given tokens. vLLM must generate one token, which is discarded."""
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
    """Import vLLM, or raise an error that says how to install it."""
    try:
        import vllm.v1.engine.async_llm  # noqa: F401
    except ImportError as missing:
        raise ImportError(
            "this engine needs vLLM: pip install 'offbeat[vllm]'; on CPU, scripts/install-cpu"
        ) from missing


def start_llm(settings: dict[str, object]) -> "AsyncLLM":
    """Start an `AsyncLLM` with these arguments and those common to all engines; block until it is ready."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    on_cpu = {} if _on_gpu() else {"enforce_eager": True, "block_size": 32}
    arguments = AsyncEngineArgs(
        **settings,
        **on_cpu,
        load_format="safetensors",  # never pickle
        trust_remote_code=False,
        generation_config="vllm",  # ignore the sampling defaults of the model
        logprobs_mode="processed_logprobs",  # those of the sampled distribution
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    return AsyncLLM.from_engine_args(arguments)


def _on_gpu() -> bool:
    return torch.accelerator.is_available()


@contextlib.contextmanager
def environment(threads: int, kv_cache_gib: int) -> Iterator[None]:
    """Set the environment that vLLM's processes inherit; restore it afterwards."""
    settings = {
        "VLLM_CPU_KVCACHE_SPACE": str(kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        settings["VLLM_LOGGING_LEVEL"] = "ERROR"
    if not _on_gpu():  # compiling takes half a minute on CPU and gains nothing measurable
        settings["TORCH_COMPILE_DISABLE"] = "1"
    with temporary_environment(settings):
        yield
