"""The driver's side of the actors: a worker as a fleet member, the ranks as the learner, restarts of scoring pools.

The driver waits for a call to an actor and for its heartbeat at the same time. An actor without a heartbeat for
`silence` seconds counts as lost, like one whose process has ended. It is killed first, so that it cannot come back.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from offbeat.errors import ActorSilent, NoGradient, PoolError, RankDied, RankFailed, RankLost, RankSilent
from offbeat.events import EventKind
from offbeat.run.desk import Desk
from offbeat.run.journal import Journal
from offbeat.run.ray.actors import HEARTBEAT_SECONDS, DeskCall, Heartbeat
from offbeat.trainer.trainer import RefusedBatch, Trained
from offbeat.types import Group, Json, StepContext

START_SECONDS: Final = 180.0
"""Limit for the first heartbeat: the process has to start and import its modules."""
CLOSE_SECONDS: Final = 3.0
"""Limit to give back prompts and release locks. Engines take longer; they are killed with their actor."""
BLAME_SECONDS: Final = 3.0
"""After a rank raised, how long to wait for the error of the rank that caused it."""


async def watch_heartbeats(
    name: str, actor: Any, silence: float, on_heartbeat: Callable[[Heartbeat], None] = lambda _: None
) -> None:
    """Wait for heartbeats without end. Raises `ActorSilent`, or Ray's error for a process that has ended."""
    limit, heartbeat = START_SECONDS, actor.heartbeat.options(max_task_retries=0)
    while True:
        try:
            async with asyncio.timeout(limit):  # not `wait_for`, which may swallow a cancellation
                on_heartbeat(await heartbeat.remote())
        except TimeoutError:
            raise ActorSilent(f"{name} has sent no heartbeat for {limit:g} s") from None
        limit = silence


async def until_first_ends(*works: Coroutine[Any, Any, None] | Awaitable[None]) -> None:
    """Run all of them until one returns or raises; cancel the others."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class RemoteMember:
    """A worker in an actor, as a `Member` of the fleet."""

    name: str
    actor: Any
    desk: Desk
    silence: float
    last_heartbeat: Heartbeat = field(default_factory=lambda: Heartbeat(pid=0))
    _silent: bool = False
    _news: list[str] = field(default_factory=list)
    _answering: set[asyncio.Task[None]] = field(default_factory=set)

    async def work(self) -> None:
        heartbeats = watch_heartbeats(self.name, self.actor, self.silence, self._note_heartbeat)
        try:
            await until_first_ends(self._run(), self._serve_desk(), heartbeats)
        except ActorSilent:
            self._silent = True
            raise

    async def nudge(self) -> None:
        self.actor.nudge.remote()

    async def close(self) -> None:
        """See `Member`. The worker gets `CLOSE_SECONDS` to give back its prompts; then its process is killed."""
        if self.last_heartbeat.pid and not self._silent:
            with contextlib.suppress(RayError):
                await until_first_ends(self._stop(), self._serve_desk(), asyncio.sleep(CLOSE_SECONDS))
        for task in self._answering:
            task.cancel()
        ray.kill(self.actor)

    def news(self) -> list[str]:
        news, self._news = self._news, []
        return news

    @property
    def groups(self) -> int:
        return self.last_heartbeat.groups

    async def _run(self) -> None:
        self._work = self.actor.work.remote()
        try:
            await self._work
        except PoolError as error:  # Ray's copy, whose message is a traceback
            cause: BaseException = error
            while isinstance(cause, RayTaskError):
                cause = cause.cause
            raise cause from None

    async def _stop(self) -> None:
        await self.actor.stop.remote()
        await self._work

    def _note_heartbeat(self, heartbeat: Heartbeat) -> None:
        self.last_heartbeat = heartbeat
        self._news += heartbeat.notices

    async def _serve_desk(self) -> None:
        """Fetch the worker's calls to the desk, and answer each when the desk returns."""
        while True:
            for call in await self.actor.desk_calls.remote():
                task = asyncio.create_task(self._answer(call))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    async def _answer(self, call: DeskCall) -> None:
        value = await getattr(self.desk, call.method)(*call.arguments)
        self.actor.answer.remote(call.number, value)


@dataclass
class ClusterLearner:
    """The `Learner` whose ranks are actors."""

    actors: Sequence[Any]
    silence: float
    patience: float
    """Limit in seconds for one call: a rank that sends heartbeats may still be stuck."""
    journal: Journal
    step: int = 0
    _lost: RankLost | None = None
    _watching: list[asyncio.Task[None]] = field(default_factory=list)

    def watch(self) -> None:
        """Watch the heartbeats of all ranks from now on."""
        self._watching = [asyncio.create_task(self._watch_rank(rank)) for rank in range(len(self.actors))]

    async def close(self) -> None:
        """End all ranks. Unless one is lost, they first get `CLOSE_SECONDS` to release logs and locks."""
        for task in self._watching:
            task.cancel()
        if self._lost is None:
            with contextlib.suppress(TimeoutError, RayActorError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await asyncio.gather(*(actor.close.remote() for actor in self.actors))
        for actor in self.actors:
            ray.kill(actor)

    def check(self) -> None:
        if self._lost is not None:
            raise self._lost

    async def start(self) -> dict[str, Json]:
        """Start all ranks at the newest checkpoint; return what `RankActor.start` returned on rank 0."""
        places = await self._call_each(self.actors, "node")
        [rendezvous] = await self._call_each(self.actors[:1], "open_rendezvous", len(set(places)) == 1)
        details: dict[str, Json] = await self._call_all("start", rendezvous, places)
        self.step = int(str(details["step"]))
        return details

    async def train(self, groups: Sequence[Group], context: StepContext) -> Trained | RefusedBatch:
        outcome: Trained | RefusedBatch
        outcome, self.step = await self._call_all("train", ray.put(list(groups)), context)
        return outcome

    async def publish(self, version: int) -> Mapping[str, Json]:
        details: Mapping[str, Json] = await self._call_all("publish", version)
        return details

    async def save(self, state: Mapping[str, Json]) -> None:
        await self._call_all("save", dict(state))

    async def finish(self) -> None:
        await self._call_all("finish")

    async def evaluate(self, step: int) -> Mapping[str, Json]:
        """Return the pass rates of the current policy."""
        rates: Mapping[str, Json] = await self._call_all("evaluate", step)
        return rates

    async def _call_all(self, method: str, *arguments: Any) -> Any:
        """Call a method of every rank and return rank 0's result. Raises `RankLost` as soon as a rank is lost."""
        return (await self._call_each(self.actors, method, *arguments))[0]

    async def _call_each(self, actors: Sequence[Any], method: str, *arguments: Any) -> list[Any]:
        """Call a method of these ranks, from rank 0 on, and return their results."""
        self.check()
        deadline = time.monotonic() + self.patience
        calls: list[asyncio.Future[Any]] = [asyncio.ensure_future(_call(actor, method, arguments)) for actor in actors]
        waiting: set[asyncio.Future[Any]] = set(calls)
        try:
            while waiting:
                done, waiting = await asyncio.wait(
                    waiting, timeout=HEARTBEAT_SECONDS / 4, return_when=asyncio.FIRST_EXCEPTION
                )
                self.check()
                if failed := [call for call in done if call.exception() is not None]:
                    await self._raise_cause(calls, calls.index(failed[0]))
                if waiting and time.monotonic() > deadline:
                    late = min(calls.index(call) for call in waiting)
                    raise self._mark_lost(RankSilent(late, f"did not finish {method!r} within {self.patience:g} s"))
            return [call.result() for call in calls]
        finally:
            for call in calls:
                call.cancel()

    async def _raise_cause(self, calls: Sequence["asyncio.Future[Any]"], rank: int) -> None:
        """Raise why a call failed: `NoGradient` if all ranks agree on it, else the rank that is lost."""
        # When a rank is lost, the others raise too, because their partner is gone: wait for the one to blame.
        await asyncio.wait(calls, timeout=BLAME_SECONDS if len(calls) > 1 else 0)
        errors = {number: call.exception() for number, call in enumerate(calls) if call.done()}
        if all(isinstance(error, NoGradient) for error in errors.values()):
            raise NoGradient(str(errors[rank])) from None
        for number, error in errors.items():
            if isinstance(error, RayActorError):
                raise self._mark_lost(RankDied(number, f"has died: {_first_line(error)}")) from error
        self.check()
        error = errors[rank]
        cause = getattr(error, "cause", error)
        if isinstance(cause, RankLost):  # a rank that did not join is named by those that waited for it
            raise self._mark_lost(cause) from error
        if len(self.actors) == 1 and isinstance(cause, Exception):
            raise cause
        raise self._mark_lost(RankFailed(rank, f"raised {type(cause).__name__}: {cause}")) from error

    def _mark_lost(self, lost: RankLost) -> RankLost:
        if self._lost is None:
            self._lost = lost
            self.journal.write(EventKind.RANK_LOST, self.step, rank=lost.rank, why=str(lost))
        return self._lost

    async def _watch_rank(self, rank: int) -> None:
        try:
            await watch_heartbeats(f"rank {rank}", self.actors[rank], self.silence)
        except ActorSilent as silent:
            self._mark_lost(RankSilent(rank, str(silent).removeprefix(f"rank {rank} ")))
        except RayActorError as died:
            self._mark_lost(RankDied(rank, f"has died: {_first_line(died)}"))


async def _call(actor: Any, method: str, arguments: Sequence[Any]) -> Any:
    return await getattr(actor, method).remote(*arguments)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


async def keep_pool_alive(name: str, actor: Any, silence: float, journal: Journal, step: Callable[[], int]) -> None:
    """Watch a scoring pool without end. Ray restarts it when its process ends; a stuck one is killed first."""
    while True:
        try:
            await watch_heartbeats(name, actor, silence)
        except ActorSilent as silent:
            journal.write(EventKind.SCORING_LOST, step(), pool=name, why=str(silent))
            ray.kill(actor, no_restart=False)
        except RayActorError as died:
            journal.write(EventKind.SCORING_LOST, step(), pool=name, why=_first_line(died))
        await asyncio.sleep(HEARTBEAT_SECONDS)
