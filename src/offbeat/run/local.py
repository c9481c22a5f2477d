"""A run in one process: trainer, workers, scoring pool and loop. Breakpoints work."""

import gc
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from offbeat.config import Config
from offbeat.events import EventKind
from offbeat.experience.background import Maintenance
from offbeat.experience.ledger import Ledger
from offbeat.imports import paused_collector
from offbeat.rollout.engine import Engine
from offbeat.rollout.worker import Worker
from offbeat.run.build import RunContext, make_loop, make_worker, open_pool
from offbeat.run.desk import Desk
from offbeat.run.directory import RunDirectory, RunLock
from offbeat.run.engines import plan_here, shared_gpu, start_engine
from offbeat.run.evaluation.rates import PolicyEvaluation
from offbeat.run.event_loop import run_coroutine
from offbeat.run.journal import Journal, record_failure
from offbeat.run.learner import LocalLearner, RankLearner
from offbeat.run.loop import Loop
from offbeat.run.protocols import Preparation
from offbeat.run.sinks import open_journal
from offbeat.trainer.allocator import share_freed_memory
from offbeat.types import Json
from offbeat.weights.subscriber import Subscription


def train(config: Config, directory: RunDirectory, *, watching: Callable[[Mapping[str, Json]], None] | None = None,
          started: Callable[[Loop], None] | None = None, lock: RunLock | None = None) -> Ledger:  # fmt: skip
    """Train to the last step: from the newest checkpoint if there is one, else from the first step.

    Args:
        config: The configuration.
        directory: The run directory, made by `RunDirectory.create`.
        watching: Called with every event that is written.
        started: Called with the loop before it runs; `Loop.stop` ends the run early.
        lock: The lock of the directory, if the caller has taken it; it is released at the end.
    """
    share_freed_memory()
    with lock or RunLock(directory):
        try:
            return _train(config, directory, watching, started)
        finally:
            gc.collect()  # the parts of a run refer to each other and hold a model: the next run needs its memory


def _train(config: Config, directory: RunDirectory, watching: Callable[[Mapping[str, Json]], None] | None,
           started: Callable[[Loop], None] | None) -> Ledger:  # fmt: skip
    with ExitStack() as stack:
        with paused_collector():  # transformers imports the model's code
            local = LocalRun(config, directory, stack, watching)
        gc.freeze()  # these objects live as long as the run: the collector need not visit them again
        try:
            with record_failure(local.journal, lambda: local.rank.trainer.step):
                return run_coroutine(local.run(started))
        finally:
            gc.unfreeze()


@dataclass
class LocalRun:
    """The parts of a run in this process."""

    config: Config
    directory: RunDirectory
    stack: ExitStack
    watching: Callable[[Mapping[str, Json]], None] | None = None

    def __post_init__(self) -> None:
        config, place, enter = self.config, self.directory, self.stack.enter_context
        self.plan = plan_here(config)
        self.context = RunContext.load(config, place)
        self.context.tokenizer.save_pretrained(place.tokenizer)
        self.rank = RankLearner.open(config, place, self.context.task, self.context.tokenizer, self.stack)
        self.log = enter(self.context.open_log(self.rank.trainer.policy_model.vocab_size, "driver"))
        enter(Maintenance(self.log.tables))
        self.pool = enter(open_pool(config, self.context.task))
        self.journal: Journal = enter(open_journal(place, config.run.sinks, self.watching))

    async def run(self, started: Callable[[Loop], None] | None) -> Ledger:
        context, model = self.context, self.rank.trainer.policy_model.model
        evaluation = PolicyEvaluation(self.config, context.task, context.tokenizer, self.pool, model, self.rank.rounded)
        saved = self.rank.restore()
        self.gpu = shared_gpu(self.plan, self.rank.trainer, self.config.run.patience)
        learner = LocalLearner(self.rank, gpu=self.gpu)
        loop = make_loop(context, self.log, self.journal, learner, self.make_member, evaluation, saved)
        loop.preparation = Preparation(partial(self._check_memory, learner))
        if started is not None:
            started(loop)
        try:
            return await loop.run()
        finally:
            await loop.preparation.settle()  # it writes to the journal

    async def _check_memory(self, learner: LocalLearner) -> None:
        devices = {} if self.plan is None else {"devices": str(self.plan)}
        self.journal.write(EventKind.ESTIMATED, learner.step, **await learner.estimate(), **devices)

    def make_member(self, name: str, desk: Desk) -> "LocalMember":
        place = self.plan.engines[int(name.removeprefix("worker "))] if self.plan else None
        start: Callable[[], Awaitable[Engine]] = partial(start_engine, self.config, place)
        if self.gpu is not None:
            start = partial(self.gpu.start, start)
        policies = self.context.subscribe(name)
        return LocalMember(make_worker(self.context, name, desk, self.pool, self.log, policies, start), policies)


@dataclass
class LocalMember:
    """A worker of this process, as a `Member` of the fleet."""

    worker: Worker
    policies: Subscription
    _notices_read: int = 0

    async def work(self) -> None:
        await self.worker.run()

    async def nudge(self) -> None:
        self.worker.nudge()

    async def close(self) -> None:
        self.worker.stop()
        self.policies.close()

    def news(self) -> list[str]:
        read, self._notices_read = self._notices_read, len(self.worker.tally.notices)
        return self.worker.tally.notices[read:]

    @property
    def groups(self) -> int:
        return self.worker.tally.groups
