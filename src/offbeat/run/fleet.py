"""The workers of a run, kept at work: one that dies is replaced, and has nothing to say until it is proven.

A member is a worker here or far away. Its `work()` takes prompts from the desk until it is stopped; where it ends with
an error, the desk takes back what it had, and a fresh one is made. A member that dies again and again without a group
is given up; a run without members ends.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from offbeat.errors import FleetLost
from offbeat.events import EventKind
from offbeat.run.desk import Desk
from offbeat.run.journal import Journal


class Member(Protocol):
    """One worker, wherever it runs."""

    async def work(self) -> None:
        """Take prompts, make groups, append them, until stopped. Raises what ended it otherwise."""

    async def nudge(self) -> None:
        """A newer version is out."""

    async def close(self) -> None:
        """Stop, give back, leave no process behind."""

    def news(self) -> list[str]:
        """What went wrong with it since it was last asked, and was mended."""

    @property
    def groups(self) -> int:
        """How many it has appended."""


@dataclass
class Fleet:
    """Members by name, each with the task that runs it."""

    make: Callable[[str], Member]
    names: Sequence[str]
    desk: Desk
    journal: Journal
    fruitless: int = 3
    """Deaths in a row, without a group in between, after which a member is given up."""
    pause: float = 0.5
    """Seconds between a death and the next attempt, doubling while it bears no fruit."""

    def __post_init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lost: dict[str, BaseException] = {}
        self._ready: set[str] = set()

    async def start(self) -> None:
        """Everyone begins."""
        for name in self.names:
            self.join(name)

    def join(self, name: str) -> None:
        """One more worker, also while others work."""
        self._tasks[name] = asyncio.create_task(self._keep(name), name=f"worker {name}")

    async def leave(self, name: str) -> None:
        """A worker ends its work; what it had begun goes back."""
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._members.pop(name, None)
        self._lost.pop(name, None)

    async def nudge(self) -> None:
        """A newer version is out."""
        await asyncio.gather(*(member.nudge() for member in list(self._members.values())), return_exceptions=True)

    def check(self) -> None:
        """Writes down what workers have to tell; raises where nobody is left to wait for."""
        k, ready = self.desk.progress.k, self.desk.workers.keys()
        for name in sorted(ready - self._ready):
            self.journal.write(EventKind.WORKER_READY, k, worker=name, version=self.desk.workers[name])
        self._ready = set(ready)
        for name, member in self._members.items():
            for notice in member.news():
                self.journal.write(EventKind.WORKER_RECOVERED, k, worker=name, why=notice[:500])
        if self._tasks and len(self._lost) == len(self._tasks):
            name, error = next(reversed(self._lost.items()))
            raise FleetLost(f"all {len(self._tasks)} workers were given up, {name} as the last: {error}") from error

    async def close(self) -> None:
        """Everyone stops."""
        await asyncio.gather(*(self.leave(name) for name in list(self._tasks)))

    async def _keep(self, name: str) -> None:
        fruitless = 0
        while True:
            member = self._members[name] = self.make(name)
            try:
                await member.work()
                return
            # The boundary of a worker: whatever ended it, its prompts go back and another takes its place.
            except Exception as error:
                fruitless = fruitless + 1 if member.groups == 0 else 1
                self.journal.write(EventKind.WORKER_LOST, self.desk.progress.k, worker=name, why=f"{error!r:.500}")
                if fruitless >= self.fruitless:
                    self._lost[name] = error
                    return
            finally:
                await member.close()
                await self.desk.take_back_from(name)
            await asyncio.sleep(self.pause * 2 ** (fruitless - 1))
