"""Runs of an engine that serves several adapters, for `python -m lab.lora.serving` and the tests of the engine."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lab.lora.faults import KINDS
from lab.lora.versions import AdaptedModel, State
from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.parity import Prober
from offbeat.rollout.vllm import VllmEngine
from offbeat.rollout.vllm_worker import WorkerPart
from offbeat.types import UNKNOWN, Completion
from offbeat.weights.probe import Sequences


@asynccontextmanager
async def adapter_engine(
    directory: Path,
    adapted: AdaptedModel,
    *,
    slots: int = 3,
    dtype: str = "float32",
    max_num_seqs: int = 16,
    threads: int = 1,
    worker_part: type[WorkerPart] = WorkerPart,
) -> AsyncIterator[VllmEngine]:
    """Start an engine for adapters of a base."""
    engine = await VllmEngine.start(
        directory,
        dtype=dtype,
        max_model_len=256,
        max_num_seqs=max_num_seqs,
        threads=threads,
        adapter=adapted.spec,
        slots=slots,
        _extension=f"{worker_part.__module__}.{worker_part.__name__}",
    )
    try:
        yield engine
    finally:
        await engine.close()


@dataclass(frozen=True)
class Written:
    """A completion, its prompt, and the adapter that was loaded as its version."""

    prompt: list[int]
    completion: Completion
    adapter: State

    def gap(self, adapted: AdaptedModel) -> float:
        """Return the largest |Δlogp| to merged weights, over its tokens."""
        assert self.completion.behavior_logprobs is not UNKNOWN
        ids = [*self.prompt, *self.completion.token_ids.tolist()]
        values = adapted.merged_logprobs(self.adapter, ids)[len(self.prompt) - 1 :]
        return float(np.abs(values - self.completion.behavior_logprobs).max())


async def versions_in_one_batch(
    engine: VllmEngine, adapted: AdaptedModel, prompts: Sequence[list[int]], *, versions: int, tokens: int, size: float
) -> list[Written]:
    """Load versions after the one that `adapted` holds, and generate with each of them at the same time."""
    first = engine.version or 0
    running: list[asyncio.Task[list[tuple[Completion, ...]]]] = []
    states = []
    for number in range(versions):
        if number:
            await engine.load(first + number, adapted.move(first + number, size).items())
            engine.serve()
        states.append(dict(adapted.adapter))
        requests = [Request(f"{number}-{i}", one, 1, Sampling(tokens, ()), seed=i) for i, one in enumerate(prompts)]
        running.append(asyncio.create_task(engine.generate(requests)))
        await asyncio.sleep(0)
    await asyncio.sleep(0.05)
    if any(task.done() for task in running):
        raise RuntimeError("the first versions ended before the last one began: ask for more tokens")
    groups = [await task for task in running]
    return [
        Written(prompt, completion, state)
        for group, state in zip(groups, states, strict=True)
        for prompt, [completion] in zip(prompts, group, strict=True)
    ]


async def faults_noticed(
    engine: VllmEngine, adapted: AdaptedModel, sequences: Sequences, *, each: int, size: float
) -> dict[str, int]:
    """Load right and wrong versions in turn into an engine with `FaultyAdapters`; count the wrong ones noticed."""
    prober = await Prober.calibrated(engine, adapted.probe(sequences))
    noticed = dict.fromkeys(KINDS, 0)
    for number in range(each * len(KINDS)):
        for version in (2 * number + 1, 2 * number + 2):
            await engine.load(version, adapted.move(version, size).items())
            verdict = await prober.check(engine, adapted.probe(sequences))
            if version % 2 and not verdict.passed:
                raise AssertionError(f"version {version} is right, but {verdict}")
        noticed[KINDS[number % len(KINDS)]] += not verdict.passed
    return noticed
