"""The parts of a run as actors of Ray: each a thin shell around the class that does the same in one process.

    RankActor      one rank of the trainer       RankLearner
    WorkerActor    one worker                    Worker, which asks the driver's desk for prompts
    ScoringActor   a scoring pool                ScoringPool

Every actor answers `beat` in a thread of its own, whatever else it does: a process that is stopped or stuck in native
code is told from one that is busy.
"""

import asyncio
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

import ray
import torch
from ray.actor import ActorHandle

from offbeat.config import Config
from offbeat.rollout.hf import HfEngine
from offbeat.rollout.prompt_leases import PromptLease
from offbeat.rollout.worker import Worker
from offbeat.run.build import RunContext, load_tokenizer, make_task, make_worker
from offbeat.run.directory import RunDirectory
from offbeat.run.evaluation import PolicyEvaluation
from offbeat.run.learner import RankLearner
from offbeat.scoring.pool import Outcome, ScoringPool
from offbeat.tasks.rewards import Columns
from offbeat.trainer.fsdp import Ranks, join, serving_state
from offbeat.trainer.trainer import RefusedBatch, Trained
from offbeat.types import Group, Json

BEAT = "beat"
"""The concurrency group of signs of life."""
BEAT_SECONDS: Final = 1.0
"""A sign of life takes that long, so that one is always being waited for and its failure is known at once."""


@dataclass(frozen=True)
class Pulse:
    """A sign of life, and what there is to tell."""

    pid: int
    groups: int = 0
    notices: tuple[str, ...] = ()


class ScoringActor:
    """A scoring pool that workers share. Scoring is a pure function: after a crash Ray simply asks again."""

    def __init__(self, config: Config) -> None:
        task = config.task
        self._pool = ScoringPool.of(make_task(config), workers=task.scorers, memory_mib=task.memory_mib)

    async def score(self, text: str, columns: Columns, of: str) -> Outcome:
        """One completion."""
        return await asyncio.wrap_future(await asyncio.to_thread(self._pool.score, text, columns, of=of))

    @ray.method(concurrency_group=BEAT)
    async def beat(self) -> Pulse:
        """Still there."""
        await asyncio.sleep(BEAT_SECONDS)
        return Pulse(os.getpid())


@dataclass(frozen=True)
class RemoteScoring:
    """A `Scorer` that asks an actor."""

    actor: ActorHandle[ScoringActor]

    def score(self, text: str, columns: Columns, *, of: str = "") -> "Future[Outcome]":
        """See `Scorer`."""
        asked: Future[Outcome] = cast(Any, self.actor).score.remote(text, columns, of).future()
        return asked

    def score_all(self, items: Sequence[tuple[str, Columns]]) -> list[Outcome]:
        """In order; blocks."""
        return [future.result() for future in [self.score(text, columns) for text, columns in items]]


class RankActor:
    """One rank of the trainer. All are asked the same things in the same order, and answer when they are done."""

    def __init__(self, config: Config, directory: RunDirectory, rank: int, scoring: RemoteScoring) -> None:
        self._config, self._directory, self._rank, self._scoring = config, directory, rank, scoring
        self._stack = ExitStack()
        self._served: HfEngine | None = None

    def host(self) -> str:
        """The node it is on."""
        return str(ray.get_runtime_context().get_node_id())

    def start(self, rendezvous: str, one_machine: bool) -> dict[str, Json]:
        """Meet the others, load, go to the newest checkpoint; returns what the driver must know."""
        config = self._config
        ranks = Ranks()
        if config.trainer.ranks > 1:
            device = str(torch.accelerator.current_accelerator() or "cpu")
            ranks = join(self._rank, config.trainer.ranks, rendezvous, device=device, loopback=one_machine)
        self._setting = RunContext(config, self._directory, make_task(config), load_tokenizer(config))
        task, tokenizer = self._setting.task, self._setting.tokenizer
        self._learner = RankLearner.open(config, self._directory, task, tokenizer, self._stack, ranks)
        kept = self._learner.restore()
        estimate = self._learner.estimate()
        vocabulary = self._learner.trainer.policy_model.vocabulary
        return {"kept": kept, "estimate": estimate, "vocabulary": vocabulary, "step": self._learner.trainer.step}

    def train(self, groups: Sequence[Group]) -> tuple[Trained | RefusedBatch, int]:
        """A step, and k after it."""
        outcome = self._learner.train(groups)
        return outcome, self._learner.trainer.step

    def publish(self, version: int) -> dict[str, Json]:
        """See `RankLearner`."""
        return self._learner.publish(version)

    def save(self, state: Mapping[str, Json]) -> None:
        """See `RankLearner`."""
        self._learner.save(state)

    def evaluate(self, step: int) -> Mapping[str, Json]:
        """Pass rates of the policy as it is now; ranks other than 0 help to gather it."""
        config, policy_model = self._config, self._learner.trainer.policy_model
        if config.trainer.ranks == 1:
            model = policy_model.model
        else:
            whole = dict(serving_state(policy_model, getattr(torch, config.model.serve)))
            if self._rank > 0:
                return {}
            if self._served is None:
                self._served = HfEngine.start(Path(config.model.path), dtype=config.model.serve)
            asyncio.run(self._served.load(step, whole.items()))
            model = self._served.model
        setting = self._setting
        return asyncio.run(PolicyEvaluation(config, setting.task, setting.tokenizer, self._scoring, model)(step))

    def finish(self) -> None:
        """The last checkpoint is on disk."""
        self._learner.checkpoints.wait()

    def close(self) -> None:
        """Let go of logs and locks."""
        self._stack.close()

    @ray.method(concurrency_group=BEAT)
    def beat(self) -> Pulse:
        """Still there."""
        time.sleep(BEAT_SECONDS)
        return Pulse(os.getpid())


@dataclass(frozen=True)
class Question:
    """What a worker asks of the desk: a method of `Prompts` and its arguments."""

    number: int
    method: str
    arguments: tuple[Any, ...]


class WorkerActor:
    """One worker. Its questions wait here until the driver fetches them, so that nobody has to reach the driver."""

    def __init__(
        self, name: str, config: Config, directory: RunDirectory, vocabulary: int, scoring: RemoteScoring
    ) -> None:
        self._name, self._config, self._directory, self._vocabulary = name, config, directory, vocabulary
        self._scoring = scoring
        self._numbers = itertools.count()
        self._asked: asyncio.Queue[Question] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._worker: Worker | None = None
        self._told = 0

    async def work(self) -> None:
        """Until stopped."""
        config = self._config
        setting = RunContext(config, self._directory, make_task(config), load_tokenizer(config))
        with setting.open_log(self._vocabulary, f"{self._name} {os.getpid()}") as log:
            worker, policies = make_worker(setting, self._name, self, self._scoring, log)
            with policies:
                self._worker = worker
                await worker.run()

    async def stop(self) -> None:
        """End `work`."""
        if self._worker is not None:
            self._worker.stop()

    async def nudge(self) -> None:
        """A newer version is out."""
        if self._worker is not None:
            self._worker.nudge()

    async def questions(self) -> list[Question]:
        """All there are, as soon as there is one; none after a while."""
        try:
            async with asyncio.timeout(BEAT_SECONDS):
                found = [await self._asked.get()]
        except TimeoutError:
            return []
        while not self._asked.empty():
            found.append(self._asked.get_nowait())
        return found

    async def answer(self, number: int, value: Any) -> None:
        """What the desk said."""
        waiting = self._answers.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(value)

    async def serving(self, by: str, version: int | None) -> None:
        """See `Prompts`."""
        await self._ask("serving", by, version)

    async def take(self, count: int, by: str) -> list[PromptLease]:
        """See `Prompts`."""
        return cast(list[PromptLease], await self._ask("take", count, by))

    async def finish(self, group_ids: Sequence[str]) -> None:
        """See `Prompts`."""
        await self._ask("finish", list(group_ids))

    async def give_back(self, group_ids: Sequence[str]) -> None:
        """See `Prompts`."""
        await self._ask("give_back", list(group_ids))

    async def _ask(self, method: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        self._asked.put_nowait(Question(number, method, arguments))
        try:
            return await self._answers[number]
        finally:
            self._answers.pop(number, None)

    @ray.method(concurrency_group=BEAT)
    async def beat(self) -> Pulse:
        """Still there; and what went wrong since."""
        await asyncio.sleep(BEAT_SECONDS)
        if self._worker is None:
            return Pulse(os.getpid())
        tally = self._worker.tally
        told, self._told = self._told, len(tally.notices)
        return Pulse(os.getpid(), tally.groups, tuple(tally.notices[told:]))
