"""A loop and a worker, put together: the same in one process and on many."""

import random
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from offbeat.config import Config
from offbeat.errors import RunError
from offbeat.events import EventKind
from offbeat.experience.log import ExperienceLog
from offbeat.experience.modes import Fresh, Mode, Offline, Replay
from offbeat.experience.sampler import Sampler, SamplerLimits
from offbeat.experience.schema import Snapshot
from offbeat.experience.validation import ValidationRules
from offbeat.objective.spec import Need
from offbeat.rollout.engine import Engine, Sampling
from offbeat.rollout.generation import GroupMaker, Scorer
from offbeat.rollout.prompt_leases import PromptLeases, Prompts
from offbeat.rollout.worker import Pace, Worker
from offbeat.run import admission
from offbeat.run.cadence import Cadence, Drift, Fixed
from offbeat.run.desk import Desk
from offbeat.run.directory import PauseFile, RunDirectory
from offbeat.run.fleet import Fleet, Member
from offbeat.run.health import Health
from offbeat.run.journal import Journal, Stopwatch
from offbeat.run.loop import Loop
from offbeat.run.protocols import Learner, RunPlan
from offbeat.seeds import derive
from offbeat.tasks.data import prompt_at
from offbeat.tasks.registry import make
from offbeat.tasks.task import Task
from offbeat.trainer.forward import PolicyModel
from offbeat.trainer.fsdp import Ranks, shard
from offbeat.trainer.optimizer import Decay, MasterAdamW, OptimizerSettings, Schedule
from offbeat.trainer.trainer import StepSettings, Trainer
from offbeat.types import Json
from offbeat.weights.subscriber import Subscription

disable_progress_bar()  # a bar of transformers' would cut through the live view


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


def make_trainer(config: Config, ranks: Ranks) -> Trainer:
    """A model, its optimiser, and what a step is; spread over ranks where there are several."""
    random.seed(config.seed)
    torch.manual_seed(derive(config.seed, "torch") % 2**63)
    objective = config.objective.resolve()
    policy_model = _policy_model(config, ranks)
    reference = _policy_model(config, ranks).requires_grad_(False) if Need.REFERENCE in objective.needs else None
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
    return Trainer(policy_model, MasterAdamW(policy_model, settings), step, reference, ranks=ranks)


def _policy_model(config: Config, ranks: Ranks) -> PolicyModel:
    path = Path(config.model.path)
    if not path.is_dir():
        raise RunError(f"model.path = {config.model.path!r} is not a directory with a model")
    model = AutoModelForCausalLM.from_pretrained(
        str(path),
        dtype=config.model.compute if ranks.size == 1 else "float32",  # slices are the master weights
        local_files_only=True,
        trust_remote_code=False,
    )
    policy_model = PolicyModel(
        model.to(torch.accelerator.current_accelerator() or torch.device("cpu")),
        temperature=config.sampling.temperature,
        checkpoint_activations=config.trainer.checkpoint_activations,
    )
    if ranks.size > 1:
        shard(policy_model, compute=getattr(torch, config.model.compute))
    return policy_model


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
        answer_within=config.run.silence,
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


def sampler_limits(config: Config) -> SamplerLimits:
    """Lag, and whether groups without contrast are asked for again."""
    offline = config.run.mode == "offline"
    masked = config.objective.resolve().zero_variance_mask
    return SamplerLimits(
        config.prompts_per_step,
        max_lag=None if offline else config.largest_lag,
        drop_zero_variance=masked and not offline,
    )


def admission_rule(config: Config) -> admission.Admission:
    """What may be begun."""
    if config.run.mode == "lockstep":
        return admission.LockstepAdmission()
    if config.run.mode == "offline":
        return admission.OfflineAdmission()
    return admission.ConcurrentAdmission(config.largest_lag, max(1, config.fresh))


def cadence(config: Config) -> Cadence:
    """When to publish."""
    sync = config.sync
    return Fixed(sync.every) if sync.drift_budget is None else Drift(sync.drift_budget, sync.at_least, sync.every)


def plan(config: Config) -> RunPlan:
    """The loop's numbers."""
    return RunPlan(
        steps=config.steps,
        batch=config.prompts_per_step,
        fresh=config.fresh,
        refill=config.sampler.refill,
        save_every=config.trainer.save_every,
        evaluate_every=config.evaluation.every,
        patience=config.run.patience,
    )


@dataclass(frozen=True)
class RunContext:
    """What every part of a run knows."""

    config: Config
    directory: RunDirectory
    task: Task
    tokenizer: PreTrainedTokenizerBase

    def open_log(self, vocabulary: int, writer: str) -> ExperienceLog:
        """The run's experience log, for one of its writers."""
        rules = ValidationRules(vocab_size=vocabulary, reward_ranges={self.task.name: self.task.reward_range})
        return ExperienceLog.open(self.config.run.experience or self.directory.experience, rules=rules, writer=writer)


def make_loop(
    setting: RunContext,
    log: ExperienceLog,
    journal: Journal,
    learner: Learner,
    member: Callable[[str, Desk], Member],
    evaluate: Callable[[int], Awaitable[Mapping[str, Json]]],
    kept: Mapping[str, Json] | None,
) -> Loop:
    """The loop at its beginning, or where a checkpoint left it.

    Args:
        setting: Of the run.
        log: Its experience log.
        journal: Where events go.
        learner: Restored already.
        member: Makes a worker that takes prompts from the desk.
        evaluate: Called with a step.
        kept: What `Loop.state` gave, with the step; None at the beginning.
    """
    config, clock = setting.config, time.monotonic
    order = prompt_at(setting.task, setting.tokenizer, derive(config.seed, "prompts"))
    # In a log of its own a run calls its groups the same however often it is repeated; what is drawn by their ids, too.
    mark = f" {setting.directory.name}" if config.run.experience else ""
    leases = PromptLeases(order, name=f"g{mark}", seed=config.seed, seconds=config.workers.lease_seconds)
    sampler = Sampler(sampler_mode(config), sampler_limits(config), derive(config.seed, "sampler"))
    cursor, published = None, -1
    if kept is not None:
        cursor = Snapshot.from_json(cast(dict[str, int], kept["snapshot"]))
        sampler.feed(log.index_since(None, cursor)[0])
        sampler.restore(cast(dict[str, Json], kept["sampler"]))
        leases.restore(cast(dict[str, Json], kept["desk"]))
        published = cast(int, kept["published"])
        journal.write(EventKind.RESUMED, learner.step)
    rule = admission_rule(config)
    desk = Desk(leases, rule, clock)
    names = [] if config.run.mode == "offline" else [f"worker {i}" for i in range(config.workers.count)]
    fleet = Fleet(lambda name: member(name, desk), names, desk, journal)
    return Loop(
        plan(config), log, sampler, desk, rule, fleet, learner, cadence(config), journal, Health(),
        Stopwatch(clock), clock, evaluate=evaluate, gate=PauseFile(setting.directory.pause),
        published=published, cursor=cursor, consumer=f"trainer{mark}",
    )  # fmt: skip


def make_worker(
    setting: RunContext, name: str, prompts: Prompts, scorer: Scorer, log: ExperienceLog
) -> tuple[Worker, Subscription]:
    """A worker and what it reads policies from, which is closed after it."""
    config, tokenizer = setting.config, setting.tokenizer
    asked = config.sampling
    sampling = Sampling(asked.max_tokens, (tokenizer.eos_token_id,), asked.temperature, asked.top_p, asked.top_k)
    maker = GroupMaker(config.group_size, sampling, decoder(tokenizer), scorer)
    policies = Subscription.open(setting.directory.weights, name=name)
    return Worker(name, lambda: start_engine(config), policies, prompts, maker, log, pace(config)), policies
