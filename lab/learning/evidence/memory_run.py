"""A run with both logs in memory: the loop, the trainer, the worker and its probe are those of `offbeat train`.

A cell of the evidence asks what a policy learns, not whether a log survives a power cut, and most of its time went into
files. `tests/lab/test_memory_run.py` trains a cell both ways: the curves are equal to the last digit.
"""

import asyncio
import gc
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import cast

from torch import Tensor

from offbeat.config import Config
from offbeat.events import EventKind
from offbeat.experience.ledger import Ledger
from offbeat.experience.log import ExperienceLog
from offbeat.experience.validation import ValidationRules
from offbeat.run.build import RunContext, make_worker
from offbeat.run.desk import Desk
from offbeat.run.directory import RunDirectory
from offbeat.run.engines import start_engine
from offbeat.run.journal import MemoryJournal
from offbeat.run.learner import LocalLearner, RankLearner
from offbeat.run.local import LocalMember, LocalRun
from offbeat.run.loop import Loop
from offbeat.scoring.pool import Outcome, ScoringPool
from offbeat.tasks.rewards import Answers, examine
from offbeat.tasks.task import Task
from offbeat.types import Json
from offbeat.weights.adapter import AdapterSpec
from offbeat.weights.probe import Probe
from offbeat.weights.publisher import Published, State, WeightLog
from offbeat.weights.subscriber import Subscription
from tests.fixtures.simulation.memory_log import MemoryLog


def train_in_memory(
    config: Config, place: Path, *, started: Callable[[Loop], None], watching: Callable[[Mapping[str, Json]], None]
) -> None:
    """Train like `offbeat.run.local.train`. Only the last checkpoint is written, to the new directory `place`."""
    directory = RunDirectory(place)
    directory.create(config)
    try:
        with ExitStack() as stack:
            asyncio.run(MemoryRun(config, directory, stack, watching).run(started))
    finally:
        gc.collect()


@dataclass
class MemoryRun(LocalRun):
    """The parts of a run that stores nothing."""

    def __post_init__(self) -> None:
        config, place = self.config, self.directory
        self.plan = None
        self.context = RunContext.load(config, place)
        self.rank = RankLearner.open(config, place, self.context.task, self.context.tokenizer, self.stack)
        self.weights = MemoryWeights(self.rank.trainer.policy_model.adapter)
        self.rank.weights = cast(WeightLog, self.weights)
        task = self.context.task
        rules = ValidationRules(self.rank.trainer.policy_model.vocab_size, {task.name: task.reward_range})
        self.log = cast(ExperienceLog, MemoryLog(rules))
        self.pool = cast(ScoringPool, DirectScorer(task))
        self.journal = WatchedJournal(watching=self.watching)

    async def run(self, started: Callable[[Loop], None] | None) -> Ledger:
        def without_index_files(loop: Loop) -> None:  # they save a run that resumes from reading a long log
            loop.index_files = None
            if started is not None:
                started(loop)

        return await super().run(without_index_files)

    async def _check_memory(self, learner: LocalLearner) -> None:
        """A cell is small."""

    def make_member(self, name: str, desk: Desk) -> LocalMember:
        start = partial(start_engine, self.config)
        policies = cast(Subscription, self.weights)
        worker = make_worker(self.context, name, desk, self.pool, self.log, policies, start)
        return LocalMember(worker, policies)


@dataclass
class MemoryWeights:
    """A weight log of the newest version, for its publisher and its worker."""

    spec: AdapterSpec | None
    version: int = -1
    tensors: dict[str, Tensor] = field(default_factory=dict)
    probes: dict[int, Probe | None] = field(default_factory=dict)

    def publish(self, version: int, state: State, probe: Probe | None = None) -> Published:
        self.tensors = {name: tensor.clone() for name, tensor in state}
        self.probes[version], self.version = probe, version
        return Published(version, "anchor", state="")

    def newest(self) -> int | None:
        return self.version if self.version >= 0 else None

    def fetch(self, version: int, *, from_anchor: bool = False) -> Mapping[str, Tensor]:
        assert version == self.version
        return self.tensors

    def probe(self, version: int) -> Probe | None:
        return self.probes[version]

    def adapter(self, version: int) -> AdapterSpec | None:
        return self.spec

    def state_of(self, version: int) -> str | None:
        return None

    def rewind(self, version: int) -> list[int]:
        return []

    def drop_superseded(self) -> None: ...

    def pin(self, version: int, by: str) -> None: ...

    def unpin(self, version: int, by: str) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class DirectScorer:
    """Scores in the process of the run. For reward functions that cannot harm it."""

    task: Task

    def score_group(self, answers: Answers, of: Sequence[str] = ()) -> "Future[list[Outcome]]":
        done: Future[list[Outcome]] = Future()
        done.set_result([*examine(self.task.rewards, self.task.reward_range, answers)])
        return done


@dataclass
class WatchedJournal(MemoryJournal):
    """A journal in memory that calls `watching` with every event."""

    watching: Callable[[Mapping[str, Json]], None] | None = None

    def write(self, kind: EventKind, step: int, **fields: Json) -> None:
        super().write(kind, step, **fields)
        if self.watching is not None:
            self.watching(self.events[-1])
