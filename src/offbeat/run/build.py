"""The parts of a run, built from its configuration: the same in one process and on Ray.

The functions are in the order in which a run calls them: task and tokenizer, loop, then workers. Engines are started in
engines.py, and the trainer is built in learner.py.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

from transformers import PreTrainedTokenizerBase

from offbeat.config import Config
from offbeat.config.parts import EngineKind
from offbeat.errors import RunError
from offbeat.events import EventKind
from offbeat.experience.index_files import IndexFiles
from offbeat.experience.log import ExperienceLog
from offbeat.experience.modes import Fresh, Mode, Offline, Replay
from offbeat.experience.priors import HALFLIFE, PromptPriors
from offbeat.experience.sampler import Sampler, SamplerLimits
from offbeat.experience.schema import Snapshot
from offbeat.experience.validation import ValidationRules
from offbeat.objective.spec import Advantage
from offbeat.rollout.engine import Engine, Sampling
from offbeat.rollout.generation import GroupMaker, Scorer
from offbeat.rollout.prompt_leases import PromptLeases, Prompts
from offbeat.rollout.worker import Pace, Policies, Worker
from offbeat.run.admission import Admission, ConcurrentAdmission, LockstepAdmission, OfflineAdmission
from offbeat.run.cadence import Cadence, Cost, Drift, Fixed, OwnCadence, PublishEvidence
from offbeat.run.desk import Desk, FittingPrompts
from offbeat.run.directory import PauseFile, RunDirectory
from offbeat.run.evaluation.leases import EvaluationSchedule
from offbeat.run.evaluation.rates import EngineEvaluation, EvaluationRounds, LoggedPrompts, evaluation_prompts
from offbeat.run.fleet import Fleet, Member
from offbeat.run.health import Health, rules_for
from offbeat.run.journal import Journal, Stopwatch
from offbeat.run.learner import adapter_spec
from offbeat.run.loop import Loop
from offbeat.run.protocols import REPAIRED, Learner, RunPlan
from offbeat.scoring.pool import ScoringPool
from offbeat.seeds import derive
from offbeat.tasks.rewards import fault_reward
from offbeat.tasks.split import for_evaluation, hold_out
from offbeat.tasks.task import Task, make, stored_groups
from offbeat.tasks.tokenizer import decoder, read_generation_config, read_tokenizer, stop_tokens
from offbeat.types import Json
from offbeat.weights.subscriber import Subscription


def make_task(config: Config) -> Task:
    """Make the task by its name, or from your own Python file, without the prompts that are for evaluation.

    Those are in `evaluation` of the task, which is None if the run holds nothing out.
    """
    if not config.asks:
        return stored_groups()
    task, settings = make(config.task.name, config.task.options), config.evaluation
    if not settings.holds_out:
        return replace(task, evaluation=None)
    if settings.task:
        other = make(settings.task, settings.options)
        task = replace(task, evaluation=for_evaluation(other))
    return hold_out(task, settings.hold_out, logged_prompts(config))


def logged_prompts(config: Config) -> LoggedPrompts | None:
    """Return the prompts that the run may train on from a log of other runs; None if it has a log of its own."""
    if not config.run.experience:
        return None
    return LoggedPrompts(config.run.experience, partial(load_tokenizer, config))


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer; raise `RunError` if it has no end-of-text token."""
    directory = config.model.directory()
    tokenizer = read_tokenizer(directory, config.model.chat_template_kwargs)
    if tokenizer.eos_token_id is None:
        raise RunError(
            f"the tokenizer of {config.model.path} has no end-of-text token, so completions would never stop; set "
            "eos_token in tokenizer_config.json"
        )
    return tokenizer


@dataclass(frozen=True)
class RunContext:
    """What every part of a run shares."""

    config: Config
    directory: RunDirectory
    task: Task
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls, config: Config, directory: RunDirectory) -> "RunContext":
        return cls(config, directory, make_task(config), load_tokenizer(config))

    def subscribe(self, name: str) -> Subscription:
        """Open the run's weight log for one reader."""
        return Subscription.open(self.directory.weights, name=name)

    def open_log(self, vocabulary: int, writer: str) -> ExperienceLog:
        """Open the run's experience log for one writer."""
        low, high = self.task.reward_range
        fault = fault_reward(self.task.answer_fault, (low, high))  # a penalty may be below the range
        ranges = {self.task.name: (low if fault is None else min(low, fault), high)}
        rules = ValidationRules(vocab_size=vocabulary, reward_ranges=ranges)
        place = self.config.run.experience or self.directory.experience
        own = self.directory.own_run(self.config)
        return ExperienceLog.open(place, rules=rules, writer=writer, own_run=own)


def open_pool(config: Config, task: Task) -> ScoringPool:
    """Start the scoring processes of a run."""
    section = config.task
    return ScoringPool.of(task, workers=section.scorers, memory_mib=section.memory_mib, steps=config.steps)


def make_loop(
    context: RunContext,
    log: ExperienceLog,
    journal: Journal,
    learner: Learner,
    make_member: Callable[[str, Desk], Member],
    trainer_rates: Callable[[int], Awaitable[Mapping[str, Json]]],
    saved: Mapping[str, Json] | None,
) -> Loop:
    """Build the loop of a new run, or of one that resumes: `saved` is `Loop.state` of the restored checkpoint.

    `trainer_rates` evaluates the trainer's own model, for runs without workers.
    """
    config, clock = context.config, time.monotonic
    order = FittingPrompts(
        config, context.task, context.tokenizer, ("prompts",),
        lambda count, why: journal.write(EventKind.LEFT_OUT, learner.step, count=count, why=why),
    )  # fmt: skip
    own = context.directory.own_run(config)
    leases = PromptLeases(order, name=own.prefix, seed=config.seed, seconds=config.workers.lease_seconds)
    sampler = Sampler(_sampler_mode(config), _sampler_limits(config), derive(config.seed, "sampler"), _priors(config))
    index_files = IndexFiles(context.directory.index, log)
    cursor, published, evidence = None, -1, PublishEvidence()
    health = Health(rules_for(config), run=str(context.directory.path), optimizer=config.optimizer)
    schedule = EvaluationSchedule(config.evaluation.every)
    if saved is not None:
        cursor = Snapshot.from_json(cast(dict[str, int], saved["snapshot"]))
        sampler.restore(cast(dict[str, Json], saved["sampler"]), index_files.load(cursor))
        leases.restore(cast(dict[str, Json], saved["desk"]))
        published = cast(int, saved["published"])
        evidence = PublishEvidence.restore(cast(dict[str, Json], saved["evidence"]))
        schedule.restore(cast(dict[str, Json], saved["evaluation"]))
        health.healthy = cast(int, saved.get("healthy", learner.step))
    logged = leases.skip_logged(lambda ids: log.find(ids) >= 0) if config.run.mode != "offline" else 0
    if saved is not None or logged:
        from_start = "no checkpoint yet: training starts again at step 0; " if saved is None else ""
        journal.write(EventKind.RESUMED, learner.step, why=f"{from_start}{logged} groups of the log are used again")
    if saved is not None:
        if changed := saved.get("changed"):
            journal.write(EventKind.CHANGED, learner.step, what=changed)
        if REPAIRED in saved:
            journal.write(EventKind.WEIGHTS_REPAIRED, learner.step, **cast(dict[str, Json], saved[REPAIRED]))
    admission = _admission(config)
    desk = Desk(leases, admission, clock)
    names = [] if config.run.mode == "offline" else [f"worker {i}" for i in range(config.workers.count)]
    fleet = Fleet(lambda name: make_member(name, desk), names, desk, journal)
    rounds = EvaluationRounds(trainer_rates, schedule, journal, on_engines=False)
    if names or (config.run.place == "ray" and config.run.mode != "offline"):
        asked = partial(evaluation_prompts, config, context.task, context.tokenizer)
        rates = EngineEvaluation(desk, asked, config.workers.lease_seconds, config.run.patience, clock)
        rounds = EvaluationRounds(rates, schedule, journal, overlap=config.run.mode == "concurrent")
    return Loop(
        _plan(config), log, sampler, desk, admission, fleet, learner, _cadence(config), journal, health,
        Stopwatch(clock), clock, rounds, pause_control=PauseFile(context.directory.pause),
        published=published, evidence=evidence, cursor=cursor, consumer=own.trainer,
        index_files=index_files,
    )  # fmt: skip


def _plan(config: Config) -> RunPlan:
    return RunPlan(
        steps=config.steps,
        batch=config.prompts_per_step,
        fresh=config.fresh,
        refill=config.sampler.refill_limit,
        save_every=config.trainer.save_every,
        patience=config.run.patience,
        generates=config.run.mode != "offline",
        waits_for_scores=config.sampler.wait_for_scores,
        offset=config.sync.offset,
    )


def _sampler_mode(config: Config) -> Mode:
    settings = config.sampler
    if settings.mode == "fresh":
        return Fresh()
    if settings.mode == "replay":
        return Replay(settings.share, settings.reuse_budget, settings.cooldown)
    return Offline(settings.epochs, settings.cooldown)


def _sampler_limits(config: Config) -> SamplerLimits:
    offline = config.run.mode == "offline"
    return SamplerLimits(
        config.prompts_per_step,
        max_lag=None if offline else config.fresh_lag,
        retire_drift=config.retire_drift,
        retire_ess=config.sampler.retire_ess,
        retire_age=None if offline else config.retire_age,
        drop_zero_variance=config.sampler.refill and not offline,
    )


def _priors(config: Config) -> PromptPriors | None:
    """Return the history that shrunk advantages need; None for other objectives."""
    if config.objective.resolve().advantage is not Advantage.SHRUNK:
        return None
    return PromptPriors(config.objective.prior_halflife or HALFLIFE)


def _admission(config: Config) -> Admission:
    if config.run.mode == "lockstep":
        return LockstepAdmission()
    if config.run.mode == "offline":
        return OfflineAdmission()
    return ConcurrentAdmission(config.fresh_lag, max(1, config.fresh))


def _cadence(config: Config) -> Cadence:
    sync = config.sync
    if sync.cadence is not None:
        return OwnCadence.load(sync.cadence, sync.at_least, config.longest)
    if sync.by_cost:
        return Cost(sync.at_least, config.longest)
    if sync.drift_budget is not None:
        return Drift(sync.drift_budget, sync.at_least, config.longest)
    return Fixed(config.longest)


def make_worker(
    context: RunContext,
    name: str,
    prompts: Prompts,
    scorer: Scorer,
    log: ExperienceLog,
    policies: Policies,
    start: Callable[[], Awaitable[Engine]],
) -> Worker:
    """Build a worker. `start` starts its engine: `engines.start_engine` with the engine's place."""
    config, tokenizer, settings = context.config, context.tokenizer, context.config.sampling
    model_dir = config.model.directory()
    stops = () if settings.ignore_eos else stop_tokens(read_generation_config(model_dir), tokenizer)
    sampling = Sampling(
        settings.max_tokens, stops, settings.temperature, settings.top_p, settings.top_k, settings.min_tokens
    )

    maker = GroupMaker(config.group_size, sampling, decoder(tokenizer), scorer)
    return Worker(name, start, policies, prompts, maker, log, _pace(config), adapter_spec(config))


def _pace(config: Config) -> Pace:
    """An engine that batches by itself gets a call for each group; any other gets all groups in one call.

    A call may take half of the run's patience, so that a group which hangs once can still be repeated in time.
    """
    at_once, poll, call = (
        config.workers.groups_at_once,
        min(1.0, config.workers.lease_seconds / 4),
        config.run.patience / 2,
    )
    lanes, groups_per_call = (at_once, 1) if EngineKind.of(config.engine.kind).batches else (1, at_once)
    return Pace(lanes, groups_per_call, poll_seconds=poll, call_seconds=call)
