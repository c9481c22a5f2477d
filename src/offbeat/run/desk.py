"""The desk that workers get prompts from: those that fit, leased as admission allows. A request waits for its turn.

Prompts of an evaluation go first. They need no admission, because nothing is trained on their answers. Prompts over the
limit are left out before any engine sees them, and the run says how many: vLLM would refuse such a prompt and end the
worker; transformers would answer it, and the trainer would compute more tokens than its memory was checked for.

Every finished group passes the desk, so what became of its completions in scoring is counted here, by policy version,
and becomes metrics of the next step. The trainer sees only groups that can be trained.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from typing import Final

from offbeat.config import Config
from offbeat.errors import ModelUnreadable, PromptTooLong
from offbeat.events import EventKind
from offbeat.placement.shape import ModelShape
from offbeat.rollout.prompt_leases import PromptLease, PromptLeases
from offbeat.run.admission import Admission, Progress
from offbeat.run.evaluation.leases import EvaluationLeases
from offbeat.run.journal import Journal
from offbeat.scoring.tally import SCORED, OutcomeCount
from offbeat.seeds import derive
from offbeat.tasks.data import Tokenizer
from offbeat.tasks.task import Task, prompt_at
from offbeat.trainer.trainer import Trained
from offbeat.types import Group, Json, Prompt


@dataclass
class ScoringCounts:
    """What became of completions in scoring since the step before.

    >>> counts = ScoringCounts()
    >>> counts.add([(3, "scored", 6), (3, "answer timeout", 1), (4, "grader sandbox", 1)])
    >>> counts.metrics()
    {'unscorable_share': 0.125, 'answer_fault_share': 0.125, 'right_unscorable_share': 0.0}
    >>> counts.failures()
    {'3': {'answer timeout': 1, 'scored': 6}, '4': {'grader sandbox': 1}}
    """

    _found: Counter[tuple[int, str]] = field(default_factory=Counter)

    def add(self, outcomes: Sequence[OutcomeCount]) -> None:
        for version, what, count in outcomes:
            self._found[version, what] += count

    def metrics(self) -> dict[str, float]:
        """Return the shares; empty if nothing was generated."""
        total = self._found.total()
        blamed = Counter[str]()
        for (_, what), count in self._found.items():
            blamed[what.partition(" ")[0]] += count
        if not total:
            return {}
        names = {"unscorable_share": "grader", "answer_fault_share": "answer", "right_unscorable_share": "right"}
        return {name: blamed[blame] / total for name, blame in names.items()}

    def failures(self) -> dict[str, Json]:
        """Return the counts by version, of versions with at least one failure."""
        versions = sorted({version for version, what in self._found if what != SCORED})
        return {
            str(version): {what: count for (of, what), count in sorted(self._found.items()) if of == version}
            for version in versions
        }

    def report(self, trained: Trained, journal: Journal) -> Trained:
        """Return a step with the shares since the step before among its metrics; write failures as an event."""
        metrics, failures = self.metrics(), self.failures()
        self._found.clear()
        if failures:
            journal.write(EventKind.UNSCORABLE, trained.step, versions=failures)
        return replace(trained, metrics=trained.metrics | metrics)


GATHERING_SECONDS: Final = 0.25
"""Reading the log costs milliseconds, so the loop waits this long for all groups that it lacks, not for each one."""


@dataclass(eq=False)
class WaitingRequest:
    """A request of a worker for prompts."""

    count: int
    by: str
    version: int | None
    """The version that the worker serves; None while it has passed no probe."""
    arrival: int
    granted: asyncio.Future[list[PromptLease]] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class WaitingLine:
    """Requests by arrival and version.

    >>> async def example():
    ...     line = WaitingLine()
    ...     early, late, unproven = line.join(1, "a", version=7), line.join(1, "b", version=6), line.join(1, "c", None)
    ...     first, of_version_6 = line.first({6, 7}) is early, line.first({6}) is late
    ...     line.move("a", None)                            # its worker loads other weights
    ...     return first, of_version_6, line.versions
    >>> asyncio.run(example())
    (True, True, {6})
    """

    def __init__(self) -> None:
        self._arrivals = itertools.count()
        self._by_worker: dict[str, dict[int, WaitingRequest]] = {}
        # Heaps by arrival. A request that has left or moved to another version is skipped when it comes first.
        self._by_version: dict[int, list[tuple[int, WaitingRequest]]] = {}

    def join(self, count: int, by: str, version: int | None) -> WaitingRequest:
        """Add a request at the end."""
        request = WaitingRequest(count, by, version, next(self._arrivals))
        self._by_worker.setdefault(by, {})[request.arrival] = request
        self._push(request)
        return request

    def leave(self, request: WaitingRequest) -> None:
        """Remove a request, if it still waits."""
        requests = self._by_worker.get(request.by, {})
        requests.pop(request.arrival, None)
        if not requests:
            self._by_worker.pop(request.by, None)

    def move(self, by: str, version: int | None) -> None:
        """Note that a worker serves this version from now on. Its requests keep their places."""
        for request in self._by_worker.get(by, {}).values():
            if request.version != version:
                request.version = version
                self._push(request)

    @property
    def versions(self) -> set[int]:
        """The versions with a request that waits."""
        for version in list(self._by_version):
            self._skip(version)
        return set(self._by_version)

    def first(self, versions: Iterable[int]) -> WaitingRequest:
        """Return the request of these versions that came first; each must have one, as `versions` says."""
        return min(self._by_version[version][0] for version in versions)[1]

    def _push(self, request: WaitingRequest) -> None:
        if request.version is not None:
            heappush(self._by_version.setdefault(request.version, []), (request.arrival, request))

    def _skip(self, version: int) -> None:
        heap = self._by_version[version]
        while heap and not self._waits(heap[0][1], version):
            heappop(heap)
        if not heap:
            del self._by_version[version]

    def _waits(self, request: WaitingRequest, version: int) -> bool:
        return request.version == version and request.arrival in self._by_worker.get(request.by, {})


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


LeftOut = Callable[[int, str], None]
"""Called with the number of prompts left out so far, and a sentence about the latest."""


def prompt_limit(config: Config) -> int:
    """Return the most tokens of a prompt: `engine.max_prompt_tokens`, or less if the model's context is short."""
    limit = config.engine.max_prompt_tokens
    try:
        context = ModelShape.read(config.model.directory()).context
    except ModelUnreadable:  # a model that the device plan does not know
        return limit
    return max(1, min(limit, context - config.sampling.max_tokens))


class FittingPrompts:
    """The prompts of a run's task in their order; None at the places of those that are too long.

    `left_out` is called for the 1st, 10th, 100th … such prompt. Raises `PromptTooLong` if no prompt fits.
    """

    def __init__(self, config: Config, task: Task, tokenizer: Tokenizer, stream: tuple[str, ...], left_out: LeftOut):
        self._order, self._limit = prompt_at(task, tokenizer, derive(config.seed, *stream)), prompt_limit(config)
        self._left_out, self._ids = left_out, set[str]()
        if config.run.mode == "offline":
            return  # nothing asks for prompts
        places = range(len(task.examples))  # each example is at one of them
        if all(self._too_long(self._order(place)) for place in places):
            raise PromptTooLong(
                f"all {len(places)} prompts of task {task.name!r} have more than {self._limit} tokens; raise "
                "engine.max_prompt_tokens, or give the task shorter prompts"
            )

    def _too_long(self, prompt: Prompt) -> bool:
        return len(prompt.token_ids) > self._limit

    def __call__(self, position: int) -> Prompt | None:
        prompt = self._order(position)
        if not self._too_long(prompt):
            return prompt
        before = len(self._ids)
        self._ids.add(prompt.id)
        if (count := len(self._ids)) > before and str(count).strip("0") == "1":
            self._left_out(
                count,
                f"prompt {prompt.id} has {len(prompt.token_ids)} tokens and the limit is {self._limit}: it is left "
                "out, as every longer one; raise engine.max_prompt_tokens to train on it",
            )
        return None
