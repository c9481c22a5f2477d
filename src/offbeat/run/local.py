"""A run in one process: trainer, workers, scoring and the loop, wired from a configuration. Breakpoints work."""

import asyncio
import gc
import random
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from offbeat.config import Config
from offbeat.experience.door import Rules
from offbeat.experience.ledger import Event, Happening, Ledger
from offbeat.experience.log import ExperienceLog
from offbeat.experience.maintenance import Maintenance
from offbeat.experience.modes import Fresh, Mode, Offline, Replay
from offbeat.experience.sampler import Limits, Sampler
from offbeat.experience.tables import Snapshot
from offbeat.objective.spec import Need
from offbeat.rollout.engine import Engine, Sampling
from offbeat.rollout.groups import GroupMaker
from offbeat.rollout.leases import LeaseDesk
from offbeat.rollout.worker import Pace, Worker
from offbeat.run import admission
from offbeat.run.desk import Desk
from offbeat.run.directory import RunDirectory, RunError, RunLock
from offbeat.run.evaluation import Evaluation
from offbeat.run.fleet import Fleet
from offbeat.run.health import Health
from offbeat.run.journal import FileJournal, Stopwatch
from offbeat.run.learner import LocalLearner
from offbeat.run.loop import Loop
from offbeat.run.parts import Plan
from offbeat.seeds import derive
from offbeat.tasks.data import prompt_at
from offbeat.tasks.registry import make
from offbeat.tasks.scoring import ScoringPool
from offbeat.tasks.task import Task
from offbeat.trainer.checkpoint import Checkpoint, Checkpoints
from offbeat.trainer.forward import TokenScorer
from offbeat.trainer.optimizer import Decay, MasterAdamW, OptimizerSettings, Schedule
from offbeat.trainer.trainer import StepSettings, Trainer
from offbeat.types import Json
from offbeat.weights.cadence import Cadence, Drift, Fixed
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
        ledger = await loop.run()
        self.checkpoints.wait()
        return ledger

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
            self.trainer, self.weights, self.checkpoints, sequences, getattr(torch, config.model.serve)
        )
        names = [] if config.run.mode == "offline" else [f"worker {i}" for i in range(config.workers.count)]
        fleet = Fleet(lambda name: self.member(name, desk), names, desk, self.journal)
        evaluation = Evaluation(config, self.task, self.tokenizer, self.pool, self.trainer.scorer.model)
        return Loop(
            plan(config), self.log, sampler, desk, rule, fleet, learner, cadence(config), self.journal, Health(),
            Stopwatch(clock), clock, evaluate=evaluation, released=lambda: not self.directory.pause.exists(),
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


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Of the model."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True, trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        raise RunError(f"the tokenizer of {config.model.path} names no end-of-text token: completions would never stop")
    return tokenizer


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[..., str]:
    """A completion's text as scorers see it."""
    return lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True))


def make_task(config: Config) -> Task:
    """By name, or from a file of the user's."""
    if config.task.name.endswith(".py"):
        return make("custom", {**config.task.options, "path": config.task.name})
    return make(config.task.name, config.task.options)


def make_trainer(config: Config) -> Trainer:
    """A model, its optimiser, and what a step is."""
    random.seed(config.seed)
    torch.manual_seed(derive(config.seed, "torch") % 2**63)
    objective = config.objective.resolve()
    scorer = _scorer(config)
    reference = _scorer(config).requires_grad_(False) if Need.REFERENCE in objective.needs else None
    optimizer = config.optimizer
    schedule = Schedule(
        optimizer.learning_rate, optimizer.warmup_steps, Decay(optimizer.decay), config.steps, optimizer.floor
    )
    settings = OptimizerSettings(
        schedule, optimizer.betas, weight_decay=optimizer.weight_decay, max_grad_norm=optimizer.max_grad_norm
    )
    step = StepSettings(
        objective,
        config.updates_per_batch,
        config.trainer.token_budget,
        config.sampling.max_tokens,
        config.reference.refresh_every,
        config.seed,
    )
    return Trainer(scorer, MasterAdamW(scorer, settings), step, reference)


def _scorer(config: Config) -> TokenScorer:
    path = Path(config.model.path)
    if not path.is_dir():
        raise RunError(f"model.path = {config.model.path!r} is not a directory with a model")
    model = AutoModelForCausalLM.from_pretrained(
        str(path), dtype=config.model.compute, local_files_only=True, trust_remote_code=False
    )
    return TokenScorer(
        model,
        temperature=config.sampling.temperature,
        checkpoint_activations=config.trainer.checkpoint_activations,
    )


def start_engine(config: Config) -> Awaitable[Engine]:
    """An engine that serves the model the run begins with."""
    return _hf(config) if config.engine.kind == "hf" else _vllm(config)


async def _hf(config: Config) -> Engine:
    from offbeat.rollout.hf import HfEngine

    return HfEngine.start(Path(config.model.path), dtype=config.model.serve)


async def _vllm(config: Config) -> Engine:
    from offbeat.rollout.vllm import VllmEngine

    engine = config.engine
    return await VllmEngine.start(
        Path(config.model.path),
        dtype=config.model.serve,
        max_model_len=engine.max_prompt_tokens + config.sampling.max_tokens,
        max_num_seqs=config.workers.groups_at_once * config.group_size,
        on_update=engine.on_update,
        threads=engine.threads,
        kv_cache_gib=engine.kv_cache_gib,
        gpu_memory_utilization=engine.gpu_memory_utilization,
    )


def pace(config: Config) -> Pace:
    """One call for all groups where the engine wants batches, a call each where it makes them itself."""
    seconds, at_once = config.workers.lease_seconds, config.workers.groups_at_once
    if config.engine.kind == "vllm":
        return Pace(lanes=at_once, call_seconds=seconds)
    return Pace(groups_per_call=at_once, call_seconds=seconds)


def sampler_mode(config: Config) -> Mode:
    """Which groups a step takes."""
    settings = config.sampler
    if settings.mode == "fresh":
        return Fresh()
    if settings.mode == "replay":
        return Replay(settings.share, settings.reuse_budget, settings.cooldown)
    return Offline(settings.epochs, settings.cooldown)


def sampler_limits(config: Config) -> Limits:
    """Lag, and whether groups without contrast are asked for again."""
    offline = config.run.mode == "offline"
    masked = config.objective.resolve().zero_variance_mask
    return Limits(
        config.prompts_per_step,
        max_lag=None if offline else config.largest_lag,
        drop_zero_variance=masked and not offline,
    )


def admission_rule(config: Config) -> admission.Admission:
    """What may be begun."""
    if config.run.mode == "lockstep":
        return admission.Lockstep()
    if config.run.mode == "offline":
        return admission.Offline()
    return admission.Concurrent(config.largest_lag, max(1, config.fresh))


def cadence(config: Config) -> Cadence:
    """When to publish."""
    sync = config.sync
    return Fixed(sync.every) if sync.drift_budget is None else Drift(sync.drift_budget, sync.at_least, sync.every)


def plan(config: Config) -> Plan:
    """The loop's numbers."""
    return Plan(
        steps=config.steps,
        batch=config.prompts_per_step,
        fresh=config.fresh,
        refill=config.sampler.refill,
        save_every=config.trainer.save_every,
        evaluate_every=config.evaluation.every,
        patience=config.run.patience,
    )
