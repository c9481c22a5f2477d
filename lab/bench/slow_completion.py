"""Check what a slow completion costs, and that evaluation on the run's engines measures the same as the trainer.

    python -m lab.bench.slow_completion            2 minutes; writes rows gpu.7.*
    python -m lab.bench.slow_completion --short    fewer steps; records nothing

The runs are real: a tiny model, the transformers engine, the real clock. One completion is made slow by a sleep around
the engine's call.
"""

import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast
from unittest.mock import patch

import torch

from lab.bench.reuse import tiny
from lab.figures import Figure, command_parser, machine, report
from lab.learning import model
from offbeat.config import Config, parse
from offbeat.rollout.engine import Request
from offbeat.rollout.hf import HfEngine
from offbeat.run.build import load_tokenizer, make_task
from offbeat.run.directory import RunDirectory
from offbeat.run.evaluation import PolicyEvaluation
from offbeat.run.journal import read
from offbeat.run.local import train
from offbeat.run.loop import Loop
from offbeat.scoring.pool import ScoringPool
from offbeat.types import Completion, Json
from tests.fixtures.own_learner import own_learner

LEASE_SECONDS = 0.5
SLOW_GROUP = "g-1"


@contextmanager
def calls_of_engines(seconds: float = 0.0) -> Iterator[list[tuple[Request, int]]]:
    """Yield the requests of all transformers engines, each with the completions in flight on its engine.

    A call with the slow group takes `seconds` longer and holds the engine, so that loads wait for it.
    """
    found: list[tuple[Request, int]] = []
    in_flight: Counter[int] = Counter()
    generate, sample = HfEngine.generate, HfEngine._generate

    async def watched(engine: HfEngine, requests: Sequence[Request]) -> list[tuple[Completion, ...]]:
        size = sum(request.size for request in requests)
        in_flight[id(engine)] += size
        found.extend((request, in_flight[id(engine)]) for request in requests)
        try:
            return await generate(engine, requests)
        finally:
            in_flight[id(engine)] -= size

    def slowed(
        engine: HfEngine, requests: Sequence[Request], version: int, stop: threading.Event
    ) -> list[tuple[Completion, ...]]:
        if any(request.id == SLOW_GROUP for request in requests):
            time.sleep(seconds)
        return sample(engine, requests, version, stop)

    with patch.object(HfEngine, "generate", watched), patch.object(HfEngine, "_generate", slowed):
        yield found


def ran(config: Config, place: Path, started: Callable[[Loop], None] | None = None) -> list[dict[str, Json]]:
    """Train a run and return its events."""
    directory = RunDirectory(place)
    directory.create(config)
    train(config, directory, started=started)
    return list(read(directory.events))


def slow_group(steps: int) -> tuple[Figure, Figure]:
    """Rows gpu.7.engines and gpu.7.once."""
    config = parse(
        {"steps": steps, "prompts_per_step": 4, "group_size": 4, **tiny(model.directory()),
         "run": {"mode": "concurrent", "max_lag": steps}, "workers":
         {"count": 2, "groups_at_once": 1, "lease_seconds": LEASE_SECONDS}}
    )  # fmt: skip
    times: Counter[str] = Counter()

    with tempfile.TemporaryDirectory() as scratch, calls_of_engines(10 * LEASE_SECONDS) as calls:
        with patch.object(HfEngine, "start", wraps=HfEngine.start) as starts:
            events = ran(config, Path(scratch, "run"))
        engines = starts.call_count
    times.update(request.id for request, _ in calls)
    order = [request.id for request, _ in calls]
    lost = engines - config.workers.count
    troubles = Counter(str(event["kind"]) for event in events if str(event["kind"]).startswith("worker "))
    note = (
        f"lease of {LEASE_SECONDS} s, completion of {10 * LEASE_SECONDS} s; {len(times)} groups by "
        f"{config.workers.count} workers, {len(order) - order.index(SLOW_GROUP) - 1} of them begun after the slow one; "
        f"worker events: {dict(troubles)}; {machine()}"
    )
    return (
        Figure("gpu.7.engines", "engines lost in a run with one completion ten times slower than its lease", "0", lost,
               "engines", lost == 0 and troubles["worker lost"] == 0, len(times), note),
        Figure("gpu.7.once", "times that the slow group was generated", "1", times[SLOW_GROUP], "", times[SLOW_GROUP]
               == 1 and max(times.values()) == 1, len(times), f"no group over {max(times.values())} times; {note}"),
    )  # fmt: skip


def evaluations(steps: int) -> tuple[Figure, Figure]:
    """Rows gpu.7.evaluation and gpu.7.rows."""
    config = parse(
        {"steps": steps, "prompts_per_step": 8, "group_size": 4, **tiny(model.directory()),
         "workers": {"groups_at_once": 8}, "evaluation": {"every": 2, "prompts": 128, "samples": 6}}
    )  # fmt: skip
    limit = config.workers.groups_at_once * config.group_size
    trainer: dict[int, Mapping[str, Json]] = {}
    task, tokenizer = make_task(config), load_tokenizer(config)

    with tempfile.TemporaryDirectory() as scratch, ScoringPool.of(task, workers=1) as pool:

        def compare(loop: Loop) -> None:
            own = own_learner(loop).rank.trainer.policy_model.model
            on_trainer, on_engines = PolicyEvaluation(config, task, tokenizer, pool, own), loop.rounds.rates

            async def both(version: int) -> Mapping[str, Json]:
                trainer[version] = await on_trainer(version)
                return await on_engines(version)

            loop.rounds.rates = both

        with calls_of_engines() as calls:
            events = ran(config, Path(scratch, "run"), compare)
    worst, seen = 0.0, []
    for event in events:
        if event["kind"] == "evaluated":
            value, low, high = cast(list[float], event["pass@1"])
            other = cast(list[float], trainer[cast(int, event["version"])]["pass@1"])[0]
            worst = max(worst, abs(value - other) / ((high - low) / 2))
            seen.append(f"version {event['version']}: {value:.3f} and {other:.3f}")
    largest = max(rows for request, rows in calls if request.id.startswith("evaluation-"))
    return (
        Figure("gpu.7.evaluation", "largest difference of pass@1, engines against the trainer's model at the same "
               "version, in half-widths of the interval", "≤ 1", round(worst, 4), "half-widths", worst <= 1 and
               len(seen) == steps // 2 + 1, len(seen), f"128 prompts, 6 samples, the same seeds; {'; '.join(seen)}"),
        Figure("gpu.7.rows", "most completions in flight on an engine during evaluation, of what training may use",
               "≤ 1", round(largest / limit, 4), "", largest <= limit, len(seen),
               f"{largest} of {limit} = groups_at_once × group_size, on the trainer's model too; "
               f"{128 * 6} in one batch"),
    )  # fmt: skip


def main(short: bool) -> bool:
    torch.set_num_threads(1)
    return report(short, *slow_group(8 if short else 20), *evaluations(4 if short else 20))


if __name__ == "__main__":
    sys.exit(not main(command_parser(__doc__, short="a few steps each; record nothing").parse_args().short))
