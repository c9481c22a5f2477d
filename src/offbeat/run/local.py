"""A run in one process: trainer, workers, scoring and the loop, wired from a configuration. Breakpoints work."""

import asyncio
import gc
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from offbeat.config import Config
from offbeat.events import EventKind
from offbeat.experience.ledger import Ledger
from offbeat.experience.maintenance import Maintenance
from offbeat.rollout.worker import Worker
from offbeat.run.build import RunContext, load_tokenizer, make_loop, make_task, make_worker
from offbeat.run.desk import Desk
from offbeat.run.directory import RunDirectory, RunLock
from offbeat.run.evaluation import PolicyEvaluation
from offbeat.run.journal import last_word
from offbeat.run.learner import LocalLearner, RankLearner
from offbeat.run.loop import Loop
from offbeat.run.sinks import open_journal
from offbeat.scoring.pool import ScoringPool
from offbeat.types import Json
from offbeat.weights.subscriber import Subscription


def train(config: Config, directory: RunDirectory, *, watching: Callable[[Mapping[str, Json]], None] | None = None,
          started: Callable[[Loop], None] | None = None) -> Ledger:  # fmt: skip
    """A run from its first step to its last, or from its last checkpoint where there is one.

    Args:
        config: What to do.
        directory: Where; made by `RunDirectory.create`.
        watching: Is told every event as it is written.
        started: Is given the loop, whose `stop` ends the run early.
    """
    with RunLock(directory), ExitStack() as stack:
        local = LocalRun(config, directory, stack, watching)
        gc.freeze()  # what is there now stays: the collector need not look at it again and again
        try:
            with last_word(local.journal, lambda: local.rank.trainer.step):
                return asyncio.run(local.run(started))
        finally:
            gc.unfreeze()


@dataclass
class LocalRun:
    """The parts of a run."""

    config: Config
    directory: RunDirectory
    stack: ExitStack
    watching: Callable[[Mapping[str, Json]], None] | None = None
    workers: dict[str, Worker] = field(default_factory=dict)

    def __post_init__(self) -> None:
        config, place, enter = self.config, self.directory, self.stack.enter_context
        self.setting = RunContext(config, place, make_task(config), load_tokenizer(config))
        self.setting.tokenizer.save_pretrained(place.tokenizer)
        self.rank = RankLearner.open(config, place, self.setting.task, self.setting.tokenizer, self.stack)
        self.log = enter(self.setting.open_log(self.rank.trainer.policy_model.vocabulary, "driver"))
        enter(Maintenance(self.log.tables))
        self.pool = enter(
            ScoringPool.of(self.setting.task, workers=config.task.scorers, memory_mib=config.task.memory_mib)
        )
        self.journal = enter(open_journal(place, config.run.sinks, self.watching))

    async def run(self, started: Callable[[Loop], None] | None) -> Ledger:
        setting, model = self.setting, self.rank.trainer.policy_model.model
        evaluation = PolicyEvaluation(self.config, setting.task, setting.tokenizer, self.pool, model)
        learner, kept = LocalLearner(self.rank), self.rank.restore()
        loop = make_loop(setting, self.log, self.journal, learner, self.member, evaluation, kept)
        if started is not None:
            started(loop)
        self.journal.write(EventKind.ESTIMATED, learner.step, **self.rank.estimate())
        return await loop.run()

    def member(self, name: str, desk: Desk) -> "LocalMember":
        """A worker of this process."""
        worker, policies = make_worker(self.setting, name, desk, self.pool, self.log)
        self.workers[name] = worker
        return LocalMember(worker, policies)


@dataclass
class LocalMember:
    """A worker of this process, as a `Member` of the fleet."""

    worker: Worker
    policies: Subscription
    _heard: int = 0

    async def work(self) -> None:
        await self.worker.run()

    async def nudge(self) -> None:
        self.worker.nudge()

    async def close(self) -> None:
        self.worker.stop()
        self.policies.close()

    def news(self) -> list[str]:
        told, self._heard = self._heard, len(self.worker.tally.notices)
        return self.worker.tally.notices[told:]

    @property
    def groups(self) -> int:
        return self.worker.tally.groups
