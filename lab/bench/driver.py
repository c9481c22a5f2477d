"""Measure the driver of a run: the process with loop, desk, sampler and log, without engines and without training.

    python -m lab.bench.driver     groups of 8 × 1,024 tokens that one core's driver takes through a run in a second:
                                   row throughput.6.driver; two minutes

Another process plays the workers: it appends the groups to the log, so its time does not count. The trainer returns at
once. Everything else is the run's own: leases, admission, polling, draws, reading batches, fates, events.
`--short` measures two seconds and records nothing.
"""

import asyncio
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import numpy as np

from lab.figures import Figure, command_parser, machine, report
from offbeat.experience.log import ExperienceLog
from offbeat.experience.modes import Fresh
from offbeat.experience.sampler import Sampler, SamplerLimits
from offbeat.rollout.prompt_leases import PromptLeases
from offbeat.run.admission import ConcurrentAdmission
from offbeat.run.cadence import Fixed
from offbeat.run.desk import Desk
from offbeat.run.evaluation.leases import EvaluationSchedule
from offbeat.run.evaluation.rates import EngineEvaluation, EvaluationRounds
from offbeat.run.fleet import Fleet
from offbeat.run.health import Health
from offbeat.run.journal import FileJournal, Stopwatch
from offbeat.run.loop import Loop
from offbeat.run.protocols import RunPlan
from offbeat.trainer.trainer import Trained
from offbeat.types import Completion, Group, GroupDrift, Json, PublishedDrift, Score, StepContext, VersionSpan
from tests.fixtures.groups import RULES, make_group

BATCH: Final = 128
LAG: Final = 10
TOKENS: Final = 1_024
AT_ONCE: Final = 64
"""Groups that a worker takes, and appends, in one call."""


def play_workers(place: str, calls: Connection) -> None:
    """Append groups with the ids that arrive, and answer. Ends with an empty message."""
    templates = [make_group(number, tokens=TOKENS) for number in range(AT_ONCE)]
    with ExperienceLog.open(place, rules=RULES, writer="workers") as log:
        while message := calls.recv():
            ids, version = message
            log.append([_renamed(one, id_, version) for one, id_ in zip(templates, ids, strict=False)])
            calls.send(len(ids))


def _renamed(group: Group, id_: str, version: int) -> Group:
    def completion(at: int, one: Completion) -> Completion:
        return replace(one, id=f"{id_}/{at}", versions=(VersionSpan(version, 0, TOKENS),), score=Score(float(at % 2)))

    return replace(group, id=id_, completions=tuple(completion(at, one) for at, one in enumerate(group.completions)))


class WorkersElsewhere:
    """A member of the fleet: its prompts go to the process that appends."""

    def __init__(self, name: str, desk: Desk, calls: Connection) -> None:
        self._name, self._desk, self._calls = name, desk, calls
        self.groups = 0
        self.version = 0

    async def work(self) -> None:
        while True:
            await self._desk.serving(self._name, self.version)
            leases = await self._desk.take(AT_ONCE, self._name)
            if not leases:
                continue
            ids = [lease.group_id for lease in leases]
            self._calls.send((ids, self.version))
            await asyncio.to_thread(self._calls.recv)
            await self._desk.finish(ids)
            self.groups += len(ids)

    async def nudge(self) -> None: ...

    async def close(self) -> None: ...

    def news(self) -> list[str]:
        return []


class InstantLearner:
    """A trainer that takes no time."""

    def __init__(self, member: list[WorkersElsewhere]) -> None:
        self.step = 0
        self._members = member

    def check(self) -> None: ...

    async def finish(self) -> None: ...

    async def train(self, groups: Sequence[Group], context: StepContext) -> Trained:
        self.step += 1
        ids = tuple(group.id for group in groups)
        drift = {one: GroupDrift(0.01, 0.01) for one in ids}
        published = PublishedDrift(tokens=8 * TOKENS * len(ids), tv=0.01, wasted=0.0)
        return Trained(self.step, 1, ids, (), (), published, drift, {"reward_mean": 0.5}, {}, {})

    async def publish(self, version: int) -> Mapping[str, Json]:
        for member in self._members:
            member.version = version
        return {}

    async def save(self, state: Mapping[str, Json]) -> None: ...


async def drive(place: Path, calls: Sequence[Connection], seconds: float) -> tuple[int, float, float]:
    """Run for so long; return groups trained, and the driver's seconds by clock and of processor."""
    clock = asyncio.get_running_loop().time
    admission = ConcurrentAdmission(LAG, BATCH)
    leases = PromptLeases(lambda at: make_group(at % 8, tokens=1).prompt, name="r", seed=0, seconds=60)
    desk = Desk(leases, admission, clock)
    plan = RunPlan(10**9, BATCH, BATCH, refill=5, save_every=0, patience=60, poll_seconds=1)
    members: list[WorkersElsewhere] = []

    def member(name: str) -> WorkersElsewhere:
        members.append(WorkersElsewhere(name, desk, calls[int(name)]))
        return members[-1]

    learner = InstantLearner(members)
    with FileJournal(place / "events.jsonl") as journal, ExperienceLog.open(place / "log", rules=RULES) as log:
        rates = EngineEvaluation(desk, lambda version: [], 60, 60, clock)
        rounds = EvaluationRounds(rates, EvaluationSchedule(0), journal, overlap=True)
        fleet = Fleet(member, [str(n) for n in range(len(calls))], desk, journal, fruitless=3)
        loop = Loop(plan, log, Sampler(Fresh(), SamplerLimits(BATCH, LAG), seed=0), desk, admission, fleet, learner,
                    Fixed(1), journal, Health(()), Stopwatch(clock), clock, rounds)  # fmt: skip
        running = asyncio.create_task(loop.run())
        while learner.step < 10 and not running.done():  # start-up does not count
            await asyncio.sleep(0.1)
        before = learner.step, time.monotonic(), time.process_time()
        await asyncio.sleep(seconds)
        after = learner.step, time.monotonic(), time.process_time()
        loop.stop("measured")
        await running
    return (after[0] - before[0]) * BATCH, after[1] - before[1], after[2] - before[2]


def main() -> bool:
    short = command_parser(__doc__, short="two seconds").parse_args().short
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as place:
        ExperienceLog.open(Path(place) / "log", rules=RULES).close()
        ours, theirs = context.Pipe()
        worker = context.Process(target=play_workers, args=(f"{place}/log", theirs))
        worker.start()
        try:
            groups, wall, processor = asyncio.run(drive(Path(place), [ours], 2 if short else 60))
        finally:
            ours.send(())
            worker.join(30)
            worker.kill()
    rate = groups / processor
    assert groups > 0 and np.isfinite(rate)
    row = Figure(
        "throughput.6.driver", "groups of 8 × 1,024 tokens that a processor second of the driver takes through a "
        "run", "≥ 500", round(rate), "groups/s", rate >= 500, groups,
        f"{groups / wall:.0f} groups/s by the clock over {wall:.0f} s, with one process that appends them; {machine()}",
    )  # fmt: skip
    return report(short, row)


if __name__ == "__main__":
    sys.exit(not main())
