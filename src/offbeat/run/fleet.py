"""The workers of a run: a worker that dies is replaced, and the new one gets no prompts until it passes its probe.

A member is one worker, in this process or on another machine. Its `work()` takes prompts from the desk until it is
stopped. If `work()` raises, the desk takes the worker's prompts back and the fleet makes a new member. A worker that
fails several times in a row without a group is not replaced again; a run without workers ends. So does a run that
cannot score, at once: another worker would have the same reward function.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from offbeat.errors import FleetLost, PoolError
from offbeat.events import EventKind
from offbeat.run.desk import Desk
from offbeat.run.journal import Journal


class Member(Protocol):
    """One worker, in this process or behind an actor."""

    async def work(self) -> None:
        """Take prompts, generate groups and append them, until stopped. Raises the error that ended the worker."""

    async def nudge(self) -> None:
        """Tell the worker that a newer version is published."""

    async def close(self) -> None:
        """Stop, give prompts back, and leave no process behind."""

    def news(self) -> list[str]:
        """Return the problems the worker recovered from since the last call."""

    @property
    def groups(self) -> int:
        """How many groups this member appended."""


@dataclass
class Fleet:
    """Members by name, each with the task that runs it."""

    make: Callable[[str], Member]
    names: Sequence[str]
    desk: Desk
    journal: Journal
    fruitless: int = 3
    """Failures in a row without a group after which a worker is not replaced."""
    pause: float = 0.5
    """Seconds before a worker is replaced; doubled after each further failure in a row."""

    def __post_init__(self) -> None:
        self._members: dict[str, Member] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._lost: dict[str, BaseException] = {}
        self._ready: set[str] = set()
        self._cannot_score: PoolError | None = None

    def start(self) -> None:
        for name in self.names:
            self.join(name)

    def join(self, name: str) -> None:
        """Add a worker, also while others work."""
        self._tasks[name] = asyncio.create_task(self._keep_working(name), name=f"worker {name}")

    async def leave(self, name: str) -> None:
        """Stop a worker; its prompts go back to the desk."""
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        self._members.pop(name, None)
        self._lost.pop(name, None)

    async def nudge(self) -> None:
        """Tell every worker that a newer version is published."""
        await asyncio.gather(*(member.nudge() for member in list(self._members.values())), return_exceptions=True)

    def check(self) -> None:
        """Write the workers' news to the journal; raise an error if no worker is left or none can score."""
        k, ready = self.desk.progress.k, self.desk.workers.keys()
        for name in sorted(ready - self._ready):
            self.journal.write(EventKind.WORKER_READY, k, worker=name, version=self.desk.workers[name])
        self._ready = set(ready)
        for name, member in self._members.items():
            for notice in member.news():
                self.journal.write(EventKind.WORKER_RECOVERED, k, worker=name, why=notice[:500])
        if self._cannot_score is not None:
            raise self._cannot_score
        if self._tasks and len(self._lost) == len(self._tasks):
            name, error = next(reversed(self._lost.items()))
            raise FleetLost(
                f"all {len(self._tasks)} workers failed {self.fruitless} times in a row without a group; the last "
                f"error, of {name}: {error}"
            ) from error

    async def close(self) -> None:
        await asyncio.gather(*(self.leave(name) for name in list(self._tasks)))

    async def _keep_working(self, name: str) -> None:
        """Run a worker, and a new one after each failure."""
        failures = 0
        while True:
            member = self._members[name] = self.make(name)
            try:
                await member.work()
                return
            except PoolError as error:
                self._cannot_score = error
                return
            # The boundary of a worker: after any error its prompts go back and a new worker takes its place.
            except Exception as error:
                failures = failures + 1 if member.groups == 0 else 1
                self.journal.write(EventKind.WORKER_LOST, self.desk.progress.k, worker=name, why=f"{error!r:.500}")
                if failures >= self.fruitless:
                    self._lost[name] = error
                    return
            finally:
                await member.close()
                await self.desk.reclaim(name)
            await asyncio.sleep(self.pause * 2 ** (failures - 1))
