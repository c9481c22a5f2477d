"""A run in one process: trainer, workers, scoring and the loop, wired from a configuration. Breakpoints work."""

import asyncio
import gc
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import cast

import torch

from offbeat.config import Config
from offbeat.experience.door import Rules
from offbeat.experience.ledger import Event, Happening, Ledger
from offbeat.experience.log import ExperienceLog
from offbeat.experience.maintenance import Maintenance
from offbeat.experience.sampler import Sampler
from offbeat.experience.tables import Snapshot
from offbeat.rollout.engine import Sampling
from offbeat.rollout.groups import GroupMaker
from offbeat.rollout.leases import LeaseDesk
from offbeat.rollout.worker import Worker
from offbeat.run.desk import Desk
from offbeat.run.directory import PauseFile, RunDirectory, RunError, RunLock
from offbeat.run.evaluation import Evaluation
from offbeat.run.fleet import Fleet
from offbeat.run.health import Health
from offbeat.run.journal import FileJournal, Stopwatch
from offbeat.run.learner import LocalLearner
from offbeat.run.loop import Loop
from offbeat.run.wiring import (
    admission_rule,
    cadence,
    decoder,
    load_tokenizer,
    make_task,
    make_trainer,
    pace,
    plan,
    sampler_limits,
    sampler_mode,
    start_engine,
)
from offbeat.seeds import derive
from offbeat.tasks.data import prompt_at
from offbeat.tasks.scoring import ScoringPool
from offbeat.trainer.checkpoint import Checkpoint, Checkpoints
from offbeat.trainer.estimate import Shape, check_worst_case, estimate_memory
from offbeat.types import Json
from offbeat.weights.log import WeightLog
from offbeat.weights.probe import probe_sequences
from offbeat.weights.subscription import Subscription


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
        self.tokenizer = load_tokenizer(config)
        self.tokenizer.save_pretrained(place.tokenizer)
        self.task = make_task(config)
        self.trainer = make_trainer(config)
        rules = Rules(vocab_size=self.trainer.scorer.vocabulary, reward_ranges={self.task.name: self.task.reward_range})
        self.log = enter(ExperienceLog.open(config.run.experience or place.experience, rules=rules, writer="driver"))
        enter(Maintenance(self.log.tables))
        self.weights = enter(WeightLog.open(place.weights, anchor_every=config.sync.anchor_every))
        # What a run is, apart from how long it goes on: a run may be made longer when it is resumed.
        settings = cast(Json, config.model_dump(mode="json", exclude={"steps"}))
        self.checkpoints = enter(Checkpoints(place.checkpoints, config=settings, keep=config.trainer.keep))
        self.pool = enter(ScoringPool.of(self.task, workers=config.task.scorers, memory_mib=config.task.memory_mib))
        self.journal = enter(FileJournal(place.events, listener=self.watching))

    async def run(self, started: Callable[[Loop], None] | None) -> Ledger:
        loop = self.loop(self.checkpoints.newest())
        if started is not None:
            started(loop)
        self.foretell()
        ledger = await loop.run()
        self.checkpoints.wait()
        return ledger

    def foretell(self) -> None:
        """What a step will take, and that the largest one fits, before anything is generated."""
        config, longest = self.config, self.trainer.scorer.model.config.max_position_embeddings
        prompt = min(config.engine.max_prompt_tokens, longest - config.sampling.max_tokens)
        if prompt + config.sampling.max_tokens > config.trainer.token_budget:
            raise RunError(
                f"trainer.token_budget = {config.trainer.token_budget} cannot hold a prompt of {prompt} tokens and a "
                f"completion of {config.sampling.max_tokens}; raise it, or lower engine.max_prompt_tokens"
            )
        shape = Shape(prompt, config.sampling.max_tokens, config.group_size)
        estimate = estimate_memory(self.trainer, shape)
        worst = check_worst_case(self.trainer, shape, estimate)
        self.journal.write("foretold", self.trainer.step, memory=str(estimate), worst_seconds=worst.seconds)

    def loop(self, checkpoint: Checkpoint | None) -> Loop:
        """The loop, at its beginning or where the checkpoint left it."""
        config, clock = self.config, time.monotonic
        order = prompt_at(self.task, self.tokenizer, derive(config.seed, "prompts"))
        leases = LeaseDesk(order, name="g", seed=config.seed, seconds=config.workers.lease_seconds)
        sampler = Sampler(sampler_mode(config), sampler_limits(config), derive(config.seed, "sampler"))
        cursor, published = None, -1
        if checkpoint is not None:
            checkpoint.restore(self.trainer)
            cursor = Snapshot.from_json(cast(dict[str, int], checkpoint.extra("snapshot")))
            sampler.feed(self.log.index_since(None, cursor)[0])
            sampler.restore(cast(dict[str, Json], checkpoint.extra("sampler")))
            leases.restore(cast(dict[str, Json], checkpoint.extra("desk")))
            published = cast(int, checkpoint.extra("published"))
            self.weights.rewind(checkpoint.step)
            self.log.record([Event("", Happening.REWOUND, step=checkpoint.step)])
            self.journal.write("resumed", checkpoint.step)
        rule = admission_rule(config)
        desk = Desk(leases, rule, clock)
        probed = [order(place).token_ids.tolist() for place in range(4)]
        sequences = probe_sequences(probed, self.trainer.scorer.vocabulary, config.seed)
        learner = LocalLearner(
            self.trainer,
            self.weights,
            self.checkpoints,
            sequences,
            getattr(torch, config.model.serve),
            pinned=config.trainer.keep + 1,
        )
        names = [] if config.run.mode == "offline" else [f"worker {i}" for i in range(config.workers.count)]
        fleet = Fleet(lambda name: self.member(name, desk), names, desk, self.journal)
        evaluation = Evaluation(config, self.task, self.tokenizer, self.pool, self.trainer.scorer.model)
        return Loop(
            plan(config), self.log, sampler, desk, rule, fleet, learner, cadence(config), self.journal, Health(),
            Stopwatch(clock), clock, evaluate=evaluation, gate=PauseFile(self.directory.pause),
            published=published, cursor=cursor,
        )  # fmt: skip

    def member(self, name: str, desk: Desk) -> "LocalMember":
        """A worker of this process."""
        config = self.config
        stops = (self.tokenizer.eos_token_id,)
        sampling = Sampling(
            config.sampling.max_tokens,
            stops,
            config.sampling.temperature,
            config.sampling.top_p,
            config.sampling.top_k,
        )
        maker = GroupMaker(config.group_size, sampling, decoder(self.tokenizer), self.pool)
        policies = Subscription.open(self.directory.weights, name=name)
        worker = Worker(name, lambda: start_engine(config), policies, desk, maker, self.log, pace(config))
        self.workers[name] = worker
        return LocalMember(worker, policies)


@dataclass
class LocalMember:
    """A worker of this process, as a `Member` of the fleet."""

    worker: Worker
    policies: Subscription

    async def work(self) -> None:
        await self.worker.run()

    async def nudge(self) -> None:
        self.worker.nudge()

    async def close(self) -> None:
        self.worker.stop()
        self.policies.close()

    @property
    def groups(self) -> int:
        return self.worker.tally.groups
