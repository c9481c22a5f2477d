"""A run of weeks in compressed time: `python -m lab.torture.soak` (50,000 steps, hours) and a writer that never pauses.

    python -m lab.torture.soak                          rows hardening.4.*
    python -m lab.torture.soak --steps 5000             a tenth of it; recorded only from 50,000 steps on
    python -m lab.torture.soak --saturate 600           the writer alone, for so many seconds: row hardening.4.writer

The loop, the desk, the sampler, the journal and both sides of the experience log are the run's own, with real Lance and
real compaction. The trainer and the engine return at once, so a step takes milliseconds instead of seconds; compaction
looks at the tables ten times a second instead of every five seconds, and clean-up keeps old versions for seconds
instead of minutes. Memory is that of the steps; the ledger at the end of the run is stated beside it.
"""

import asyncio
import multiprocessing
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Final

import numpy as np

from lab.bench.driver import InstantLearner
from lab.figures import Figure, command_parser, machine, report
from offbeat.experience.background import Maintenance
from offbeat.experience.lance_table import Table
from offbeat.experience.ledger import LedgerEvent, LedgerEventKind
from offbeat.experience.log import ExperienceLog
from offbeat.experience.modes import Fresh
from offbeat.experience.sampler import Sampler, SamplerLimits
from offbeat.experience.schema import Tables
from offbeat.rollout.prompt_leases import PromptLease, PromptLeases
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
from offbeat.trainer.allocator import share_freed_memory
from offbeat.types import Group, Score, VersionSpan
from tests.fixtures.groups import RULES, make_group
from tests.fixtures.memory import resident_bytes
from tests.fixtures.runs import scratch

FULL: Final = 50_000
BATCH: Final = 4
LAG: Final = 4
SAMPLES: Final = 400
WARM: Final = 2_000
"""The step whose memory later ones are compared with; a twenty-fifth of a shorter soak."""
KEEP: Final = timedelta(seconds=20)
TIDY_SECONDS: Final = 0.1
GROWTH_GOAL, MEMORY_GOAL, FRAGMENT_GOAL = 1.1, 1.2, 2_000
SETTLED: Final = 60.0
"""Seconds: a shorter trial has too few compactions to tell growth from a wave."""
SHORT_GROWTH_GOAL: Final = 1.5
"""For a shorter soak: a tenth of it has one or two merges, so its mean depends on when they happen."""


class InstantWorker:
    """A worker whose engine answers at once. It records and appends as a real one does."""

    def __init__(self, name: str, desk: Desk, log: ExperienceLog) -> None:
        self._name, self._desk, self._log = name, desk, log
        self._template = make_group(0, size=4, tokens=8)
        self.groups = self.version = 0

    async def work(self) -> None:
        await self._desk.serving(self._name, 0)
        while True:
            leases = await self._desk.take(BATCH, self._name)
            if not leases:
                continue
            ids = [lease.group_id for lease in leases]
            started = [LedgerEvent(one, LedgerEventKind.STARTED, by=self._name) for one in ids]
            await asyncio.to_thread(self._log.record, started)
            await asyncio.shield(asyncio.wrap_future(self._log.submit(map(self._group, leases))))
            await self._desk.finish(ids)
            self.groups += len(ids)

    def _group(self, lease: PromptLease) -> Group:
        answers = tuple(
            replace(
                one, id=f"{lease.group_id}/{at}", versions=(VersionSpan(self.version, 0, 8),), score=Score(at % 2.0)
            )
            for at, one in enumerate(self._template.completions)
        )
        return Group(lease.group_id, lease.prompt, answers)

    async def nudge(self) -> None:
        await self._desk.serving(self._name, self.version)

    async def close(self) -> None: ...

    def news(self) -> list[str]:
        return []


@dataclass(frozen=True)
class Sample:
    """What a run occupies at a step."""

    step: int
    manifests: int
    """Bytes of the newest manifest of all tables: what each commit writes again."""
    data: int
    """Bytes of all files that the newest versions need."""
    fragments: int
    memory: int

    @classmethod
    def take(cls, step: int, tables: Tables) -> "Sample":
        all_tables = (tables.groups, tables.scores, tables.events, tables.quarantine)
        fragments = [fragment.metadata for table in all_tables for fragment in table.refresh().get_fragments()]
        data = sum(file.file_size_bytes or 0 for fragment in fragments for file in fragment.files)
        return cls(step, sum(map(_newest_manifest, all_tables)), data, len(fragments), resident_bytes())


def _newest_manifest(table: Table) -> int:
    for path in sorted((Path(table.uri) / "_versions").glob("*.manifest"))[:3]:
        try:
            return path.stat().st_size
        except FileNotFoundError:
            continue
    return 0


async def soak(place: Path, steps: int) -> list[Sample]:
    """Train so many steps and return samples."""
    share_freed_memory()  # as every run does
    clock = asyncio.get_running_loop().time
    admission = ConcurrentAdmission(LAG, BATCH)
    leases = PromptLeases(lambda at: make_group(at % 8, tokens=1).prompt, name="r", seed=0, seconds=60)
    desk = Desk(leases, admission, clock)
    plan = RunPlan(steps, BATCH, BATCH, refill=5, save_every=0, patience=600, poll_seconds=1)
    workers: list[InstantWorker] = []
    samples: list[Sample] = []
    with FileJournal(place / "events.jsonl") as journal, ExperienceLog.open(place / "log", rules=RULES) as log:

        def member(name: str) -> InstantWorker:
            workers.append(InstantWorker(name, desk, log))
            return workers[-1]

        learner = InstantLearner(workers)  # type: ignore[arg-type]
        rates = EngineEvaluation(desk, lambda version: [], 60, 60, clock)
        rounds = EvaluationRounds(rates, EvaluationSchedule(0), journal, overlap=True)
        loop = Loop(plan, log, Sampler(Fresh(), SamplerLimits(BATCH, LAG), seed=0), desk, admission,
                    Fleet(member, ["0"], desk, journal, fruitless=3), learner, Fixed(1), journal, Health(()),
                    Stopwatch(clock), clock, rounds)  # fmt: skip
        with Maintenance(log.tables, every=TIDY_SECONDS, keep=KEEP):
            running = asyncio.create_task(loop.run())
            began = time.monotonic()
            while not running.done():
                await asyncio.sleep(0.1)
                if learner.step >= len(samples) * steps / SAMPLES:
                    samples.append(await asyncio.to_thread(Sample.take, learner.step, log.tables))
                    if len(samples) % (SAMPLES // 20) == 1:
                        print(f"{samples[-1]}, {learner.step / (time.monotonic() - began):.1f} steps/s", flush=True)
            ledger = await running
            samples.append(Sample.take(learner.step, log.tables))
    ledger.check()
    return samples


def tenth(samples: Sequence[Sample], number: int) -> Sequence[Sample]:
    """Return the samples of one tenth of the run, counted from 0."""
    last = samples[-1].step
    return [one for one in samples if number * last <= 10 * one.step <= (number + 1) * last]


def soak_rows(samples: Sequence[Sample], steps: int) -> list[Figure]:
    second, final = tenth(samples, 1), tenth(samples, 9)

    def manifest(part: Sequence[Sample]) -> float:
        return sum(one.manifests for one in part) / len(part)

    def growth(part: Sequence[Sample]) -> float:
        slope, _ = np.polyfit([one.step for one in part], [one.data for one in part], 1)
        return float(slope)

    warm = next(one for one in samples if one.step >= min(WARM, steps // 25))
    memory = max(one.memory for one in final if one.step < steps) / warm.memory
    goal = GROWTH_GOAL if steps >= FULL else SHORT_GROWTH_GOAL
    grown, kept = manifest(final) / manifest(second), growth(final) / growth(second)
    note = f"{steps} steps; {machine()}"
    return [
        Figure("hardening.4.manifests", "manifest bytes that a commit writes, last tenth against the second",
               f"≤ {goal}", round(grown, 3), "times", grown <= goal, steps,
               f"{manifest(second):.0f} and {manifest(final):.0f} bytes in four tables; fragments are merged in "
               f"tiers, so a log ten times as long has a few more of them; {note}"),
        Figure("hardening.4.tables", "table bytes that a step adds, last tenth against the second", f"≤ {goal}",
               round(kept, 3), "times", kept <= goal, steps,
               f"{growth(second):.0f} and {growth(final):.0f} bytes a step, {note}"),
        Figure("hardening.4.memory", f"resident memory of the driver, last tenth against step {warm.step}", "≤ 1.2",
               round(memory, 3), "times", memory <= MEMORY_GOAL, steps,
               f"{warm.memory >> 20} MiB then; {samples[-1].memory >> 20} MiB with the ledger of the end, {note}"),
    ]  # fmt: skip


def write_without_pause(place: str, ended: Event) -> None:
    """Append one group after another until `ended` is set."""
    with ExperienceLog.open(place, rules=RULES, writer="writer") as log:
        number = 0
        while not ended.is_set():
            log.append([make_group(number, size=4, tokens=8)])
            number += 1


def saturate(place: Path, seconds: float) -> Figure:
    """Compact beside a writer in another process; return the row with the largest number of fragments."""
    context = multiprocessing.get_context("spawn")
    ended = context.Event()
    with ExperienceLog.open(place / "log", rules=RULES) as log:
        writer = context.Process(target=write_without_pause, args=(str(place / "log"), ended))
        writer.start()
        sizes: list[int] = []
        try:
            while not log.tables.groups.rows():  # it loads libraries first
                time.sleep(0.1)
            with Maintenance(log.tables) as maintenance:
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    time.sleep(0.5)
                    sizes.append(len(log.tables.groups.fragment_sizes()))
                failures = maintenance.failures
        finally:
            ended.set()
            writer.join(60)
            writer.kill()
        groups, most = log.tables.groups.rows(), max(sizes)
    half = len(sizes) // 2
    growing = max(sizes[half:]) > 1.5 * max(sizes[:half])
    holds = most <= FRAGMENT_GOAL and (not growing or seconds < SETTLED)
    return Figure(
        "hardening.4.writer", "fragments of a table beside a writer that never pauses, at most", f"≤ {FRAGMENT_GOAL}",
        most, "fragments", holds, groups,
        f"{groups} commits in {seconds:g} s, at most {max(sizes[half:])} fragments in the second half, "
        f"{failures} compactions failed; {machine()}",
    )  # fmt: skip


def main() -> bool:
    parser = command_parser(__doc__, short="300 steps, or a writer for 10 seconds")
    parser.add_argument("--steps", type=int, default=FULL)
    parser.add_argument("--saturate", type=float, default=0.0, metavar="SECONDS")
    asked = parser.parse_args()
    with scratch() as place:
        if asked.saturate:
            return report(asked.short, saturate(place, 10.0 if asked.short else asked.saturate))
        steps = 300 if asked.short else asked.steps
        return report(steps < FULL, *soak_rows(asyncio.run(soak(place, steps)), steps))


if __name__ == "__main__":
    sys.exit(not main())
