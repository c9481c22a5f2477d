"""Load versions of an adapter while SmolLM2-135M generates 64 sequences.

python -m lab.lora.loading rate      tokens a second with and without loads by turns: row lora.3.rate; half an hour
python -m lab.lora.loading served    seconds from publish to served, beside sequences and on an idle engine, and the
                                     version spans of all completions: rows lora.3.*; ten minutes
"""

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lab.figures import Figure, command_parser, machine, report
from lab.fixtures import smollm2
from offbeat.experience.log import ExperienceLog
from offbeat.rollout.engine import Engine, Sampling
from offbeat.rollout.generation import GroupMaker
from offbeat.rollout.prompt_leases import LocalPrompts, PromptLeases
from offbeat.rollout.vllm import VllmEngine
from offbeat.rollout.worker import Pace, Worker
from offbeat.scoring.pool import ScoringPool
from offbeat.tasks.arithmetic import arithmetic
from offbeat.tasks.task import prompt_at
from offbeat.weights.probe import Sequences, probe_sequences
from offbeat.weights.publisher import WeightLog
from offbeat.weights.subscriber import Subscription
from tests.fixtures.adapted_model import AdaptedModel

GROUPS, SIZE = 8, 8
MOVE = 3e-4
"""How far a version moves every value of A and B: a step of Adam at a usual learning rate for adapters."""


@dataclass
class Bench:
    """A worker around vLLM, the log it reads from, and fresh prompts."""

    worker: Worker
    log: ExperienceLog
    weights: WeightLog
    adapted: AdaptedModel
    sequences: Sequences
    prompts: LocalPrompts
    policies: Subscription
    published: int = 0

    def publish(self) -> int:
        """Publish the next version, with its probe, and return its number."""
        self.published += 1
        state = self.adapted.move(self.published, MOVE)
        self.weights.publish(self.published, state.items(), self.adapted.probe(self.sequences))
        return self.published

    async def generate(self) -> int:
        """Make 8 groups of 8 as the lanes of a worker do, and return how many tokens they have."""
        leases = await self.prompts.take(GROUPS, "bench")
        made = await asyncio.gather(*(self.worker.rollout([lease]) for lease in leases))
        return sum(len(one.token_ids) for [group] in made for one in group.completions)


@asynccontextmanager
async def bench(place: Path, tokens: int) -> AsyncIterator[Bench]:
    """Open the logs and make a worker, which is not started yet. Completions have exactly `tokens` tokens."""
    from transformers import AutoTokenizer

    directory, task = smollm2.directory(), arithmetic()
    tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    adapted = AdaptedModel.open(directory, dtype="bfloat16")
    order = prompt_at(task, tokenizer, 0)
    sequences = probe_sequences([order(i).token_ids.tolist() for i in range(4)], len(tokenizer), seed=0)
    desk = LocalPrompts(PromptLeases(order, name="bench", seed=0, seconds=3600))

    async def start() -> Engine:
        return await VllmEngine.start(
            directory,
            max_model_len=64 + tokens,
            max_num_seqs=GROUPS * SIZE,
            threads=os.cpu_count() or 1,
            adapter=adapted.spec,
        )

    with (
        WeightLog.open(place / "weights", adapter=adapted.spec, keep=100) as weights,
        ExperienceLog.open(place / "experience") as log,
        ScoringPool.of(task, workers=2) as pool,
        Subscription.open(place / "weights", name="bench") as policies,
    ):
        weights.publish(0, adapted.adapter.items(), adapted.probe(sequences))
        maker = GroupMaker(SIZE, Sampling(tokens, ()), lambda ids: str(tokenizer.decode(ids)), pool)
        pace = Pace(lanes=GROUPS)
        worker = Worker("bench", start, policies, desk, maker, log, pace, adapted.spec)
        try:
            yield Bench(worker, log, weights, adapted, sequences, desk, policies)
        finally:
            await worker.close()


async def rates(ready: Bench, *, rounds: int) -> list[tuple[float, float]]:
    """Return (with a load, without) tokens a second of each round. The order changes from round to round."""

    async def load(version: int) -> None:
        await asyncio.sleep(seconds / 2)
        await ready.worker.sync(version)

    await ready.generate()  # the first calls of a process are slower
    began = time.perf_counter()
    await ready.generate()
    seconds = time.perf_counter() - began
    found = []
    for number in range(rounds):
        version = ready.publish()
        rate = {}
        for loading in (True, False) if number % 2 else (False, True):
            began = time.perf_counter()
            loader = asyncio.create_task(load(version)) if loading else None
            tokens = await ready.generate()
            rate[loading] = tokens / (time.perf_counter() - began)
            if loader is not None:
                await loader
        found.append((rate[True], rate[False]))
        print(f"round {number}: {rate[True]:.0f} tokens/s with a load, {rate[False]:.0f} without", flush=True)
    return found


async def served(ready: Bench) -> float:
    """Publish a version; return the seconds until it was served.

    They begin when the version exists and end when new requests are generated with it: listing, fetch, load and probe.
    """
    await asyncio.to_thread(ready.publish)
    began = time.perf_counter()
    newest = await asyncio.to_thread(ready.policies.newest)
    assert newest is not None
    await ready.worker.sync(newest)
    seconds = time.perf_counter() - began
    print(f"version {newest} served after {seconds:.3f} s", flush=True)
    return seconds


async def served_while_generating(ready: Bench, *, loads: int, completions: int) -> list[float]:
    """Publish versions, spread over so many completions; return the seconds until each was served."""
    last = completions // SIZE

    async def lane() -> None:
        while ready.worker.tally.groups < last:
            await ready.worker.rollout(await ready.prompts.take(1, "bench"))

    lanes = [asyncio.create_task(lane()) for _ in range(GROUPS)]
    seconds = []
    for number in range(1, loads + 1):
        while ready.worker.tally.groups < number * last // (loads + 1):
            await asyncio.sleep(0.05)
        seconds.append(await served(ready))
    await asyncio.gather(*lanes)
    return seconds


async def measure_rate(short: bool) -> list[Figure]:
    """Row lora.3.rate."""
    rounds, tokens = (1, 8) if short else (20, 96)
    with tempfile.TemporaryDirectory() as place:
        async with bench(Path(place), tokens) as ready:
            await ready.worker.start()
            pairs = await rates(ready, rounds=rounds)
    ratios = sorted(a / b for a, b in pairs)
    ratio = statistics.median(ratios)
    note = (
        f"median of {rounds} rounds by turns, a load with its probe in each, lowest {ratios[0]:.3f}, highest "
        f"{ratios[-1]:.3f}; without loads {statistics.median(bare for _, bare in pairs):.0f} tokens/s; {machine()}"
    )
    what = f"tokens per second during {rounds} loads / without loads, SmolLM2-135M, 64 sequences"
    return [Figure("lora.3.rate", what, "≥ 0.97", round(ratio, 3), "×", ratio >= 0.97, rounds, note)]


async def measure_served(short: bool) -> list[Figure]:
    """Rows lora.3.served, lora.3.idle, lora.3.interrupted and lora.3.spans."""
    loads, completions, tokens = (1, 64, 8) if short else (20, 5_000, 16)  # many completions in little time
    with tempfile.TemporaryDirectory() as place:
        async with bench(Path(place), tokens) as ready:
            await ready.worker.start()
            began = time.perf_counter()
            busy = await served_while_generating(ready, loads=loads, completions=completions)
            rate = ready.worker.tally.tokens / (time.perf_counter() - began)
            idle = [await served(ready) for _ in range(loads)]
            interrupted = ready.worker.tally.discarded
            made = [one for group in ready.log.groups() for one in group.completions]
    whole = sum(len(one.versions) == 1 for one in made)
    versions = {span.version for one in made for span in one.versions}
    wait, alone = statistics.median(busy), statistics.median(idle)
    what = "median time from publish to served, SmolLM2-135M, rank 8"
    parts = "listing, fetch, load, probe"
    step = f"a step of the engine takes about {GROUPS * SIZE / rate:.2f} s; without sequences see lora.3.idle"
    return [
        Figure(
            "lora.3.served",
            f"{what}, 64 sequences being generated",
            "≤ 0.5",
            round(wait, 3),
            "s",
            wait <= 0.5,
            loads,
            f"{min(busy):.3f} to {max(busy):.3f} s: {parts}; {step}; {machine()}",
        ),
        Figure(
            "lora.3.idle",
            f"{what}, nothing being generated",
            "stated",
            round(alone, 3),
            "s",
            True,
            loads,
            f"{min(idle):.3f} to {max(idle):.3f} s: {parts}",
        ),
        Figure(
            "lora.3.interrupted",
            "groups interrupted by loads",
            "0",
            interrupted,
            "groups",
            interrupted == 0,
            len(made) // SIZE,
        ),
        Figure(
            "lora.3.spans",
            "completions with exactly one version span",
            "all",
            whole,
            f"of {len(made)}",
            whole == len(made) and (short or whole >= 5_000),
            len(made),
            f"{len(versions)} versions",
        ),
    ]


PARTS: Final = {"rate": measure_rate, "served": measure_served}


def main() -> bool:
    parser = command_parser(__doc__, short="one load, short completions; records nothing")
    parser.add_argument("part", choices=PARTS, nargs="?")
    options = parser.parse_args()
    parts = [PARTS[options.part]] if options.part else PARTS.values()
    figures = [figure for part in parts for figure in asyncio.run(part(options.short))]
    return report(options.short, *figures) or options.short


if __name__ == "__main__":
    sys.exit(not main())
