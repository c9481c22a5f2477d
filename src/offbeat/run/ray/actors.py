"""The parts of a run as Ray actors: each a thin shell around the class that does the same work in one process.

    RankActor      one rank of the trainer       RankLearner
    WorkerActor    one worker                    Worker, which gets prompts from the driver's desk
    ScoringActor   a scoring pool                ScoringPool

Every actor answers `heartbeat` in a thread of its own, also while it works. So a process that is stopped or stuck in
native code looks different from a busy one.
"""

import asyncio
import itertools
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, cast

import ray
import torch
from ray.actor import ActorHandle

from offbeat.config import Config
from offbeat.placement.plan import DevicePlan
from offbeat.rollout.hf import HfEngine
from offbeat.rollout.prompt_leases import PromptLease
from offbeat.rollout.worker import Worker
from offbeat.run.build import RunContext, make_task, make_worker, open_pool
from offbeat.run.directory import RunDirectory
from offbeat.run.engines import start_engine
from offbeat.run.evaluation.rates import PolicyEvaluation
from offbeat.run.learner import RankLearner
from offbeat.scoring.pool import Outcome
from offbeat.scoring.tally import OutcomeCount
from offbeat.tasks.rewards import Answers
from offbeat.trainer.fsdp import LOOPBACK, Listener, Ranks, join, open_listener, serving_state
from offbeat.trainer.trainer import RefusedBatch, Trained
from offbeat.types import Group, Json, StepContext

HEARTBEAT_GROUP: Final = "heartbeat"
"""The Ray concurrency group of heartbeats."""
HEARTBEAT_SECONDS: Final = 1.0
"""A heartbeat call takes this long. So the driver always waits for one, and sees at once when it fails."""


@dataclass(frozen=True)
class Heartbeat:
    """Proof that an actor is alive, and a worker's news since the last one."""

    pid: int
    groups: int = 0
    notices: tuple[str, ...] = ()


class ScoringActor:
    """A scoring pool that workers share. Scoring is a pure function, so Ray repeats a call after a crash."""

    def __init__(self, config: Config) -> None:
        self._pool = open_pool(config, make_task(config))

    async def score_group(self, answers: Answers, of: Sequence[str]) -> list[Outcome]:
        return await asyncio.wrap_future(await asyncio.to_thread(self._pool.score_group, answers, of))

    @ray.method(concurrency_group=HEARTBEAT_GROUP)
    async def heartbeat(self) -> Heartbeat:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        return Heartbeat(os.getpid())


@dataclass(frozen=True)
class RemoteScoring:
    """A `Scorer` that calls an actor."""

    actor: ActorHandle[ScoringActor]

    def score_group(self, answers: Answers, of: Sequence[str] = ()) -> "Future[list[Outcome]]":
        future: Future[list[Outcome]] = cast(Any, self.actor).score_group.remote(answers, of).future()
        return future


class RankActor:
    """One rank of the trainer. All ranks get the same calls in the same order and return when the work is done."""

    def __init__(
        self, config: Config, directory: RunDirectory, rank: int, scoring: RemoteScoring, plan: DevicePlan | None
    ) -> None:
        self._config, self._directory, self._rank, self._scoring = config, directory, rank, scoring
        self._plan = plan
        self._stack = ExitStack()
        self._served: HfEngine | None = None
        self._listener: Listener | None = None

    def node(self) -> str:
        return str(ray.get_runtime_context().get_node_id())

    def open_rendezvous(self, one_machine: bool) -> str:
        """Listen where the other ranks will join, on rank 0: on loopback only if all of them are on this machine."""
        self._listener = open_listener(LOOPBACK if one_machine else ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]
        return self._listener.rendezvous

    def start(self, rendezvous: str, places: Sequence[str]) -> dict[str, Json]:
        """Join the other ranks, load the model, restore the newest checkpoint; return what the driver needs."""
        config = self._config
        ranks = Ranks()
        if config.trainer.ranks > 1:
            device = str(torch.accelerator.current_accelerator(check_available=True) or "cpu")
            ranks = join(
                self._rank,
                config.trainer.ranks,
                rendezvous,
                listener=self._listener,
                device=device,
                places=places,
            )
            if self._plan is not None:
                nodes = ranks.nodes if self._plan.replicas > 1 else ()
                ranks = replace(ranks, nodes=nodes, reduce="once" if self._plan.reduce_once else "scatter")
        self._context = RunContext.load(config, self._directory)
        task, tokenizer = self._context.task, self._context.tokenizer
        self._learner = RankLearner.open(config, self._directory, task, tokenizer, self._stack, ranks)
        return {
            "saved": self._learner.restore(),
            "estimate": self._learner.estimate(),
            "vocab_size": self._learner.trainer.policy_model.vocab_size,
            "step": self._learner.trainer.step,
        }

    def train(self, groups: Sequence[Group], context: StepContext) -> tuple[Trained | RefusedBatch, int]:
        """Train one step; return the outcome and k after it."""
        outcome = self._learner.train(groups, context)
        return outcome, self._learner.trainer.step

    def publish(self, version: int) -> dict[str, Json]:
        return self._learner.publish(version)

    def save(self, state: Mapping[str, Json]) -> None:
        self._learner.save(state)

    def evaluate(self, step: int) -> Mapping[str, Json]:
        """Return the pass rates of the current policy, in a run without workers.

        Ranks other than 0 only help to gather the model.
        """
        config, policy_model = self._config, self._learner.trainer.policy_model
        model, rounded = policy_model.model, self._learner.rounded
        if config.trainer.ranks > 1:
            whole = serving_state(policy_model, getattr(torch, config.model.serve))
            if self._rank > 0:
                return {"gathered": sum(1 for _ in whole)}
            if self._served is None:
                self._served = HfEngine.start(
                    config.model.directory(), dtype=config.model.serve, adapter=policy_model.adapter
                )
            asyncio.run(self._served.load(step, whole))
            model, rounded = self._served.model, nullcontext
        task, tokenizer = self._context.task, self._context.tokenizer
        return asyncio.run(PolicyEvaluation(config, task, tokenizer, self._scoring, model, rounded)(step))

    def finish(self) -> None:
        self._learner.finish()

    def close(self) -> None:
        """Release logs and locks."""
        self._stack.close()

    @ray.method(concurrency_group=HEARTBEAT_GROUP)
    def heartbeat(self) -> Heartbeat:
        time.sleep(HEARTBEAT_SECONDS)
        return Heartbeat(os.getpid())


@dataclass(frozen=True)
class DeskCall:
    """A worker's call to the desk: a method of `Prompts` and its arguments."""

    number: int
    method: str
    arguments: tuple[Any, ...]


class WorkerActor:
    """One worker, and the `Prompts` of that worker.

    Calls to the desk wait here until the driver fetches them. So no process has to connect to the driver.
    """

    def __init__(
        self, name: str, config: Config, directory: RunDirectory, vocab_size: int, scoring: RemoteScoring
    ) -> None:
        self._name, self._config, self._directory, self._vocab_size = name, config, directory, vocab_size
        self._scoring = scoring
        self._numbers = itertools.count()
        self._desk_calls: asyncio.Queue[DeskCall] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._worker: Worker | None = None
        self._notices_sent = 0

    async def work(self) -> None:
        """Work until stopped."""
        context = RunContext.load(self._config, self._directory)
        with (
            context.open_log(self._vocab_size, f"{self._name} {os.getpid()}") as log,
            context.subscribe(self._name) as policies,
        ):
            start = partial(start_engine, self._config)
            self._worker = make_worker(context, self._name, self, self._scoring, log, policies, start)
            await self._worker.run()

    async def stop(self) -> None:
        """End `work`."""
        if self._worker is not None:
            self._worker.stop()

    async def nudge(self) -> None:
        if self._worker is not None:
            self._worker.nudge()

    async def desk_calls(self) -> list[DeskCall]:
        """Return all waiting calls as soon as there is one, or none after `HEARTBEAT_SECONDS`."""
        try:
            async with asyncio.timeout(HEARTBEAT_SECONDS):
                calls = [await self._desk_calls.get()]
        except TimeoutError:
            return []
        while not self._desk_calls.empty():
            calls.append(self._desk_calls.get_nowait())
        return calls

    async def answer(self, number: int, value: Any) -> None:
        """Pass the desk's return value to the call that waits for it."""
        waiting = self._answers.pop(number, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(value)

    async def serving(self, by: str, version: int | None) -> None:
        await self._call_desk("serving", by, version)

    async def take(self, count: int, by: str) -> list[PromptLease]:
        return cast(list[PromptLease], await self._call_desk("take", count, by))

    async def renew(self, group_ids: Sequence[str], by: str) -> list[str]:
        return cast(list[str], await self._call_desk("renew", list(group_ids), by))

    async def finish(self, group_ids: Sequence[str], outcomes: Sequence[OutcomeCount] = ()) -> None:
        await self._call_desk("finish", list(group_ids), list(outcomes))

    async def evaluated(self, groups: Sequence[Group]) -> None:
        await self._call_desk("evaluated", list(groups))

    async def give_back(self, group_ids: Sequence[str]) -> None:
        await self._call_desk("give_back", list(group_ids))

    async def _call_desk(self, method: str, *arguments: Any) -> Any:
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        self._desk_calls.put_nowait(DeskCall(number, method, arguments))
        try:
            return await self._answers[number]
        finally:
            self._answers.pop(number, None)

    @ray.method(concurrency_group=HEARTBEAT_GROUP)
    async def heartbeat(self) -> Heartbeat:
        await asyncio.sleep(HEARTBEAT_SECONDS)
        if self._worker is None:
            return Heartbeat(os.getpid())
        tally = self._worker.tally
        sent, self._notices_sent = self._notices_sent, len(tally.notices)
        return Heartbeat(os.getpid(), tally.groups, tuple(tally.notices[sent:]))
