"""A run follows its device plan: each engine gets the devices and the share of memory that the plan gives it."""

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from offbeat.config import Config, parse
from offbeat.errors import CannotPlace, ModelUnreadable
from offbeat.objective.presets import PRESETS
from offbeat.placement.hardware import Hardware
from offbeat.placement.plan import EnginePlace
from offbeat.rollout import vllm
from offbeat.rollout.vllm_settings import VllmSettings
from offbeat.run import engines
from offbeat.run.engines import engine_threads, plan_run, shared_gpu, start_engine
from offbeat.run.turns import GpuUser
from offbeat.weights.probe import LENGTH
from tests.trainer.small import a_trainer

MODELS = Path(__file__).parent.parent / "placement" / "models"


def write_model(place: Path, config: str) -> None:
    """Write a model directory that the gate accepts; nothing loads its weights."""
    (place / "config.json").write_text(config)
    save_file({"w": np.zeros(1, np.float32)}, place / "model.safetensors")


@pytest.fixture
def half_billion(tmp_path: Path) -> Config:
    write_model(tmp_path, (MODELS / "qwen2.5-0.5b.json").read_text(encoding="utf-8"))
    return parse({"model": {"path": str(tmp_path)}})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the settings with which an engine is started."""
    found: dict[str, Any] = {}

    async def start(model_dir: Path, settings: VllmSettings) -> None:
        found.update(vars(settings))

    monkeypatch.setattr(vllm.VllmEngine, "start", start)
    return found


def test_an_engine_starts_where_the_plan_puts_it(half_billion: Config, asked: dict[str, Any]) -> None:
    plan = plan_run(half_billion, Hardware.parse("1x24"))
    assert plan is not None
    asyncio.run(start_engine(half_billion, plan.engines[0]))
    assert asked["devices"] == (0,) and asked["sleeps"] == plan.engines[0].sleeps
    assert asked["gpu_memory_utilization"] == plan.engines[0].share < 0.9
    asyncio.run(start_engine(half_billion, EnginePlace(0, (2, 3), 0.9)))
    assert asked["devices"] == (2, 3) and not asked["sleeps"]


def test_an_engine_can_read_its_probe_however_short_completions_are(tmp_path: Path, asked: dict[str, Any]) -> None:
    write_model(tmp_path, "{}")
    short = parse({"model": {"path": str(tmp_path)}, "engine": {"max_prompt_tokens": 8}, "sampling": {"max_tokens": 4}})
    asyncio.run(start_engine(short))
    assert asked["max_model_len"] > LENGTH


def test_engines_share_the_cores_that_the_trainer_leaves(half_billion: Config, asked: dict[str, Any]) -> None:
    asyncio.run(start_engine(half_billion))
    assert asked["threads"] == torch.get_num_threads()
    for run, workers, engine, threads in [
        ({}, {"count": 3}, {}, 2),
        ({}, {"count": 2}, {"tensor_parallel": 2}, 2),
        ({"mode": "concurrent"}, {}, {}, 4),
        ({"mode": "concurrent"}, {"count": 8}, {}, 1),
        ({"mode": "concurrent"}, {}, {"threads": 7}, 7),
    ]:
        config = parse({"run": {**run, "place": "ray"}, "workers": workers, "engine": engine})
        assert engine_threads(config, cores=8) == threads


def test_without_a_gpu_there_is_no_plan(half_billion: Config) -> None:
    assert plan_run(half_billion, None) is None


def test_a_run_that_does_not_fit_is_refused_before_anything_is_loaded(half_billion: Config) -> None:
    with pytest.raises(CannotPlace, match="nearest that fits"):
        plan_run(half_billion, Hardware.parse("1x8"))


def test_a_model_that_cannot_be_estimated_is_refused_on_gpus(tmp_path: Path) -> None:
    write_model(tmp_path, json.dumps({"model_type": "mixtral", "num_local_experts": 8}))
    with pytest.raises(ModelUnreadable, match="mixture of experts"):
        plan_run(parse({"model": {"path": str(tmp_path)}}), Hardware.parse("8x80"))


def test_a_torch_without_cuda_beside_a_driver_is_named(
    half_billion: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "version").write_text("NVRM version: 580.1")
    monkeypatch.setattr(engines, "DRIVER", tmp_path / "version")
    with caplog.at_level(logging.WARNING):
        assert engines.plan_here(half_billion) is None
    assert "sees no GPU: the run uses the CPU" in caplog.text


def test_only_an_engine_that_sleeps_shares_the_gpu_in_turns(half_billion: Config) -> None:
    trainer = a_trainer(PRESETS["grpo"].objective)
    turns = plan_run(half_billion, Hardware.parse("1x20"))
    alone = plan_run(half_billion, Hardware.parse("2x24"))
    assert turns is not None and turns.engines[0].sleeps
    assert shared_gpu(None, trainer, 60) is None and shared_gpu(alone, trainer, 60) is None
    gpu = shared_gpu(turns, trainer, 60)
    assert gpu is not None and gpu.turn is GpuUser.TRAINER
    gpu.move_optimizer(GpuUser.ENGINE)
    gpu.move_optimizer(GpuUser.TRAINER)
