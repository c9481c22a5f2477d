"""The engines of a run, started from its configuration. `config/parts.py` says which function starts which kind.

engine.kind ── a name ──► start_hf, start_vllm
            └─ file.py:name ──► your class or function, with the same arguments
"""

import inspect
from typing import cast

import torch

from offbeat.config import Config
from offbeat.config.parts import EngineKind
from offbeat.errors import OwnPartError
from offbeat.imports import load_own
from offbeat.placement.plan import ENGINE_SHARE, EnginePlace
from offbeat.rollout.engine import Engine
from offbeat.run.build_trainer import adapter_spec
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
    from offbeat.rollout.vllm_settings import fitting_length

    path, engine = config.model.directory(), config.engine
    longest = max(engine.max_prompt_tokens + config.sampling.max_tokens, PROBE_LENGTH + 1)
    return await VllmEngine.start(
        path,
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
