"""The settings of vLLM: environment, engine arguments and sampling parameters, all explicit."""

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from offbeat.config.sections import LOWEST_TEMPERATURE
from offbeat.errors import ConfigError, ModelUnreadable, suggest_nearest
from offbeat.imports import install_command, temporary_environment
from offbeat.placement.hardware import cpu_products
from offbeat.placement.plan import cannot_split
from offbeat.placement.shape import ModelShape
from offbeat.rollout.engine import Sampling
from offbeat.rollout.vllm_owner import tied_children
from offbeat.rollout.vllm_versions import SLOTS, OnUpdate
from offbeat.weights.adapter import AdapterSpec

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

_STARTING: Final = threading.Lock()
_NEVER: Final = 2**31 - 1
_ONE_PROCESS: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""The engine core computes by itself. On CPU, vLLM would start a worker beside it, which loads all libraries again, to
set the worker's number of threads; `environment` sets it for both. By this name, because there "uni" means "mp"."""
FEWEST_SLOTS: Final = 2
PROBE_ROOM: Final = 8
"""Sequences of a run's probe. An engine with adapters can compute them although it generates as much as it may."""
_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for. A smaller adapter leaves a part of it zero."""


def sampling_params(sampling: Sampling, seed: int) -> "SamplingParams":
    """Set every parameter that affects sampling, so that no default does."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    if not sampling.temperature >= LOWEST_TEMPERATURE:
        raise ValueError(
            f"temperature {sampling.temperature}: vLLM would sample with another one; use {LOWEST_TEMPERATURE} or more"
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
        min_tokens=sampling.min_tokens,
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


@dataclass(frozen=True, kw_only=True)
class VllmSettings:
    """How a vLLM engine starts."""

    max_model_len: int
    """Most tokens of a prompt with its completion."""
    max_num_seqs: int
    """Completions generated concurrently; others wait."""
    dtype: str = "bfloat16"
    """That of the weights in every version, and of computation unless the CPU only emulates it."""
    on_update: OnUpdate = "keep"
    """At a load, `keep` running completions and continue them under the new version, or `drain` them."""
    threads: int = 1
    """On CPU, threads of the process that computes."""
    kv_cache_gib: int = 1
    """On CPU, memory for keys and values."""
    gpu_memory_utilization: float = 0.9
    """On GPU, the fraction of memory that vLLM takes."""
    answer_within: float = 60.0
    """Seconds after which an engine core that does not answer `health` counts as dead."""
    tensor_parallel: int = 1
    """Processes, one a GPU, that each hold a part of every layer. On CPU it works too."""
    devices: Sequence[int] | None = None
    """On GPU, the devices of these processes, as this process counts them. None takes the first ones."""
    sleeps: bool = False
    """Whether `sleep` and `wake` will be called. Only on GPU."""
    adapter: AdapterSpec | None = None
    """Versions are adapters of the model, several at once. Then nothing pauses, and `on_update` has no effect: a
    completion ends with the version it began with."""
    slots: int = SLOTS
    """Adapters that can be in use at the same time. With none free, a load waits for one."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """More of vLLM's engine arguments, as they are."""

    def check(self, model_dir: Path) -> None:
        """Raise `ConfigError` for what vLLM would refuse after a long start, or not at all."""
        if self.tensor_parallel > 1:
            with contextlib.suppress(ModelUnreadable):  # vLLM knows more models than the device plan
                if reason := cannot_split(ModelShape.read(model_dir), self.tensor_parallel):
                    raise ConfigError([reason])
        if self.devices is not None and len(self.devices) != self.tensor_parallel:
            raise ConfigError(
                [f"engine.tensor_parallel = {self.tensor_parallel}, but {len(self.devices)} devices were given: give "
                 "one each"]
            )  # fmt: skip
        if self.sleeps and not on_gpu():
            raise ConfigError(
                ["vLLM's sleep mode exists only on GPU, and there is none here; start the engine without sleeps=True"]
            )

    def engine_arguments(self, model_dir: Path) -> dict[str, object]:
        """Return the arguments of vLLM's engine."""
        on_cpu: dict[str, object] = {"enforce_eager": True, "block_size": 32}  # on GPU, CUDA graphs are on by default
        if self.tensor_parallel == 1:
            on_cpu["distributed_executor_backend"] = _ONE_PROCESS
        arguments = {} if on_gpu() else on_cpu
        if self.tensor_parallel > 1:  # in a Ray actor vLLM would otherwise start Ray workers outside the device plan
            arguments["distributed_executor_backend"] = "mp"
        return {
            **arguments,
            "model": str(model_dir),
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs + (PROBE_ROOM if self.adapter else 0),
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "tensor_parallel_size": self.tensor_parallel,
            "enable_sleep_mode": self.sleeps,
            **(adapter_settings(self.adapter, self.slots) if self.adapter else {}),
            "dtype": computing_dtype(self.dtype),
            "load_format": "safetensors",  # never pickle
            "trust_remote_code": False,
            "generation_config": "vllm",  # ignore the sampling defaults of the model
            "logprobs_mode": "processed_logprobs",  # those of the sampled distribution
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            **self.extra,
        }


def adapter_settings(spec: AdapterSpec, slots: int) -> dict[str, object]:
    """Return the engine arguments for adapters, of which `slots` are in use at the same time.

    The targets are named because by default vLLM also prepares the head, and then log-probs of prompts end the engine
    on CPU.
    """
    if slots < FEWEST_SLOTS:
        raise ConfigError(
            [f"slots = {slots}: an engine needs {FEWEST_SLOTS}, for the version that generates and the next"]
        )
    if heads := {"lm_head", "embed_tokens"} & set(spec.targets):
        raise ConfigError(
            [f"adapter.targets has {min(heads)}: name linear layers inside the model, for example q_proj"]
        )
    if spec.rank > max(_RANKS):
        raise ConfigError([f"adapter.rank = {spec.rank}: vLLM serves at most {max(_RANKS)}"])
    return {
        "enable_lora": True,
        "max_loras": slots,
        "max_cpu_loras": slots,
        "max_lora_rank": min(rank for rank in _RANKS if rank >= spec.rank),
        "lora_target_modules": [*spec.targets],
    }


def fitting_length(model_dir: Path, tokens: int) -> int:
    """Return `tokens`, or what the model reads if that is less: with more, vLLM refuses to start."""
    try:
        return min(tokens, ModelShape.read(model_dir).context)
    except ModelUnreadable:  # vLLM knows more models than the device plan
        return tokens


def computing_dtype(dtype: str) -> str:
    """Return the dtype in which vLLM computes with weights of `dtype`.

    A CPU without instructions for bfloat16 generates 2.5 times as fast in float32, with the same bfloat16 weights: vLLM
    widens them when it loads a version, so that patches stay small.
    """
    return dtype if on_gpu() else cpu_products(dtype)


def check_room(what: str, tokens: int, longest: int) -> None:
    """Raise `ValueError` if a request has more tokens than the engine's `max_model_len`."""
    if tokens > longest:
        raise ValueError(f"{what} make {tokens} tokens, but max_model_len is {longest}: raise it, or lower the length")


def import_vllm(settings: VllmSettings) -> None:
    """Import vLLM, or raise an error that says how to install it."""
    try:
        with _STARTING, environment(settings):
            import vllm.v1.engine.async_llm  # noqa: F401
    except ImportError as missing:
        raise ImportError(f"this engine needs vLLM: {install_command('vllm')}") from missing


def start_llm(model_dir: Path, settings: VllmSettings, worker_part: str) -> "AsyncLLM":
    """Start an `AsyncLLM` whose workers have the class `worker_part` mixed in; block until it is ready.

    Engines of one process start one after another, because the environment belongs to the whole process.
    """
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    known = {field.name for field in fields(AsyncEngineArgs)}
    if unknown := [name for name in settings.extra if name not in known]:
        raise ConfigError(
            [f"engine.extra.{name} is not an engine argument of vLLM; {_nearest(name, known)}" for name in unknown]
        )
    arguments = {**settings.engine_arguments(model_dir), "worker_extension_cls": worker_part}
    with _STARTING, environment(settings), tied_children():
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))


def _nearest(name: str, known: Iterable[str]) -> str:
    hint = suggest_nearest(name, sorted(known))
    return hint if hint.startswith("did") else "`vllm serve --help` lists them"


def on_gpu() -> bool:
    """Return whether engines of this process run on a GPU."""
    return torch.accelerator.is_available()


@contextlib.contextmanager
def environment(settings: VllmSettings) -> Iterator[None]:
    """Set the environment that vLLM's processes inherit; restore it afterwards."""
    variables = {
        "VLLM_CPU_KVCACHE_SPACE": str(settings.kv_cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(settings.threads),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # `tied_children` does not reach forked ones
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
    }
    if "VLLM_LOGGING_LEVEL" not in os.environ:
        variables["VLLM_LOGGING_LEVEL"] = "ERROR"
    if not on_gpu():  # compiling takes half a minute on CPU and gains nothing measurable
        variables["TORCH_COMPILE_DISABLE"] = "1"
    elif settings.devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = pinned(settings.devices, os.environ.get("CUDA_VISIBLE_DEVICES"))
    with temporary_environment(variables):
        yield


def pinned(devices: Sequence[int], visible: str | None) -> str:
    """Return CUDA_VISIBLE_DEVICES for some of the devices that this process sees, in this order.

    >>> pinned([1, 3], None), pinned([1], "4,6"), pinned([0], "GPU-8932f937,GPU-27c1a3b4")
    ('1,3', '6', 'GPU-8932f937')
    """
    names = visible.split(",") if visible else None
    if names is None:
        return ",".join(map(str, devices))
    if beyond := [device for device in devices if device >= len(names)]:
        raise ConfigError([f"GPU {beyond[0]} does not exist here: CUDA_VISIBLE_DEVICES is {visible!r}"])
    return ",".join(names[device] for device in devices)
