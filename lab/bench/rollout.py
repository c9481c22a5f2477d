"""Measure what a worker costs besides its engine, and check the drift cadence.

    python -m lab.bench.rollout speed     tokens a second through worker, scoring and append against bare AsyncLLM:
                                          row weights-rollout.5; 20 minutes
    python -m lab.bench.rollout cadence   properties of the drift cadence: row weights-rollout.8

The arms of `speed` take turns with the same prompts, in the opposite order in every other round.
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lab.figures import Figure, command_parser, machine, record
from lab.fixtures.pytest_runs import run_tests
from lab.learning.statistics import Interval
from offbeat.experience.log import ExperienceLog
from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.generation import GroupMaker
from offbeat.rollout.prompt_leases import LocalPrompts, PromptLease, PromptLeases
from offbeat.rollout.worker import Pace, Worker
from offbeat.sandbox.meter import descendants
from offbeat.scoring.pool import ScoringPool
from offbeat.seeds import derive
from offbeat.tasks.arithmetic import arithmetic
from offbeat.tasks.task import prompt_at
from offbeat.weights.probe import Probe, probe_sequences
from offbeat.weights.publisher import WeightLog
from offbeat.weights.subscriber import Subscription
from tests.fixtures.watched import processor_seconds

if TYPE_CHECKING:
    from offbeat.rollout.vllm import VllmEngine


@dataclass(frozen=True)
class Setting:
    """What to generate, and how often."""

    model: Path
    groups: int
    size: int
    tokens: int
    rounds: int
    dtype: str = "bfloat16"


@dataclass
class Bench:
    """An engine, a worker around it, and fresh prompts."""

    setting: Setting
    engine: "VllmEngine"
    worker: Worker
    prompts: LocalPrompts
    sampling: Sampling

    async def leases(self) -> list[PromptLease]:
        return await self.prompts.take(self.setting.groups, "bench")

    async def through_worker(self, leases: list[PromptLease]) -> int:
        """Generate as the lanes of a worker do: one call per group, all at once, until every group is on disk."""
        groups = await asyncio.gather(*(self.worker.rollout([lease]) for lease in leases))
        return sum(len(one.token_ids) for [group] in groups for one in group.completions)

    async def bare(self, leases: list[PromptLease]) -> int:
        """Generate from the same prompts, parameters and seeds with `AsyncLLM.generate` alone."""
        size, sampling = self.setting.size, self.sampling
        asked = [Request(lease.group_id, lease.prompt.token_ids, size, sampling, lease.seed) for lease in leases]
        return await generate_bare(self.engine, asked)


async def generate_bare(engine: "VllmEngine", requests: Sequence[Request]) -> int:
    """Generate with `AsyncLLM.generate` alone, and return how many tokens."""
    from vllm import SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind

    async def one(request: Request, index: int) -> int:
        params = SamplingParams(
            n=1,
            seed=derive(request.seed, index),
            temperature=request.sampling.temperature,
            max_tokens=request.sampling.max_tokens,
            stop_token_ids=list(request.sampling.stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = tokens_input(request.prompt_ids.tolist(), cache_salt=f"bare {request.id}")
        count = 0
        async for output in engine._llm.generate(prompt, params, f"bare {request.completion_id(index)}"):
            count = len(output.outputs[0].token_ids)
        return count

    return sum(await asyncio.gather(*(one(request, i) for request in requests for i in range(request.size))))


@asynccontextmanager
async def bench(setting: Setting, place: Path) -> AsyncIterator[Bench]:
    """Start vLLM, a weight log with version 0, a scoring pool and an experience log on disk."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from offbeat.rollout.engine import Engine
    from offbeat.rollout.hf import HfEngine
    from offbeat.rollout.vllm import VllmEngine

    tokenizer = AutoTokenizer.from_pretrained(str(setting.model), local_files_only=True)
    task = arithmetic()
    model = AutoModelForCausalLM.from_pretrained(str(setting.model), dtype=setting.dtype)
    order = prompt_at(task, tokenizer, 0)
    some = [order(place).token_ids.tolist() for place in range(4)]
    sequences = probe_sequences(some, model.config.vocab_size, seed=0)
    with WeightLog.open(place / "weights") as weights:
        weights.publish(0, model.state_dict().items(), Probe(sequences, await HfEngine(model).logprobs(sequences)))
    engines: list[VllmEngine] = []

    async def start() -> Engine:
        started = await VllmEngine.start(
            setting.model,
            dtype=setting.dtype,
            max_model_len=64 + setting.tokens,
            max_num_seqs=setting.groups * setting.size,
            threads=os.cpu_count() or 1,
        )
        engines.append(started)
        return started

    sampling = Sampling(setting.tokens, (tokenizer.eos_token_id,))
    desk = LocalPrompts(PromptLeases(order, name="bench", seed=0, seconds=3600))
    with (
        ExperienceLog.open(place / "experience") as log,
        ScoringPool.of(task, workers=2) as pool,
        Subscription.open(place / "weights", name="bench") as policies,
    ):
        maker = GroupMaker(setting.size, sampling, lambda ids: str(tokenizer.decode(ids)), pool)
        worker = Worker("bench", start, policies, desk, maker, log, Pace(lanes=setting.groups))
        try:
            await worker.start()
            yield Bench(setting, engines[0], worker, desk, sampling)
        finally:
            await worker.close()


@dataclass(frozen=True)
class TokenCost:
    """What one way to generate took for a token."""

    wall: float
    processor: float
    """Of this process and all that it has started."""


async def compare(setting: Setting, place: Path) -> list[tuple[TokenCost, TokenCost]]:
    """Return the turn of the worker and that of the bare engine, for each round. The order changes from round to round.

    A round is one turn of each with the same prompts.
    """
    turns = []
    async with bench(setting, place) as ready:
        await ready.through_worker(await ready.leases())  # the first calls of a process are slower
        for number in range(setting.rounds):
            leases = await ready.leases()
            ways: list[Callable[[list[PromptLease]], Awaitable[int]]] = [ready.through_worker, ready.bare]
            took: dict[int, TokenCost] = {}
            for way in (0, 1) if number % 2 else (1, 0):
                began, used = time.perf_counter(), used_so_far()
                tokens = await ways[way](leases)
                took[way] = TokenCost((time.perf_counter() - began) / tokens, (used_so_far() - used) / tokens)
            turns.append((took[0], took[1]))
            rates = ", ".join(
                f"{name} {1 / took[way].wall:.0f} tokens/s" for way, name in enumerate(("worker", "bare"))
            )
            print(f"round {number}: {rates}", flush=True)
    return turns


def used_so_far() -> float:
    """Return the processor time of this process and of those that it has started and that still run."""
    return sum(map(processor_seconds, [os.getpid(), *descendants(os.getpid())]))


def speed() -> bool:
    """Row weights-rollout.5."""
    from lab.fixtures import smollm2

    setting = Setting(smollm2.directory(), groups=8, size=8, tokens=48, rounds=30)
    with tempfile.TemporaryDirectory() as place:
        turns = asyncio.run(compare(setting, Path(place)))
    ratios = sorted(bare.wall / worker.wall for worker, bare in turns)
    found = Interval.of(ratios)
    on_processor = Interval.of([bare.processor / worker.processor for worker, bare in turns])
    rate = 1 / statistics.median(bare.wall for _, bare in turns)
    return record(
        Figure(
            "weights-rollout.5",
            "tokens per second, worker + scoring + append / bare AsyncLLM.generate, SmolLM2-135M, 64 sequences",
            "lower limit of the 95 % interval ≥ 0.97",
            round(found.low, 3),
            "×",
            found.low >= 0.97,
            len(ratios),
            f"mean {found} over {len(ratios)} rounds by turns, lowest {ratios[0]:.3f}, highest {ratios[-1]:.3f}; by "
            f"processor time of all processes {on_processor}; bare {rate:.0f} "
            f"tokens/s; {machine()}; scoring, packing and the append share the two cores with the engine",
        )
    )


def cadence() -> bool:
    """Row weights-rollout.8: the properties of tests/run/test_cadence.py, with hypothesis."""
    run = run_tests("tests/run/test_cadence.py")
    print(run.output)
    return record(
        Figure(
            "weights-rollout.8",
            "Drift cadence: never before min, never after max, monotone in the budget, no flapping, resumable",
            "all properties hold",
            run.last_line.split(" in ")[0],
            "tests",
            run.ok,
            4 * 1000 + 300,
            "1,000 random courses of drift for each of four properties, with delays of 0 to 6 steps until a publish "
            "shows in batches; 300 for resuming",
        )
    )


if __name__ == "__main__":
    commands = {"speed": speed, "cadence": cadence}
    parser = command_parser(__doc__)
    parser.add_argument("what", choices=commands)
    sys.exit(not commands[parser.parse_args().what]())
