"""The parts of a simulated run: scripted engine, trainer, scorer and logs around the real loop, desk and workers.

A seed decides everything: the settings of the run and how often each fault happens.
"""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from lab.simulation.faults import CALL_SECONDS, LEASE_SECONDS, FaultRates
from lab.simulation.memory_log import MemoryLog
from lab.simulation.scripted_engine import ScriptedEngine, scripted_probe
from offbeat.errors import NoGradient
from offbeat.experience.feedback import LateScore
from offbeat.experience.modes import Fresh, Mode, Replay
from offbeat.experience.sampler import Sampler, SamplerLimits
from offbeat.experience.schema import Snapshot
from offbeat.rollout.engine import Engine, Request, Sampling
from offbeat.rollout.generation import GroupMaker
from offbeat.rollout.prompt_leases import PromptLease, PromptLeases
from offbeat.rollout.worker import Pace, Worker
from offbeat.run.admission import Admission, ConcurrentAdmission, LockstepAdmission
from offbeat.run.cadence import Cadence, Cost, Drift, Fixed
from offbeat.run.desk import Desk
from offbeat.run.evaluation_leases import EvaluationPrompt, EvaluationSchedule
from offbeat.run.evaluation_rounds import EngineEvaluation, EvaluationRounds
from offbeat.run.evidence import PublishEvidence
from offbeat.run.fleet import Fleet
from offbeat.run.health import Health
from offbeat.run.journal import MemoryJournal, Stopwatch
from offbeat.run.loop import Loop
from offbeat.run.protocols import RunPlan
from offbeat.scoring.tally import OutcomeCount
from offbeat.tasks.rewards import Answers
from offbeat.trainer.trainer import RefusedBatch, Trained
from offbeat.types import (
    UNKNOWN,
    Completion,
    Group,
    GroupDrift,
    Json,
    Prompt,
    PublishedDrift,
    Score,
    StepContext,
    Unscorable,
)
from offbeat.weights.adapter import AdapterSpec
from offbeat.weights.probe import Probe

VOCABULARY = 8
SEQUENCES = ((1, 2, 3, 4), (5, 6))


class Broken(AssertionError):
    """An invariant does not hold."""


def weights(version: int) -> dict[str, torch.Tensor]:
    return {"w": torch.tensor([float(version)])}


@dataclass
class World:
    """The state that outlives a crash of the driver: the logs, the last checkpoint, the groups trained so far."""

    seed: int
    refusing: bool = False
    """Half of all batches are refused, and every batch gets several updates."""
    refused_later: int = 0
    """Batches of which an update after the first one was refused."""
    rng: random.Random = field(init=False)
    log: MemoryLog = field(default_factory=MemoryLog)
    versions: list[int] = field(default_factory=list)
    journal: MemoryJournal = field(default_factory=MemoryJournal)
    saved: dict[str, Json] | None = None
    saved_step: int = 0
    saved_made: int = 0
    """Updates that the optimizer had made at the last checkpoint."""
    updates_of: Counter[str] = field(default_factory=Counter)
    """Updates that each group had a part in, counted where they are made; those of lost steps are taken back."""
    saved_updates_of: Counter[str] = field(default_factory=Counter)
    trained: Counter[str] = field(default_factory=Counter)
    generated: Counter[str] = field(default_factory=Counter)
    """How often an engine began each group."""

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        self.faults = FaultRates.of(rng)
        self.steps, self.batch = rng.randint(3, 10), rng.randint(1, 5)
        every = rng.randint(1, 4)
        cadences: list[Cadence] = [Fixed(every), Drift(0.3, 1, every), Cost(1, every)]
        self.cadence = rng.choice(cadences)
        self.max_lag = every - 1 + rng.randint(0, 4)
        self.replay = rng.random() < 0.3 and self.batch > 1  # a batch needs room for fresh groups, too
        self.mode: Mode = Replay(share=0.5, reuse_budget=3) if self.replay else Fresh()
        self.fresh = self.batch - max(1, round(0.5 * self.batch)) if self.replay else self.batch
        self.concurrent = rng.random() < 0.8
        self.workers = rng.randint(1, 3)
        self.updates = rng.randint(2, 8) if self.refusing else rng.randint(1, 3)
        if self.refusing:
            self.faults = replace(self.faults, refusal=0.5)
        self.evaluate_every = rng.choice([0, 0, 2, 3])
        self.retire_age = self.max_lag + rng.randint(0, 6)
        self.retire_drift = rng.choice([None, 0.5])
        self.past_limit: set[str] = set()
        """Groups whose measured drift was beyond the limit when they were last trained on, or that were refused."""
        self.saved_past_limit: set[str] = set()

    def evaluation_prompts(self, version: int) -> list[EvaluationPrompt]:
        prompts = [Prompt(f"e{place}", np.array([place]), "t") for place in range(4)]
        return [EvaluationPrompt(i, one, size=2, seed=10 * version + i) for i, one in enumerate(prompts)]

    # The methods of a weight log.
    def newest(self) -> int | None:
        return max(self.versions, default=None)

    def fetch(self, version: int, *, from_anchor: bool = False) -> Mapping[str, torch.Tensor]:
        return weights(version)

    def adapter(self, version: int) -> AdapterSpec | None:
        return None

    def probe(self, version: int) -> Probe | None:
        return scripted_probe(weights(version).items(), VOCABULARY, SEQUENCES)


class Learner:
    """A trainer that checks its batches and sometimes refuses one."""

    def __init__(self, world: World) -> None:
        self._world, self.step, self._made = world, world.saved_step, world.saved_made
        world.updates_of = Counter(world.saved_updates_of)

    def check(self) -> None:
        """The trainer is never lost by itself: a crash ends the whole driver."""

    async def finish(self) -> None:
        """Saving takes no time, so nothing is left to wait for."""

    async def train(self, groups: Sequence[Group], context: StepContext) -> Trained | RefusedBatch:
        world, rng = self._world, self._world.rng
        if not 0 < len(groups) <= world.batch or len({group.id for group in groups}) < len(groups):
            raise Broken(f"a batch of {len(groups)} groups, or one with a group twice; allowed are 1 to {world.batch}")
        for group in groups:
            lag = self.step - (group.oldest_version if group.oldest_version is not None else self.step)
            limit = world.retire_age if group.id in context.replayed else world.max_lag
            if not 0 <= lag <= limit or not group.scored:
                raise Broken(f"group {group.id} of lag {lag}, allowed are 0 to {limit}")
            if group.id in world.past_limit:
                raise Broken(f"group {group.id} is trained on again although its drift was beyond the limit")
        await asyncio.sleep(rng.expovariate(1.0))
        if rng.random() < world.faults.nothing_to_teach:
            raise NoGradient("scripted")
        faulty, refused_update = rng.choice(groups).id, 0
        if rng.random() < world.faults.refusal:
            refused_update = rng.randint(1, world.updates)
        if refused_update == 1:
            return RefusedBatch({faulty: "not finite"})
        # An update after the first one is refused: the step ends with the updates before it.
        refused = {faulty: "not finite"} if refused_update else {}
        world.refused_later += bool(refused)
        self.step += 1
        ids = tuple(group.id for group in groups)
        world.trained.update(ids)
        drift = {one: GroupDrift(rng.random(), rng.random()) for one in ids}
        if world.retire_drift is not None:
            world.past_limit |= {one for one, found in drift.items() if found.tv > world.retire_drift}
        world.past_limit |= refused.keys()
        updates = refused_update - 1 if refused else world.updates
        published = PublishedDrift(tokens=rng.choice([0, 100, 400]), tv=rng.random(), wasted=rng.random())
        self._made += updates
        world.updates_of.update(dict.fromkeys(ids, updates))
        metrics = {"reward_mean": 0.5}
        return Trained(self.step, updates, ids, (), (), published, drift, metrics, {}, refused, self._made)

    async def publish(self, version: int) -> Mapping[str, Json]:
        self._world.versions[:] = [one for one in self._world.versions if one < version] + [version]
        return {}

    async def save(self, state: Mapping[str, Json]) -> None:
        self._world.saved = json.loads(json.dumps(state))
        self._world.saved_past_limit = set(self._world.past_limit)
        self._world.saved_step, self._world.saved_made = self.step, self._made
        self._world.saved_updates_of = Counter(self._world.updates_of)


class ScriptedScorer:
    """Answers of even length are right; some cannot be scored."""

    def score_group(self, answers: Answers, of: Sequence[str] = ()) -> "Future[list[Score | Unscorable]]":
        done: Future[list[Score | Unscorable]] = Future()
        done.set_result(
            [Unscorable("timeout") if text == "3" else Score(float(len(text) % 2 == 0)) for text in answers.texts]
        )
        return done


@dataclass
class LossyDesk:
    """The desk behind a connection that loses messages."""

    desk: Desk
    world: World

    async def serving(self, by: str, version: int | None) -> None:
        await self.desk.serving(by, version)

    async def take(self, count: int, by: str) -> list[PromptLease]:
        leases = await self.desk.take(count, by)
        return [] if self.world.rng.random() < self.world.faults.answer_lost else leases

    async def renew(self, group_ids: Sequence[str], by: str) -> list[str]:
        if self.world.rng.random() < self.world.faults.renewal_lost:
            return []
        return await self.desk.renew(group_ids, by)

    async def evaluated(self, groups: Sequence[Group]) -> None:
        if self.world.rng.random() >= self.world.faults.finish_lost:
            await self.desk.evaluated(groups)

    async def finish(self, group_ids: Sequence[str], outcomes: Sequence[OutcomeCount] = ()) -> None:
        if self.world.rng.random() >= self.world.faults.finish_lost:
            await self.desk.finish(group_ids, outcomes)

    async def give_back(self, group_ids: Sequence[str]) -> None:
        await self.desk.give_back(group_ids)


class Member:
    """A worker process that may end during a call."""

    def __init__(self, name: str, world: World, desk: Desk) -> None:
        self._world = world
        rng = world.rng
        maker = GroupMaker(2, Sampling(3, (1,)), lambda ids: "".join(map(str, ids)), ScriptedScorer())
        poll = LEASE_SECONDS / 4
        pace = Pace(rng.randint(1, 2), rng.randint(1, 3), poll, call_seconds=CALL_SECONDS, start_seconds=60)
        self._worker = Worker(name, self._start, world, LossyDesk(desk, world), maker, world.log, pace)  # type: ignore[arg-type]
        self._work: asyncio.Task[None] | None = None
        self._notices_read = 0

    async def _start(self) -> Engine:
        world, rng = self._world, self._world.rng
        await asyncio.sleep(rng.uniform(0.5, 5))
        dies = rng.randint(0, 8) if rng.random() < 5 * world.faults.engine_dies else None
        deaf = rng.random() < world.faults.deaf
        return ScriptedEngine(VOCABULARY, weights(0).items(), takes=self._takes, dies_at=dies, deaf=deaf)

    async def _takes(self, request: Request) -> None:
        world, rng = self._world, self._world.rng
        world.generated[request.id] += 1
        seconds = rng.expovariate(2.0)
        if rng.random() < world.faults.slow:
            seconds = 10 * LEASE_SECONDS if rng.random() < 0.9 else 10 * CALL_SECONDS
        await asyncio.sleep(seconds)
        if self._work is not None and rng.random() < world.faults.worker_dies:
            self._work.cancel()

    def news(self) -> list[str]:
        read, self._notices_read = self._notices_read, len(self._worker.tally.notices)
        return self._worker.tally.notices[read:]

    async def work(self) -> None:
        self._work = asyncio.create_task(self._worker.run())
        try:
            await self._work
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if current is not None and current.cancelling():
                raise
            raise RuntimeError("the process has ended") from None

    async def nudge(self) -> None:
        self._worker.nudge()

    async def close(self) -> None:
        if self._work is not None:
            self._work.cancel()
            await asyncio.gather(self._work, return_exceptions=True)

    @property
    def groups(self) -> int:
        return self._worker.tally.groups


async def append_foreign_groups(world: World) -> None:
    """Append groups from elsewhere without scores. Their feedback comes later, or never."""
    for number in range(world.rng.randint(0, 4)):
        await asyncio.sleep(world.rng.expovariate(0.3))
        answers = tuple(Completion(f"guest-{number}/{i}", np.array([2, 3]), UNKNOWN, source="human") for i in range(2))
        world.log.append([Group(f"guest-{number}", Prompt(f"p{number}", np.array([1]), "t"), answers)])
        await asyncio.sleep(world.rng.expovariate(0.3))
        if world.rng.random() < 0.8:
            scores = [LateScore(f"guest-{number}", one.id, Score(float(i))) for i, one in enumerate(answers)]
            world.log.score(scores)


def build(world: World) -> Loop:
    """Build a driver, new or from the last checkpoint."""
    clock = asyncio.get_running_loop().time
    admission: Admission = ConcurrentAdmission(world.max_lag, world.fresh) if world.concurrent else LockstepAdmission()
    leases = PromptLeases(
        lambda place: Prompt(f"p{place}", np.array([place % 8]), "t"), name="r", seed=world.seed, seconds=LEASE_SECONDS
    )
    limits = SamplerLimits(
        world.batch,
        world.max_lag,
        drop_zero_variance=True,
        retire_drift=world.retire_drift,
        retire_age=world.retire_age,
    )
    sampler = Sampler(world.mode, limits, world.seed)
    cursor, published, evidence = None, -1, PublishEvidence()
    schedule = EvaluationSchedule(world.evaluate_every)
    if world.saved is not None:
        state = world.saved
        cursor = Snapshot.from_json(state["snapshot"])  # type: ignore[arg-type]
        sampler.feed(world.log.index_since(None, cursor)[0])
        sampler.restore(state["sampler"])  # type: ignore[arg-type]
        leases.restore(state["desk"])  # type: ignore[arg-type]
        published = int(state["published"])  # type: ignore[arg-type]
        evidence = PublishEvidence.restore(state["evidence"])  # type: ignore[arg-type]
        schedule.restore(state["evaluation"])  # type: ignore[arg-type]
        world.versions[:] = [one for one in world.versions if one <= published]
    world.past_limit = set(world.saved_past_limit)
    desk = Desk(leases, admission, clock)
    plan = RunPlan(
        world.steps,
        world.batch,
        world.fresh,
        refill=50,
        save_every=world.rng.randint(1, 4),
        patience=10 * CALL_SECONDS,
        poll_seconds=5,
    )
    rates = EngineEvaluation(desk, world.evaluation_prompts, LEASE_SECONDS, plan.patience, clock)
    rounds = EvaluationRounds(rates, schedule, world.journal, overlap=world.concurrent)
    names = [f"w{i}" for i in range(world.workers)]
    fleet = Fleet(lambda name: Member(name, world, desk), names, desk, world.journal, fruitless=20)
    return Loop(
        plan, world.log, sampler, desk, admission, fleet, Learner(world), world.cadence, world.journal, Health(()),
        Stopwatch(clock), clock, rounds, published=published, evidence=evidence, cursor=cursor,
    )  # fmt: skip
