"""The desk that workers get prompts from: leases, limited by admission. A request waits until it can be granted.

Prompts of an evaluation go first. They need no admission, because nothing is trained on their answers.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from offbeat.rollout.prompt_leases import PromptLease, PromptLeases
from offbeat.run.admission import Admission, Progress
from offbeat.run.evaluation_leases import EvaluationLeases
from offbeat.run.scoring_counts import ScoringCounts
from offbeat.run.waiting_line import WaitingLine, WaitingRequest
from offbeat.scoring.tally import OutcomeCount
from offbeat.types import Group, Json

GATHERING_SECONDS: Final = 0.25
"""Reading the log costs milliseconds, so the loop waits this long for all groups that it lacks, not for each one."""


class Desk:
    """The `Prompts` of a run. It shares the event loop of `Loop`, which reports its progress with `update`.

    No method awaits in the middle of a change, so there is no lock. After each change the requests that wait are
    served first come, first served, and only those that can be granted wake up: a cluster has thousands of them.
    """

    def __init__(self, leases: PromptLeases, admission: Admission, clock: Callable[[], float]) -> None:
        self._leases, self._admission, self._clock = leases, admission, clock
        self._evaluation: EvaluationLeases | None = None
        self._k = self._published = self._waiting = self._missing = 0
        self.admitted = 0
        """Groups admitted so far; a group that is admitted again counts again."""
        self.finished = 0
        """Groups finished so far."""
        self.scoring = ScoringCounts()
        self._finished_when_read = 0
        self._serving: dict[str, int | None] = {}
        self._line = WaitingLine()
        self._next_change: asyncio.Future[None] | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None
        self._idle_seconds, self._idle_counted_at = 0.0, clock()

    async def serving(self, by: str, version: int | None) -> None:
        self._serving[by] = version
        self._line.move(by, version)
        self._changed()

    async def take(self, count: int, by: str) -> list[PromptLease]:
        """See `Prompts`. Waits until an evaluation has prompts, admission has room or an overdue lease comes back."""
        request = self._line.join(count, by, self._serving.get(by))
        self._serve()
        try:
            return await request.granted
        except asyncio.CancelledError:
            self._line.leave(request)
            if request.granted.done() and not request.granted.cancelled():  # granted, but nobody is there any more
                await self.give_back([lease.group_id for lease in request.granted.result()])
            raise

    async def renew(self, group_ids: Sequence[str], by: str) -> list[str]:
        self._count_idle()
        lost = set(group_ids)
        for leases in self._all_leases:
            lost &= set(leases.renew(group_ids, self._clock(), by))
        return sorted(lost)

    async def evaluated(self, groups: Sequence[Group]) -> None:
        self._count_idle()
        if self._evaluation is not None:
            self._evaluation.answer(groups)
        self._changed()

    async def evaluate(self, evaluation: EvaluationLeases | None) -> None:
        """Lease the prompts of this evaluation from now on; None ends it, answered or not."""
        self._count_idle()
        self._evaluation = evaluation
        self._changed()

    async def finish(self, group_ids: Sequence[str], outcomes: Sequence[OutcomeCount] = ()) -> None:
        self._count_idle()
        self.scoring.add(outcomes)
        self.finished += self._leases.finish(group_ids)
        self._changed()

    async def give_back(self, group_ids: Sequence[str]) -> None:
        self._count_idle()
        for leases in self._all_leases:
            leases.give_back(group_ids)
        self._changed()

    async def reclaim(self, by: str) -> None:
        """Take back every lease of a worker that is gone."""
        self._serving.pop(by, None)
        self._line.move(by, None)
        await self.give_back([lease.group_id for leases in self._all_leases for lease in leases.out if lease.by == by])

    async def update(self, *, k: int, published: int, waiting: int, missing: int, finished: int) -> None:
        """Set the loop's `Progress`. `finished` is the value of `self.finished` just before the loop read the log."""
        self._finished_when_read = finished
        self._k, self._published, self._waiting, self._missing = k, published, waiting, missing
        self._changed()

    async def wait_for_change(self, seconds: float) -> None:
        """Wait until the leases or the progress change, at most this long."""
        if self._next_change is None:
            self._next_change = asyncio.get_running_loop().create_future()
        await asyncio.wait([self._next_change], timeout=seconds)

    async def wait_for_finished(self, count: int, seconds: float) -> None:
        """Wait until so many groups are finished or none is being generated, at most this long."""
        until = self._clock() + seconds
        while self.finished < count and self._leases.count_out and (left := until - self._clock()) > 0:
            await self.wait_for_change(left)

    @property
    def progress(self) -> Progress:
        """The progress as admission sees it now."""
        in_flight = self._leases.count_out + self.finished - self._finished_when_read
        return Progress(self._k, self._published, self._waiting, in_flight, self._missing)

    @property
    def workers(self) -> Mapping[str, int | None]:
        """The present workers, each with the version it serves."""
        return self._serving

    @property
    def in_flight(self) -> list[PromptLease]:
        """The leases of groups being generated, without those of an evaluation."""
        return self._leases.out

    @property
    def versions_in_flight(self) -> Mapping[int, int]:
        """How many groups are being generated by workers of each version, without those of an evaluation."""
        return self._leases.versions_out

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

    def _changed(self) -> None:
        if self._next_change is not None:
            self._next_change.set_result(None)
            self._next_change = None
        self._serve()

    def _serve(self) -> None:
        """Grant the requests that can be granted, in the order in which they came."""
        self._expire()
        versions = self._line.versions
        while versions:
            request = self._line.first(versions)
            if leases := self._grant(request):
                self._line.leave(request)
                request.granted.set_result(leases)
                versions &= self._line.versions
            else:
                versions -= {request.version}
        self._watch_deadlines()

    def _grant(self, request: WaitingRequest) -> list[PromptLease]:
        count, by, version = request.count, request.by, request.version
        assert version is not None  # a worker without a version waits outside the line
        if self._evaluation and (asked := self._evaluation.take(count, self._clock(), by, version)):
            return asked
        room = self._admission.room(self.progress, version)
        if not room:
            return []
        self._count_idle()
        taken = self._leases.take(min(count, room), self._clock(), by, version)
        self.admitted += len(taken)
        return taken

    def _count_idle(self) -> None:
        now, busy = self._clock(), any(leases.count_out for leases in self._all_leases)
        self._idle_seconds += 0.0 if busy else now - self._idle_counted_at
        self._idle_counted_at = now

    def _expire(self) -> None:
        self._count_idle()
        for leases in self._all_leases:
            leases.expire(self._clock())

    def _watch_deadlines(self) -> None:
        """Wake up when the next lease is overdue."""
        if self._deadline_timer is not None:
            return  # it wakes up no later than that: leases begin and are renewed with later deadlines
        deadlines = [leases.next_deadline for leases in self._all_leases]
        if known := [deadline for deadline in deadlines if deadline is not None]:
            seconds = max(0.0, min(known) - self._clock()) + 0.001  # a lease may be renewed at its very deadline
            self._deadline_timer = asyncio.get_running_loop().call_later(seconds, self._on_deadline)

    def _on_deadline(self) -> None:
        self._deadline_timer = None
        self._changed()
