"""The driver's side of actors: a worker as a member of the fleet, ranks as the learner, pools that are kept alive.

What is asked of an actor is waited for together with its signs of life. One that gives none for `silence` seconds is
lost like one whose process has ended, and is killed before anything else happens, so that it cannot come back.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray.exceptions import RayActorError, RayError

from offbeat.errors import ActorSilent, NoGradient, RankDied, RankFailed, RankLost, RankSilent
from offbeat.events import EventKind
from offbeat.run.desk import Desk
from offbeat.run.journal import Journal
from offbeat.run.ray.actors import BEAT_SECONDS, Pulse, Question
from offbeat.trainer.trainer import RefusedBatch, Trained
from offbeat.types import Group, Json

START_SECONDS: Final = 180.0
"""For the first sign of life: processes start, and import what they need."""
CLOSE_SECONDS: Final = 3.0
"""To give back prompts and let go of locks. Engines need longer, and are killed with their actor instead."""
GRACE: Final = 3.0
"""Seconds in which the rank to blame shows, after another one complained."""


async def listen(name: str, actor: Any, silence: float, heard: Callable[[Pulse], None] = lambda _: None) -> None:
    """Signs of life, for ever; raises `ActorSilent`, or Ray's error for a process that has ended."""
    limit, beat = START_SECONDS, actor.beat.options(max_task_retries=0)
    while True:
        try:
            async with asyncio.timeout(limit):  # not `wait_for`, which may swallow a cancellation
                heard(await beat.remote())
        except TimeoutError:
            raise ActorSilent(f"{name} has given no sign of life for {limit:g} s") from None
        limit = silence


async def first_of(*works: Coroutine[Any, Any, None] | Awaitable[None]) -> None:
    """Until one of them ends, well or not; the others are given up."""
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
    pulse: Pulse = field(default_factory=lambda: Pulse(0))
    _silent: bool = False
    _news: list[str] = field(default_factory=list)
    _answering: set[asyncio.Task[None]] = field(default_factory=set)

    async def work(self) -> None:
        """See `Member`."""
        try:
            await first_of(self._run(), self._serve(), listen(self.name, self.actor, self.silence, self._hear))
        except ActorSilent:
            self._silent = True
            raise

    async def nudge(self) -> None:
        """See `Member`."""
        self.actor.nudge.remote()

    async def close(self) -> None:
        """See `Member`. It may give back what it has and end its engine; then its process ends in any case."""
        if self.pulse.pid and not self._silent:
            with contextlib.suppress(RayError):
                await first_of(self._stopped(), self._serve(), asyncio.sleep(CLOSE_SECONDS))
        for task in self._answering:
            task.cancel()
        ray.kill(self.actor)

    def news(self) -> list[str]:
        """See `Member`."""
        news, self._news = self._news, []
        return news

    @property
    def groups(self) -> int:
        """See `Member`."""
        return self.pulse.groups

    async def _run(self) -> None:
        self._work = self.actor.work.remote()
        await self._work

    async def _stopped(self) -> None:
        await self.actor.stop.remote()
        await self._work

    def _hear(self, pulse: Pulse) -> None:
        self.pulse = pulse
        self._news += pulse.notices

    async def _serve(self) -> None:
        """Fetch what the worker asks, and answer each question when the desk has an answer."""
        while True:
            for question in await self.actor.questions.remote():
                task = asyncio.create_task(self._answer(question))
                self._answering.add(task)
                task.add_done_callback(self._answering.discard)

    async def _answer(self, question: Question) -> None:
        value = await getattr(self.desk, question.method)(*question.arguments)
        self.actor.answer.remote(question.number, value)


@dataclass
class ClusterLearner:
    """The `Learner` that asks ranks."""

    actors: Sequence[Any]
    silence: float
    patience: float
    """Seconds for one thing that is asked: a rank may beat and be stuck all the same."""
    journal: Journal
    step: int = 0
    _lost: RankLost | None = None
    _watching: list[asyncio.Task[None]] = field(default_factory=list)

    def watch(self) -> None:
        """Listen to all ranks from now on."""
        self._watching = [asyncio.create_task(self._listen(rank)) for rank in range(len(self.actors))]

    async def close(self) -> None:
        """End all ranks, those that can by themselves."""
        for task in self._watching:
            task.cancel()
        if self._lost is None:
            with contextlib.suppress(TimeoutError, RayActorError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await asyncio.gather(*(actor.close.remote() for actor in self.actors))
        for actor in self.actors:
            ray.kill(actor)

    def check(self) -> None:
        """See `Learner`."""
        if self._lost is not None:
            raise self._lost

    async def start(self, rendezvous: str) -> dict[str, Json]:
        """All ranks, at the newest checkpoint."""
        hosts = await asyncio.gather(*(actor.host.remote() for actor in self.actors))
        said: dict[str, Json] = await self.ask("start", rendezvous, len(set(hosts)) == 1)
        self.step = int(str(said["step"]))
        return said

    async def train(self, groups: Sequence[Group]) -> Trained | RefusedBatch:
        """See `Learner`."""
        outcome: Trained | RefusedBatch
        outcome, self.step = await self.ask("train", ray.put(list(groups)))
        return outcome

    async def publish(self, version: int) -> Mapping[str, Json]:
        """See `Learner`."""
        said: Mapping[str, Json] = await self.ask("publish", version)
        return said

    async def save(self, state: Mapping[str, Json]) -> None:
        """See `Learner`."""
        await self.ask("save", dict(state))

    async def finish(self) -> None:
        """See `Learner`."""
        await self.ask("finish")

    async def evaluate(self, step: int) -> Mapping[str, Json]:
        """Pass rates of the policy as it is now."""
        said: Mapping[str, Json] = await self.ask("evaluate", step)
        return said

    async def ask(self, method: str, *arguments: Any) -> Any:
        """The same of every rank; rank 0's answer. Raises `RankLost` as soon as one is."""
        self.check()
        until = time.monotonic() + self.patience
        calls: list[asyncio.Future[Any]] = [
            asyncio.ensure_future(_call(actor, method, arguments)) for actor in self.actors
        ]
        waiting: set[asyncio.Future[Any]] = set(calls)
        try:
            while waiting:
                done, waiting = await asyncio.wait(
                    waiting, timeout=BEAT_SECONDS / 4, return_when=asyncio.FIRST_EXCEPTION
                )
                self.check()
                if failed := [call for call in done if call.exception() is not None]:
                    await self._blame(calls, calls.index(failed[0]))
                if waiting and time.monotonic() > until:
                    late = min(calls.index(call) for call in waiting)
                    raise self._lose(RankSilent(late, f"has not finished {method!r} within {self.patience:g} s"))
            return calls[0].result()
        finally:
            for call in calls:
                call.cancel()

    async def _blame(self, calls: Sequence["asyncio.Future[Any]"], rank: int) -> None:
        """Raise what ended a call: all ranks' own verdict on a batch, or the rank that is lost."""
        await asyncio.wait(calls, timeout=GRACE if len(calls) > 1 else 0)  # the others only lost their partner
        errors = {place: call.exception() for place, call in enumerate(calls) if call.done()}
        if all(isinstance(error, NoGradient) for error in errors.values()):
            raise NoGradient(str(errors[rank])) from None
        for place, error in errors.items():
            if isinstance(error, RayActorError):
                raise self._lose(RankDied(place, f"has died: {_first_line(error)}")) from error
        self.check()
        error = errors[rank]
        cause = getattr(error, "cause", error)
        if len(calls) == 1 and isinstance(cause, Exception):
            raise cause
        raise self._lose(RankFailed(rank, f"raised {type(cause).__name__}: {cause}")) from error

    def _lose(self, lost: RankLost) -> RankLost:
        if self._lost is None:
            self._lost = lost
            self.journal.write(EventKind.RANK_LOST, self.step, rank=lost.rank, why=str(lost))
        return self._lost

    async def _listen(self, rank: int) -> None:
        try:
            await listen(f"rank {rank}", self.actors[rank], self.silence)
        except ActorSilent as silent:
            self._lose(RankSilent(rank, str(silent).removeprefix(f"rank {rank} ")))
        except RayActorError as died:
            self._lose(RankDied(rank, f"has died: {_first_line(died)}"))


async def _call(actor: Any, method: str, arguments: Sequence[Any]) -> Any:
    return await getattr(actor, method).remote(*arguments)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


async def keep_alive(name: str, actor: Any, silence: float, journal: Journal, step: Callable[[], int]) -> None:
    """A pool whose process ends is restarted by Ray; one that is stuck is ended, and then restarted too."""
    while True:
        try:
            await listen(name, actor, silence)
        except ActorSilent as silent:
            journal.write(EventKind.SCORING_LOST, step(), pool=name, why=str(silent))
            ray.kill(actor, no_restart=False)
        except RayActorError as died:
            journal.write(EventKind.SCORING_LOST, step(), pool=name, why=_first_line(died))
        await asyncio.sleep(BEAT_SECONDS)
