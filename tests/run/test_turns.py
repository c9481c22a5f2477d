"""Trainer and engine on one GPU: they take turns, and nobody computes in the other's turn."""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import nn

from offbeat.config import Config
from offbeat.errors import DeadlinePassed, EngineDead
from offbeat.placement.hardware import Hardware
from offbeat.placement.nearest import plan_devices
from offbeat.placement.plan import DevicePlan
from offbeat.placement.shape import ModelShape
from offbeat.rollout.engine import Engine, Request, Sampling, Weights
from offbeat.run import local
from offbeat.run.directory import RunDirectory
from offbeat.run.turns import GpuUser, SharedEngine, SharedGpu
from offbeat.trainer.optimizer import MasterAdamW, OptimizerSettings, Schedule
from offbeat.types import Completion
from tests.run.test_local import config, model, parameters

__all__ = ["model"]
REQUEST = Request("g", [1, 2], 2, Sampling(4, (0,)), seed=0)


@dataclass
class WatchedEngine:
    """An engine that records what happens to it, and fails if it is used asleep."""

    history: list[str]
    seconds: float = 0.0
    dies: bool = False
    version: int | None = 0
    holds_several: bool = False
    awake: bool = field(default=True)

    async def generate(self, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        assert self.awake
        self.history.append("generate")
        await asyncio.sleep(self.seconds)
        assert self.awake, "put to sleep while it was generating"
        self.history.append("generated")
        return []

    async def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[NDArray[np.float32]]:
        assert self.awake
        return []

    async def load(self, version: int, weights: Weights) -> None:
        assert self.awake
        self.history.append("load")

    def serve(self) -> None:
        self.history.append("serve")

    async def sleep(self) -> None:
        if self.dies:
            raise EngineDead("gone")
        self.awake = False
        self.history.append("sleep")

    async def wake(self) -> None:
        assert not self.awake
        self.awake = True
        self.history.append("wake")

    async def health(self) -> None:
        self.history.append("health")

    async def close(self) -> None:
        self.history.append("close")


def started(engine: WatchedEngine) -> Awaitable[Engine]:
    async def start() -> Engine:
        return cast(Engine, engine)

    return start()


def test_the_engine_sleeps_exactly_while_the_trainer_works() -> None:
    history: list[str] = []

    async def scenario() -> None:
        engine = WatchedEngine(history)
        gpu = SharedGpu(lambda turn: history.append(f"optimizer for the {turn}"), patience=5)
        async with gpu.take(GpuUser.TRAINER):
            history.append("train")
        shared = await gpu.start(lambda: started(engine))
        await shared.generate([REQUEST])
        async with gpu.take(GpuUser.TRAINER):
            history.append("train")
            await shared.health()
        async with gpu.take(GpuUser.TRAINER):
            history.append("publish")
        await shared.load(1, {})
        await shared.close()

    asyncio.run(scenario())
    assert history == [
        "train",
        "optimizer for the engine",
        "generate",
        "generated",
        "sleep",
        "optimizer for the trainer",
        "train",
        "health",
        "publish",
        "optimizer for the engine",
        "wake",
        "load",
        "close",
    ]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(["train", "generate", "load"]), min_size=1, max_size=12))
def test_calls_at_the_same_time_never_overlap_with_the_other_side(calls: list[str]) -> None:
    async def scenario() -> None:
        engine = WatchedEngine([], seconds=0.001)
        gpu = SharedGpu(lambda turn: None, patience=5)
        shared = await gpu.start(lambda: started(engine))

        async def call(what: str) -> None:
            if what == "train":
                async with gpu.take(GpuUser.TRAINER):
                    assert not engine.awake
                    await asyncio.sleep(0.001)
                    assert not engine.awake
            elif what == "load":
                await shared.load(1, {})
            else:
                await shared.generate([REQUEST])

        await asyncio.gather(*(call(what) for what in calls))

    asyncio.run(scenario())


def test_a_trainer_that_waits_too_long_is_told_for_whom() -> None:
    async def scenario() -> None:
        gpu = SharedGpu(lambda turn: None, patience=0.05)
        shared = await gpu.start(lambda: started(WatchedEngine([], seconds=1)))
        busy = asyncio.create_task(shared.generate([REQUEST]))
        await asyncio.sleep(0)
        with pytest.raises(DeadlinePassed, match="engine to end its turn on the GPU that it shares with the trainer"):
            async with gpu.take(GpuUser.TRAINER):
                pass
        busy.cancel()

    asyncio.run(scenario())


def test_an_engine_that_dies_on_the_way_to_sleep_does_not_stop_the_trainer() -> None:
    async def scenario() -> list[str]:
        engine = WatchedEngine([], dies=True)
        gpu = SharedGpu(lambda turn: None, patience=5)
        await gpu.start(lambda: started(engine))
        async with gpu.take(GpuUser.TRAINER):
            pass
        replaced = await gpu.start(lambda: started(WatchedEngine([])))
        assert isinstance(replaced, SharedEngine) and gpu.turn is GpuUser.ENGINE
        return engine.history

    assert asyncio.run(scenario()) == ["close"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_that_was_away_makes_the_same_update(dtype: torch.dtype) -> None:
    results = []
    for away in (False, True):
        torch.manual_seed(0)
        linear = nn.Linear(3, 2, dtype=dtype)
        optimizer = MasterAdamW(linear, OptimizerSettings(Schedule(1e-2)))
        for step in range(3):
            if away:
                optimizer.move("cpu")
            linear(torch.ones(1, 3, dtype=dtype)).sum().backward()
            optimizer.update(step)
        results.append(linear.weight.detach().clone())
    assert results[0].equal(results[1])


@pytest.mark.engine
def test_a_run_in_turns_computes_the_same_bits(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config(model, steps=4, sync={"every": 2})
    alone, shared = RunDirectory(tmp_path / "alone"), RunDirectory(tmp_path / "shared")
    alone.create(asked)
    local.train(asked, alone)
    plans: list[DevicePlan] = []

    def small_gpu(config: Config) -> DevicePlan:
        hardware, shape = Hardware(1, 1, 24), ModelShape(151936, 896, 4864, 24, 14, 2, 64, tied=True, qkv_bias=True)
        plans.append(plan_devices(config, shape, hardware))
        return plans[-1]

    monkeypatch.setattr(local, "plan_here", small_gpu)
    shared.create(asked)
    local.train(asked, shared)
    assert plans[0].engines[0].sleeps, "on 24 GiB half a billion parameters and their engine must take turns"
    theirs = parameters(shared, asked)
    for name, tensor in parameters(alone, asked).items():
        assert tensor.equal(theirs[name]), name
