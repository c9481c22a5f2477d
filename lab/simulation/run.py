"""Runs that crash, stall and lose messages, thousands of them, in virtual time.

The loop, desk, fleet and workers are the real ones; engines, trainer and logs are scripted.

    python -m lab.simulation.run          10,000 seeded schedules, each invariant checked in each
    python -m lab.simulation.run 17       one schedule, its journal printed
"""

import asyncio
import hashlib
import json
import multiprocessing
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from lab.figures import Figure, record
from lab.simulation import virtual_time
from lab.simulation.memory_log import MemoryLog
from lab.simulation.scripted_engine import ScriptedEngine, scripted_probe
from offbeat.errors import NoGradient
from offbeat.experience.feedback import LateScore
from offbeat.experience.ledger import Fate, LedgerEvent, LedgerEventKind
from offbeat.experience.modes import Fresh, Mode, Replay
from offbeat.experience.sampler import Sampler, SamplerLimits
from offbeat.experience.schema import Snapshot
from offbeat.rollout.engine import Engine, Request, Sampling
from offbeat.rollout.generation import GroupMaker
from offbeat.rollout.prompt_leases import PromptLease, PromptLeases
from offbeat.rollout.worker import Pace, Worker
from offbeat.run.admission import Admission, ConcurrentAdmission, LockstepAdmission
from offbeat.run.cadence import Cadence, Drift, Fixed
from offbeat.run.desk import Desk
from offbeat.run.fleet import Fleet
from offbeat.run.health import Health
from offbeat.run.journal import MemoryJournal, Stopwatch
from offbeat.run.loop import Loop
from offbeat.run.protocols import RunPlan
from offbeat.trainer.trainer import RefusedBatch, Trained
from offbeat.types import UNKNOWN, Completion, Group, Json, Prompt, Score, Unscorable
from offbeat.weights.probe import Probe

VOCABULARY = 8
SEQUENCES = ((1, 2, 3, 4), (5, 6))


class Broken(AssertionError):
    """An invariant did not hold."""


@dataclass(frozen=True)
class Weather:
    """What goes wrong, and how often: drawn from the schedule's seed."""

    engine_dies: float
    worker_dies: float
    """Chance that a worker's process is gone at some call."""
    answer_lost: float
    """Of the desk to a worker that took prompts: the leases stay out until their deadline."""
    finish_lost: float
    deaf: float
    """Chance that an engine ignores its loads."""
    refusal: float
    nothing_to_teach: float
    slow: float
    """Chance that a call takes fifty times as long."""
    driver_dies: float

    @classmethod
    def of(cls, rng: random.Random) -> "Weather":
        def some(most: float) -> float:
            return rng.choice([0.0, rng.uniform(0, most)])

        return cls(some(0.1), some(0.05), some(0.1), some(0.1), some(0.1), some(0.1), some(0.1), some(0.2), some(0.05))


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([float(version)])}


@dataclass
class World:
    """What outlives a crash of the driver: the logs, the last checkpoint, the trainer's memory of what it saw."""

    seed: int
    rng: random.Random = field(init=False)
    log: MemoryLog = field(default_factory=MemoryLog)
    versions: list[int] = field(default_factory=list)
    journal: MemoryJournal = field(default_factory=MemoryJournal)
    saved: dict[str, Json] | None = None
    saved_step: int = 0
    trained: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.weather = Weather.of(rng)
        self.steps, self.batch = rng.randint(3, 10), rng.randint(1, 5)
        every = rng.randint(1, 4)
        cadences: list[Cadence] = [Fixed(every), Drift(0.3, 1, every)]
        self.cadence = rng.choice(cadences)
        self.max_lag = every - 1 + rng.randint(0, 4)
        self.replay = rng.random() < 0.3 and self.batch > 1  # room for fresh ones too, as the configuration demands
        self.mode: Mode = Replay(share=0.5, reuse_budget=3) if self.replay else Fresh()
        self.fresh = self.batch - max(1, round(0.5 * self.batch)) if self.replay else self.batch
        self.concurrent = rng.random() < 0.8
        self.workers = rng.randint(1, 3)

    # the weight log
    def newest(self) -> int | None:
        return max(self.versions, default=None)

    def fetch(self, version: int, *, from_anchor: bool = False) -> Mapping[str, torch.Tensor]:
        return weights(version)

    def probe(self, version: int) -> Probe | None:
        return scripted_probe(weights(version).items(), VOCABULARY, SEQUENCES)


class Learner:
    """A trainer that checks what it is given, and now and then refuses it."""

    def __init__(self, world: World) -> None:
        self._world, self.step = world, world.saved_step

    def check(self) -> None:
        """Is never lost: kills end the whole world."""

    async def finish(self) -> None:
        """Saves at once."""

    async def train(self, groups: Sequence[Group]) -> Trained | RefusedBatch:
        world, rng = self._world, self._world.rng
        if not 0 < len(groups) <= world.batch or len({group.id for group in groups}) < len(groups):
            raise Broken(f"a batch of {len(groups)}")
        for group in groups:
            lag = self.step - (group.oldest_version if group.oldest_version is not None else self.step)
            if not 0 <= lag <= world.max_lag or not group.scored:
                raise Broken(f"group {group.id} of lag {lag}, allowed are 0 to {world.max_lag}")
        await asyncio.sleep(rng.expovariate(1.0))
        if rng.random() < world.weather.nothing_to_teach:
            raise NoGradient("nothing")
        if rng.random() < world.weather.refusal:
            return RefusedBatch({rng.choice(groups).id: "not finite"})
        self.step += 1
        world.trained.update(group.id for group in groups)
        metrics = {"drift_tv_token": rng.random(), "reward_mean": 0.5}
        return Trained(
            self.step, 1, tuple(group.id for group in groups), (), (), metrics.get("drift_tv_token"), metrics, {}
        )

    async def publish(self, version: int) -> Mapping[str, Json]:
        self._world.versions[:] = [one for one in self._world.versions if one < version] + [version]
        return {}

    async def save(self, state: Mapping[str, Json]) -> None:
        self._world.saved = json.loads(json.dumps(state))
        self._world.saved_step = self.step


class Graders:
    """Answers of even length are right; some cannot be graded."""

    def score(self, text: str, columns: object, *, of: str = "") -> "Future[Score | Unscorable]":
        done: Future[Score | Unscorable] = Future()
        done.set_result(Unscorable("timeout") if text == "3" else Score(float(len(text) % 2 == 0)))
        return done


@dataclass
class Line:
    """The desk behind a line that loses messages."""

    desk: Desk
    world: World

    async def serving(self, by: str, version: int | None) -> None:
        await self.desk.serving(by, version)

    async def take(self, count: int, by: str) -> list[PromptLease]:
        leases = await self.desk.take(count, by)
        return [] if self.world.rng.random() < self.world.weather.answer_lost else leases

    async def finish(self, group_ids: Sequence[str]) -> None:
        if self.world.rng.random() >= self.world.weather.finish_lost:
            await self.desk.finish(group_ids)

    async def give_back(self, group_ids: Sequence[str]) -> None:
        await self.desk.give_back(group_ids)


class Member:
    """A worker process that may be gone from one call to the next."""

    def __init__(self, name: str, world: World, desk: Desk) -> None:
        self._world = world
        rng = world.rng
        maker = GroupMaker(2, Sampling(3, (1,)), lambda ids: "".join(map(str, ids)), Graders())
        pace = Pace(rng.randint(1, 2), rng.randint(1, 3), poll_seconds=5, call_seconds=40, start_seconds=60)
        self._worker = Worker(name, self._start, world, Line(desk, world), maker, world.log, pace)  # type: ignore[arg-type]
        self._work: asyncio.Task[None] | None = None

    async def _start(self) -> Engine:
        world, rng = self._world, self._world.rng
        await asyncio.sleep(rng.uniform(0.5, 5))
        dies = rng.randint(0, 8) if rng.random() < 5 * world.weather.engine_dies else None
        deaf = rng.random() < world.weather.deaf
        return ScriptedEngine(VOCABULARY, weights(0).items(), takes=self._takes, dies_at=dies, deaf=deaf)

    async def _takes(self, request: Request) -> None:
        world, rng = self._world, self._world.rng
        await asyncio.sleep(rng.expovariate(2.0) * (50 if rng.random() < world.weather.slow else 1))
        if self._work is not None and rng.random() < world.weather.worker_dies:
            self._work.cancel()

    def news(self) -> list[str]:
        return []

    async def work(self) -> None:
        self._work = asyncio.create_task(self._worker.run())
        try:
            await self._work
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise RuntimeError("the process is gone") from None

    async def nudge(self) -> None:
        self._worker.nudge()

    async def close(self) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    @property
    def groups(self) -> int:
        return self._worker.tally.groups


async def visitor(world: World) -> None:
    """Groups of other people, unscored at first: their feedback comes later, or never."""
    for number in range(world.rng.randint(0, 4)):
        await asyncio.sleep(world.rng.expovariate(0.3))
        answers = tuple(Completion(f"guest-{number}/{i}", np.array([2, 3]), UNKNOWN, source="human") for i in range(2))
        world.log.append([Group(f"guest-{number}", Prompt(f"p{number}", np.array([1]), "t"), answers)])
        await asyncio.sleep(world.rng.expovariate(0.3))
        if world.rng.random() < 0.8:
            scores = [LateScore(f"guest-{number}", one.id, Score(float(i))) for i, one in enumerate(answers)]
            world.log.score(scores)


def build(world: World) -> Loop:
    """A driver, fresh or from the last checkpoint."""
    clock = asyncio.get_running_loop().time
    admission: Admission = ConcurrentAdmission(world.max_lag, world.fresh) if world.concurrent else LockstepAdmission()
    leases = PromptLeases(
        lambda place: Prompt(f"p{place}", np.array([place % 8]), "t"), name="r", seed=world.seed, seconds=100
    )
    sampler = Sampler(world.mode, SamplerLimits(world.batch, world.max_lag, drop_zero_variance=True), world.seed)
    cursor, published = None, -1
    if world.saved is not None:
        state = world.saved
        cursor = Snapshot.from_json(state["snapshot"])  # type: ignore[arg-type]
        sampler.feed(world.log.index_since(None, cursor)[0])
        sampler.restore(state["sampler"])  # type: ignore[arg-type]
        leases.restore(state["desk"])  # type: ignore[arg-type]
        published = int(state["published"])  # type: ignore[arg-type]
        world.versions[:] = [one for one in world.versions if one <= published]
    desk = Desk(leases, admission, clock)
    plan = RunPlan(
        world.steps,
        world.batch,
        world.fresh,
        refill=50,
        save_every=world.rng.randint(1, 4),
        patience=1000,
        poll_seconds=5,
    )
    names = [f"w{i}" for i in range(world.workers)]
    fleet = Fleet(lambda name: Member(name, world, desk), names, desk, world.journal, fruitless=20)
    return Loop(
        plan, world.log, sampler, desk, admission, fleet, Learner(world), world.cadence, world.journal, Health(()),
        Stopwatch(clock), clock, published=published, cursor=cursor,
    )  # fmt: skip


async def drive(world: World) -> None:
    """Until the last step, however often the driver dies on the way."""
    guests = asyncio.create_task(visitor(world))
    while True:
        loop = build(world)
        running = asyncio.create_task(loop.run())
        dies = world.rng.random() < world.weather.driver_dies * 10
        await asyncio.wait([running], timeout=world.rng.uniform(1, 60) if dies else 20_000)
        if running.done():
            running.result()
            break
        if not dies:
            raise Broken(f"no progress: step {loop.learner.step} after {20_000} s")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        world.journal.events.append({"step": world.saved_step, "kind": "driver died"})
    guests.cancel()
    await asyncio.gather(guests, return_exceptions=True)


def _left_by_lost_runs(events: Sequence[LedgerEvent]) -> set[str]:
    """Groups begun before the driver last died: the run that goes on may have use for other ones."""
    last = max(place for place, event in enumerate(events) if event.event is LedgerEventKind.REWOUND)
    return {event.group_id for event in events[:last] if event.event is LedgerEventKind.STARTED}


def checked(seed: int) -> tuple[str, Counter[str]]:
    """One schedule: its trace, and what happened in it. Raises `Broken`."""
    world = World(seed)
    virtual_time.run(drive(world))
    ledger = world.log.ledger()
    ledger.check()
    expired = {name for name, entry in ledger.fates.items() if entry.fate is Fate.EXPIRED and name.startswith("r-")}
    if expired - _left_by_lost_runs(world.log._events):
        raise Broken("a group of ours expired: it was begun though it could not be trained in time")
    if ledger.counts[Fate.IN_FLIGHT]:
        raise Broken(f"{ledger.counts[Fate.IN_FLIGHT]} groups are in flight after the end")
    crashes = len(world.journal.of("driver died"))
    if not crashes and not world.replay and any(times > 1 for times in world.trained.values()):
        raise Broken("a group was trained twice")
    if not world.replay and any(len(entry.steps) > 1 for entry in ledger.fates.values()):
        raise Broken("a group counts as trained twice")
    steps = sorted(step for entry in ledger.fates.values() for step in entry.steps)
    if set(steps) != set(range(1, world.steps + 1)):
        raise Broken(f"trained at steps {steps}")
    trace = json.dumps([world.journal.events, [str(event) for event in world.log._events]])
    happened = Counter({kind: len(world.journal.of(kind)) for kind in ("worker lost", "driver died", "refused")})
    happened["no gradient"] = len(world.journal.of("no gradient"))
    happened["trained"] = ledger.counts[Fate.TRAINED]
    happened["concurrent"] = world.concurrent
    return hashlib.sha256(trace.encode()).hexdigest(), happened


def simulate(schedules: int, twice: int, processes: int = 1) -> tuple[Counter[str], list[str]]:
    """Every schedule checked, the first `twice` of them run again to compare traces."""
    total: Counter[str] = Counter()
    failures = []
    jobs = [(seed, seed < twice) for seed in range(schedules)]
    with multiprocessing.get_context("spawn").Pool(processes) if processes > 1 else nullcontext() as pool:
        for happened, failure in pool.imap_unordered(_one, jobs, 50) if pool else map(_one, jobs):
            total += happened
            if failure:
                failures.append(failure)
                print("FAILED", failure, flush=True)
    return total, failures


def _one(job: tuple[int, bool]) -> tuple[Counter[str], str]:
    seed, again = job
    try:
        trace, happened = checked(seed)
        if again and checked(seed)[0] != trace:
            raise Broken("the same seed gave another trace")
    except Exception as error:  # every failure is reported with its seed
        return Counter(), f"{seed}: {error!r:.200}"
    return happened, ""


def main(schedules: int = 10_000, twice: int = 500) -> bool:
    """Must show 2."""
    began = time.monotonic()
    total, failures = simulate(schedules, twice, len(os.sched_getaffinity(0)))
    said = ", ".join(f"{count:,} {what}" for what, count in sorted(total.items()))
    return record(
        Figure(
            "run.2",
            "schedules with crashes, slow workers, lost messages, late scores: lag bound, conservation, progress hold",
            "≥ 10,000, all hold",
            f"{schedules - len(failures):,} of {schedules:,}",
            "schedules",
            schedules >= 10_000 and not failures,
            schedules,
            f"{said}; {min(twice, schedules):,} twice, the same trace byte for byte; {time.monotonic() - began:.0f} s"
            + ("" if schedules >= 10_000 else "; the others have not been run yet"),
        )
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--schedules"]:
        sys.exit(not main(int(sys.argv[2])))
    if len(sys.argv) > 1:
        world = World(int(sys.argv[1]))
        try:
            virtual_time.run(drive(world))
        finally:
            print("\n".join(map(str, world.journal.events)))
    else:
        sys.exit(not main())
