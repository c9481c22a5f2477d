"""A loop and a worker, put together: the same in one process and on many."""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import cast

from transformers import PreTrainedTokenizerBase

from offbeat.config import Config
from offbeat.experience.door import Rules
from offbeat.experience.log import ExperienceLog
from offbeat.experience.sampler import Sampler
from offbeat.experience.tables import Snapshot
from offbeat.rollout.engine import Sampling
from offbeat.rollout.groups import GroupMaker, Scorer
from offbeat.rollout.leases import LeaseDesk, Prompts
from offbeat.rollout.worker import Worker
from offbeat.run.desk import Desk
from offbeat.run.directory import PauseFile, RunDirectory
from offbeat.run.fleet import Fleet, Member
from offbeat.run.health import Health
from offbeat.run.journal import Journal, Stopwatch
from offbeat.run.loop import Loop
from offbeat.run.parts import Learner
from offbeat.run.wiring import (
    admission_rule,
    cadence,
    decoder,
    pace,
    plan,
    sampler_limits,
    sampler_mode,
    start_engine,
)
from offbeat.seeds import derive
from offbeat.tasks.data import prompt_at
from offbeat.tasks.task import Task
from offbeat.types import Json
from offbeat.weights.subscription import Subscription


@dataclass(frozen=True)
class Setting:
    """What every part of a run knows."""

    config: Config
    directory: RunDirectory
    task: Task
    tokenizer: PreTrainedTokenizerBase

    def open_log(self, vocabulary: int, writer: str) -> ExperienceLog:
        """The run's experience log, for one of its writers."""
        rules = Rules(vocab_size=vocabulary, reward_ranges={self.task.name: self.task.reward_range})
        return ExperienceLog.open(self.config.run.experience or self.directory.experience, rules=rules, writer=writer)


def make_loop(
    setting: Setting,
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
    leases = LeaseDesk(order, name=f"g{mark}", seed=config.seed, seconds=config.workers.lease_seconds)
    sampler = Sampler(sampler_mode(config), sampler_limits(config), derive(config.seed, "sampler"))
    cursor, published = None, -1
    if kept is not None:
        cursor = Snapshot.from_json(cast(dict[str, int], kept["snapshot"]))
        sampler.feed(log.index_since(None, cursor)[0])
        sampler.restore(cast(dict[str, Json], kept["sampler"]))
        leases.restore(cast(dict[str, Json], kept["desk"]))
        published = cast(int, kept["published"])
        journal.write("resumed", learner.step)
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
    setting: Setting, name: str, prompts: Prompts, scorer: Scorer, log: ExperienceLog
) -> tuple[Worker, Subscription]:
    """A worker and what it reads policies from, which is closed after it."""
    config, tokenizer = setting.config, setting.tokenizer
    asked = config.sampling
    sampling = Sampling(asked.max_tokens, (tokenizer.eos_token_id,), asked.temperature, asked.top_p, asked.top_k)
    maker = GroupMaker(config.group_size, sampling, decoder(tokenizer), scorer)
    policies = Subscription.open(setting.directory.weights, name=name)
    return Worker(name, lambda: start_engine(config), policies, prompts, maker, log, pace(config)), policies
