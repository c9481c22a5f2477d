"""The engines of a run, started on the GPUs of its device plan. `config/parts.py` has the function of each kind.

engine.kind ── a name ──► start_hf, start_vllm
            └─ file.py:name ──► your class or function, with the same arguments
"""

import inspect
import logging
from collections.abc import Callable
from typing import cast

import torch

from offbeat.config import Config
from offbeat.config.parts import EngineKind
from offbeat.errors import OwnPartError
from offbeat.imports import load_own
from offbeat.placement.hardware import DRIVER, Hardware
from offbeat.placement.nearest import plan_devices
from offbeat.placement.plan import ENGINE_SHARE, DevicePlan, EnginePlace
from offbeat.placement.shape import ModelShape
from offbeat.rollout.engine import Engine
from offbeat.run.learner import adapter_spec
from offbeat.run.turns import GpuUser, SharedGpu
from offbeat.trainer.trainer import Trainer
from offbeat.weights.probe import LENGTH as PROBE_LENGTH


async def start_engine(config: Config, place: EnginePlace | None = None) -> Engine:
    """Start an engine that serves the model the run began with, on the GPUs that the device plan gives it."""
    start = load_own(EngineKind.of(config.engine.kind).start)
    if not callable(start):
        raise OwnPartError(f"engine.kind = {config.engine.kind!r} is no class or function: {start!r:.80}")
    engine = start(config, place)
    return cast(Engine, await engine if inspect.isawaitable(engine) else engine)


def start_hf(config: Config, place: EnginePlace | None) -> Engine:
    """Start an engine of transformers."""
    from offbeat.rollout.hf import HfEngine

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    device = f"{accelerator.type}:{place.devices[0]}" if accelerator is not None and place is not None else None
    return HfEngine.start(
        config.model.directory(), dtype=config.model.serve, device=device, adapter=adapter_spec(config)
    )


async def start_vllm(config: Config, place: EnginePlace | None) -> Engine:
    """Start an engine of vLLM, in a process of its own."""
    from offbeat.rollout.vllm import VllmEngine
    from offbeat.rollout.vllm_settings import VllmSettings, fitting_length

    path, engine = config.model.directory(), config.engine
    longest = max(engine.max_prompt_tokens + config.sampling.max_tokens, PROBE_LENGTH + 1)
    settings = VllmSettings(
        dtype=config.model.serve,
        max_model_len=fitting_length(path, longest),
        max_num_seqs=config.workers.groups_at_once * config.group_size,
        on_update=engine.on_update,
        threads=engine_threads(config, torch.get_num_threads()),
        kv_cache_gib=engine.kv_cache_gib,
        gpu_memory_utilization=place.share if place else engine.gpu_memory_utilization or ENGINE_SHARE,
        answer_within=config.run.silence,
        tensor_parallel=engine.tensor_parallel,
        devices=place.devices if place else None,
        sleeps=place.sleeps if place else False,
        adapter=adapter_spec(config),
        slots=config.adapter_slots,
        extra=engine.extra,
    )
    return await VllmEngine.start(path, settings)


def engine_threads(config: Config, cores: int) -> int:
    """Return the CPU threads of a vLLM process.

    >>> from offbeat.config import parse
    >>> engine_threads(parse({}), cores=8)
    8
    >>> engine_threads(parse({"run": {"mode": "concurrent"}}), cores=8)
    4
    """
    if config.engine.threads is not None:
        return config.engine.threads
    free = cores if config.run.mode == "lockstep" else cores // 2
    return max(1, free // (config.workers.count * config.engine.tensor_parallel))


logger = logging.getLogger(__name__)


def plan_run(config: Config, hardware: Hardware | None) -> DevicePlan | None:
    """Return the plan; None without a GPU.

    Raises `CannotPlace` if the run does not fit, and `ModelUnreadable` if the model's memory cannot be estimated.
    """
    if hardware is None:
        return None
    return plan_devices(config, ModelShape.read(config.model.directory()), hardware)


def plan_here(config: Config) -> DevicePlan | None:
    """Plan a run on this machine, and make the trainer's GPU the one that torch uses in this process."""
    plan = plan_run(config, Hardware.detect())
    if plan is None and DRIVER.exists():
        logger.warning("this machine has an NVIDIA driver, but torch %s sees no GPU: the run uses the CPU; install a "
                       "torch with CUDA, and look with `offbeat doctor --gpu`", torch.__version__)  # fmt: skip
    if plan is not None:
        torch.cuda.set_device(plan.ranks[0][1])
    return plan


def shared_gpu(plan: DevicePlan | None, trainer: Trainer, patience: float) -> SharedGpu | None:
    """Return the GPU that trainer and engine share in turns; None if each has a GPU or memory for itself."""
    if plan is None or not any(engine.sleeps for engine in plan.engines):
        return None
    return SharedGpu(_mover(plan, trainer), patience)


def _mover(plan: DevicePlan, trainer: Trainer) -> Callable[[GpuUser], None]:
    device = trainer.policy_model.device

    def move(turn: GpuUser) -> None:
        if plan.offloads:
            to = torch.device("cpu") if turn is GpuUser.ENGINE else device
            trainer.optimizer.move(to)
            trainer.policy_model.move_frozen(to)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps for itself is missing in the engine's turn

    return move
