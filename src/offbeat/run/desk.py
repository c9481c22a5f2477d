"""The desk that workers get prompts from: leases, limited by admission. A request waits until it can be granted.

Prompts of an evaluation go first. They need no admission, because nothing is trained on their answers.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from offbeat.rollout.prompt_leases import PromptLease, PromptLeases
from offbeat.run.admission import Admission, Progress
from offbeat.run.evaluation_leases import EvaluationLeases
from offbeat.types import Group, Json


class Desk:
    """The `Prompts` of a run. It shares the event loop of `Loop`, which reports its progress with `update`."""

    def __init__(self, leases: PromptLeases, admission: Admission, clock: Callable[[], float]) -> None:
        self._leases, self._admission, self._clock = leases, admission, clock
        self._evaluation: EvaluationLeases | None = None
        self._progress = Progress(k=0, published=0, waiting=0, in_flight=0, missing=0)
        self.admitted = 0
        """Groups admitted so far; a group that is admitted again counts again."""
        self.finished = 0
        """Groups finished so far."""
        self._finished_when_read = 0
        self._serving: dict[str, int | None] = {}
        self._changed = asyncio.Condition()
        self._idle_seconds, self._idle_counted_at = 0.0, clock()

    async def serving(self, by: str, version: int | None) -> None:
        async with self._changed:
            self._serving[by] = version
            self._changed.notify_all()

    async def take(self, count: int, by: str) -> list[PromptLease]:
        """See `Prompts`. Waits until an evaluation has prompts, admission has room or an overdue lease comes back."""
        async with self._changed:
            while True:
                self._expire()
                version = self._serving.get(by)
                if self._evaluation and (asked := self._evaluation.take(count, self._clock(), by, version)):
                    return asked
                room = 0 if version is None else self._admission.room(self.progress, version)
                if room:
                    self._count_idle()
                    taken = self._leases.take(min(count, room), self._clock(), by, version)
                    self.admitted += len(taken)
                    return taken
                await self._until_changed()

    async def renew(self, group_ids: Sequence[str], by: str) -> list[str]:
        async with self._changed:
            self._count_idle()
            lost = set(group_ids)
            for leases in self._all_leases:
                lost &= set(leases.renew(group_ids, self._clock(), by))
            return sorted(lost)

    async def evaluated(self, groups: Sequence[Group]) -> None:
        async with self._changed:
            self._count_idle()
            if self._evaluation is not None:
                self._evaluation.answer(groups)
            self._changed.notify_all()

    async def evaluate(self, evaluation: EvaluationLeases | None) -> None:
        """Lease the prompts of this evaluation from now on; None ends it, answered or not."""
        async with self._changed:
            self._count_idle()
            self._evaluation = evaluation
            self._changed.notify_all()

    async def finish(self, group_ids: Sequence[str]) -> None:
        async with self._changed:
            self._count_idle()
            self.finished += self._leases.finish(group_ids)
            self._changed.notify_all()

    async def give_back(self, group_ids: Sequence[str]) -> None:
        async with self._changed:
            self._count_idle()
            for leases in self._all_leases:
                leases.give_back(group_ids)
            self._changed.notify_all()

    async def reclaim(self, by: str) -> None:
        """Take back every lease of a worker that is gone."""
        self._serving.pop(by, None)
        await self.give_back([lease.group_id for lease in self._all_out if lease.by == by])

    async def update(self, *, k: int, published: int, waiting: int, missing: int, finished: int) -> None:
        """Set the loop's `Progress`. `finished` is the value of `self.finished` just before the loop read the log."""
        async with self._changed:
            self._finished_when_read = finished
            self._progress = Progress(k, published, waiting, 0, missing)
            self._changed.notify_all()

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until the leases or the progress change, at most this long."""
        async with self._changed:
            await self._until_changed(seconds)

    @property
    def progress(self) -> Progress:
        """The progress as admission sees it now."""
        return replace(self._progress, in_flight=len(self._leases.out) + self.finished - self._finished_when_read)

    @property
    def workers(self) -> Mapping[str, int | None]:
        """The present workers, each with the version it serves."""
        return self._serving

    @property
    def in_flight(self) -> list[PromptLease]:
        """The leases of groups being generated, without those of an evaluation."""
        return self._leases.out

    @property
    def idle_seconds(self) -> float:
        """Seconds so far in which nothing was being generated."""
        self._count_idle()
        return self._idle_seconds

    def state(self) -> dict[str, Json]:
        return self._leases.state()

    @property
    def _all_leases(self) -> list[PromptLeases]:
        return [self._leases] if self._evaluation is None else [self._leases, self._evaluation]

    @property
    def _all_out(self) -> list[PromptLease]:
        return [lease for leases in self._all_leases for lease in leases.out]

    def _count_idle(self) -> None:
        now = self._clock()
        self._idle_seconds += 0.0 if self._all_out else now - self._idle_counted_at
        self._idle_counted_at = now

    def _expire(self) -> None:
        self._count_idle()
        expired = [late for leases in self._all_leases for late in leases.expire(self._clock())]
        if expired:
            self._changed.notify_all()

    async def _until_changed(self, seconds: float | None = None) -> None:
        """Wait for a change, at most until the next lease is overdue."""
        self._expire()
        deadlines = [lease.deadline - self._clock() for lease in self._all_out]
        limits = [max(limit, 0.001) for limit in (*deadlines, seconds) if limit is not None]
        try:
            async with asyncio.timeout(min(limits, default=None)):
                await self._changed.wait()
        except TimeoutError:
            return
