"""Where workers get prompts: leases under admission. Waits instead of turning away, so that nobody has to ask twice."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from offbeat.rollout.prompt_leases import PromptLease, PromptLeases
from offbeat.run.admission import Admission, Progress
from offbeat.types import Json


class Desk:
    """The `Prompts` of a run. Lives in the event loop of the loop; the loop tells it how far things are."""

    def __init__(self, leases: PromptLeases, admission: Admission, clock: Callable[[], float]) -> None:
        self._leases, self._admission, self._clock = leases, admission, clock
        self._progress = Progress(k=0, published=0, waiting=0, writing=0, missing=0)
        self.finished = 0
        """Groups that were answered so far."""
        self._counted = 0
        self._serving: dict[str, int | None] = {}
        self._changed = asyncio.Condition()
        self.asked = 0
        """Groups begun so far, those begun again included."""
        self._idle, self._looked = 0.0, clock()

    async def serving(self, by: str, version: int | None) -> None:
        """See `Prompts`."""
        async with self._changed:
            self._serving[by] = version
            self._changed.notify_all()

    async def take(self, count: int, by: str) -> list[PromptLease]:
        """See `Prompts`. Waits until there is something to begin, or something that is overdue comes back."""
        async with self._changed:
            while True:
                self._expire()
                version = self._serving.get(by)
                room = 0 if version is None else self._admission.room(self.progress, version)
                if room:
                    self._count_idle()
                    taken = self._leases.take(min(count, room), self._clock(), by, version)
                    self.asked += len(taken)
                    return taken
                await self._until_changed()

    async def finish(self, group_ids: Sequence[str]) -> None:
        """See `Prompts`."""
        async with self._changed:
            self._count_idle()
            self.finished += self._leases.finish(group_ids)
            self._changed.notify_all()

    async def give_back(self, group_ids: Sequence[str]) -> None:
        """See `Prompts`."""
        async with self._changed:
            self._count_idle()
            self._leases.give_back(group_ids)
            self._changed.notify_all()

    async def take_back_from(self, by: str) -> list[str]:
        """All that a worker has, because it is gone."""
        self._serving.pop(by, None)
        lost = [lease.group_id for lease in self._leases.out if lease.by == by]
        await self.give_back(lost)
        return lost

    async def report(self, *, k: int, published: int, waiting: int, missing: int, counted: int) -> None:
        """How far the loop is: the next batch is drawn at k, `waiting` groups were in the log and in no batch yet when
        `finished` was `counted`."""
        async with self._changed:
            self._counted = counted
            self._progress = Progress(k, published, waiting, 0, missing)
            self._changed.notify_all()

    async def change(self, seconds: float) -> None:
        """Until something was finished or came back, or that many seconds have passed."""
        async with self._changed:
            await self._until_changed(seconds)

    @property
    def progress(self) -> Progress:
        """As admission sees it now."""
        return replace(self._progress, writing=len(self._leases.out) + self.finished - self._counted)

    @property
    def workers(self) -> Mapping[str, int | None]:
        """Those that are there, and the version that each serves."""
        return self._serving

    @property
    def out(self) -> list[PromptLease]:
        """What is being written."""
        return self._leases.out

    def state(self) -> dict[str, Json]:
        """For a checkpoint."""
        return self._leases.state()

    @property
    def idle(self) -> float:
        """Seconds so far in which nothing was being written."""
        self._count_idle()
        return self._idle

    def _count_idle(self) -> None:
        now = self._clock()
        self._idle += 0.0 if self._leases.out else now - self._looked
        self._looked = now

    def _expire(self) -> None:
        self._count_idle()
        if self._leases.expire(self._clock()):
            self._changed.notify_all()

    async def _until_changed(self, seconds: float | None = None) -> None:
        """At most until the next lease is overdue."""
        self._expire()
        deadlines = [lease.deadline - self._clock() for lease in self._leases.out]
        limits = [max(limit, 0.001) for limit in (*deadlines, seconds) if limit is not None]
        try:
            async with asyncio.timeout(min(limits, default=None)):
                await self._changed.wait()
        except TimeoutError:
            return
