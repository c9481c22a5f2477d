"""Prompts on loan: every one ends up as one group, whoever dies on the way.

    leases = desk.take(8, now, by="worker 3")        # 8 prompts, to be answered before their deadline
    desk.finish(["g-41"])                            # its group is in the experience log
    desk.give_back(["g-42"])                         # stopped: somebody else takes it next

A prompt whose deadline passes goes back to the head of the line. It keeps its group id and its seed, so a worker that
was only slow and appends after all does no harm: in the experience log the first group of an id counts.
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from offbeat.seeds import derive
from offbeat.types import Prompt


@dataclass(frozen=True)
class Lease:
    """One prompt in one worker's hands."""

    group_id: str
    prompt: Prompt
    seed: int
    """The stream the group is sampled from: of its place in the order, not of who generates it."""
    deadline: float = 0.0
    by: str = ""


class Prompts(Protocol):
    """Where a worker gets prompts: a desk in its own process, or one behind an actor."""

    async def take(self, count: int, by: str) -> list[Lease]:
        """Up to `count`; fewer or none where none are to be had now."""

    async def finish(self, group_ids: Sequence[str]) -> None:
        """These are in the log."""

    async def give_back(self, group_ids: Sequence[str]) -> None:
        """These will not be answered by who has them."""


class LeaseDesk:
    """Who has which prompt. Knows no clock: whoever calls says what time it is.

    >>> prompts = (Prompt(f"p{i}", [i], "arithmetic") for i in itertools.count())
    >>> desk = LeaseDesk(prompts, name="run1", seed=0, seconds=60)
    >>> [lease.group_id for lease in desk.take(2, now=0.0, by="worker 0")]
    ['run1-0', 'run1-1']
    >>> desk.finish(["run1-1"])
    >>> [lease.group_id for lease in desk.take(2, now=61.0, by="worker 1")]   # worker 0 was not heard of
    ['run1-0', 'run1-2']
    """

    def __init__(self, prompts: Iterator[Prompt], *, name: str, seed: int, seconds: float, start: int = 0) -> None:
        """A desk.

        Args:
            prompts: In their order, from place `start` on, without end.
            name: Begins every group id.
            seed: Of the run; every place has its own stream under it.
            seconds: How long a prompt may be on loan.
            start: The place of the first prompt.
        """
        self._fresh = ((place, prompt) for place, prompt in zip(itertools.count(start), prompts, strict=False))
        self._name, self._seed, self._seconds = name, seed, seconds
        self._returned: deque[Lease] = deque()
        self._out: dict[str, Lease] = {}

    def take(self, count: int, now: float, by: str) -> list[Lease]:
        """The next prompts, those that came back first."""
        self.expire(now)
        taken = []
        for _ in range(count):
            lease = self._returned.popleft() if self._returned else self._next()
            lease = replace(lease, deadline=now + self._seconds, by=by)
            self._out[lease.group_id] = lease
            taken.append(lease)
        return taken

    def _next(self) -> Lease:
        place, prompt = next(self._fresh)
        return Lease(f"{self._name}-{place}", prompt, derive(self._seed, "rollout", place))

    def finish(self, group_ids: Iterable[str]) -> None:
        """Their groups are in the log, from whomever; a prompt that had come back need not be asked again."""
        done = set(group_ids)
        for group_id in done:
            self._out.pop(group_id, None)
        self._returned = deque(lease for lease in self._returned if lease.group_id not in done)

    def give_back(self, group_ids: Iterable[str]) -> None:
        """Put at the head of the line, in their order; ids that are not out are passed over."""
        back = [self._out.pop(group_id) for group_id in group_ids if group_id in self._out]
        self._returned.extendleft(reversed(back))

    def expire(self, now: float) -> list[Lease]:
        """Take back what is overdue; returned so that somebody can say who was late."""
        late = [lease for lease in self._out.values() if lease.deadline < now]
        self.give_back(lease.group_id for lease in late)
        return late

    @property
    def out(self) -> list[Lease]:
        """What is on loan."""
        return list(self._out.values())


class LocalPrompts:
    """A desk for workers of the same process."""

    def __init__(self, desk: LeaseDesk, clock: Callable[[], float] = time.monotonic) -> None:
        self.desk, self._clock = desk, clock

    async def take(self, count: int, by: str) -> list[Lease]:
        """See `Prompts`."""
        return self.desk.take(count, self._clock(), by)

    async def finish(self, group_ids: Sequence[str]) -> None:
        """See `Prompts`."""
        self.desk.finish(group_ids)

    async def give_back(self, group_ids: Sequence[str]) -> None:
        """See `Prompts`."""
        self.desk.give_back(group_ids)
