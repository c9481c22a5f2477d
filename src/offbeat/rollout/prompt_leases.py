"""Prompts on loan: every one ends up as one group, whoever dies on the way.

    leases = desk.take(8, now, "worker 3", version)  # 8 prompts, to be answered before their deadline
    desk.finish(["g-41"])                            # its group is in the experience log
    desk.give_back(["g-42"])                         # stopped: somebody else takes it next

A prompt whose deadline passes goes back to the head of the line. It keeps its group id and its seed, so a worker that
was only slow and appends after all does no harm: in the experience log the first group of an id counts.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from offbeat.seeds import derive
from offbeat.types import Json, Prompt


@dataclass(frozen=True)
class PromptLease:
    """One prompt in one worker's hands."""

    group_id: str
    prompt: Prompt
    seed: int
    """The stream the group is sampled from: of its place in the order, not of who generates it."""
    deadline: float = 0.0
    by: str = ""
    version: int | None = None
    """What the worker served when it took it: no token of the group is of an earlier version."""


class Prompts(Protocol):
    """Where a worker gets prompts: a desk in its own process, or one behind an actor."""

    async def serving(self, by: str, version: int | None) -> None:
        """What a worker serves from now on; None while it is not proven."""

    async def take(self, count: int, by: str) -> list[PromptLease]:
        """Up to `count`; may wait, and may still have none."""

    async def finish(self, group_ids: Sequence[str]) -> None:
        """These are in the log."""

    async def give_back(self, group_ids: Sequence[str]) -> None:
        """These will not be answered by who has them."""


class PromptLeases:
    """Who has which prompt. Knows no clock: whoever calls says what time it is.

    >>> desk = PromptLeases(lambda place: Prompt(f"p{place}", [place], "arithmetic"), name="run1", seed=0, seconds=60)
    >>> [lease.group_id for lease in desk.take(2, now=0.0, by="worker 0", version=0)]
    ['run1-0', 'run1-1']
    >>> desk.finish(["run1-1"])
    1
    >>> [lease.group_id for lease in desk.take(2, now=61.0, by="worker 1", version=0)]   # worker 0 was not heard of
    ['run1-0', 'run1-2']
    """

    def __init__(self, prompt_at: Callable[[int], Prompt], *, name: str, seed: int, seconds: float) -> None:
        """A desk at the beginning of the prompts' order.

        Args:
            prompt_at: The prompt at a place of the order, which has no end.
            name: Begins every group id.
            seed: Of the run; every place has its own stream under it.
            seconds: How long a prompt may be on loan.
        """
        self._prompt_at, self._name, self._seed, self._seconds = prompt_at, name, seed, seconds
        self._next = 0
        self._returned: deque[int] = deque()
        self._out: dict[int, PromptLease] = {}

    def take(self, count: int, now: float, by: str, version: int | None) -> list[PromptLease]:
        """The next prompts, those that came back first."""
        self.expire(now)
        return [self._lend(now + self._seconds, by, version) for _ in range(count)]

    def _lend(self, deadline: float, by: str, version: int | None) -> PromptLease:
        if self._returned:
            place = self._returned.popleft()
        else:
            place, self._next = self._next, self._next + 1
        seed = derive(self._seed, "rollout", place)
        self._out[place] = PromptLease(f"{self._name}-{place}", self._prompt_at(place), seed, deadline, by, version)
        return self._out[place]

    def finish(self, group_ids: Iterable[str]) -> int:
        """Their groups are in the log, from whomever; returns how many of them were still to be answered."""
        done = self._places(group_ids)
        open_ = done & (self._out.keys() | set(self._returned))
        for place in done:
            self._out.pop(place, None)
        self._returned = deque(place for place in self._returned if place not in done)
        return len(open_)

    def give_back(self, group_ids: Iterable[str]) -> None:
        """Put at the head of the line, in their order; ids that are not out are passed over."""
        back = sorted(self._places(group_ids) & self._out.keys())
        for place in back:
            del self._out[place]
        self._returned.extendleft(reversed(back))

    def expire(self, now: float) -> list[PromptLease]:
        """Take back what is overdue; returned so that somebody can say who was late."""
        late = [lease for lease in self._out.values() if lease.deadline < now]
        self.give_back(lease.group_id for lease in late)
        return late

    def _places(self, group_ids: Iterable[str]) -> set[int]:
        prefix = f"{self._name}-"
        return {int(name.removeprefix(prefix)) for name in group_ids if name.startswith(prefix)}

    def state(self) -> dict[str, Json]:
        """For a checkpoint: what is on loan now will have to be asked again."""
        return {"next": self._next, "unanswered": [*sorted({*self._out, *self._returned})]}

    def restore(self, state: dict[str, Json]) -> None:
        """Go back to `state`, with nothing on loan."""
        self._next, self._out = cast(int, state["next"]), {}
        self._returned = deque(cast(list[int], state["unanswered"]))

    @property
    def out(self) -> list[PromptLease]:
        """What is on loan."""
        return list(self._out.values())


class LocalPrompts:
    """A desk for workers of the same process."""

    def __init__(self, desk: PromptLeases, clock: Callable[[], float] = time.monotonic) -> None:
        self.desk, self._clock = desk, clock
        self._serving: dict[str, int | None] = {}

    async def serving(self, by: str, version: int | None) -> None:
        """See `Prompts`."""
        self._serving[by] = version

    async def take(self, count: int, by: str) -> list[PromptLease]:
        """See `Prompts`."""
        return self.desk.take(count, self._clock(), by, self._serving.get(by))

    async def finish(self, group_ids: Sequence[str]) -> None:
        """See `Prompts`."""
        self.desk.finish(group_ids)

    async def give_back(self, group_ids: Sequence[str]) -> None:
        """See `Prompts`."""
        self.desk.give_back(group_ids)


class PerVersion:
    """At most so many prompts under one version: how a worker alone paces itself by the weight log.

    A trainer that stands still publishes nothing, and its workers stop before they write what would be too stale.
    """

    def __init__(self, prompts: Prompts, limit: int) -> None:
        self._prompts, self._limit = prompts, limit
        self._taken = 0

    async def serving(self, by: str, version: int | None) -> None:
        """See `Prompts`."""
        self._taken = 0
        await self._prompts.serving(by, version)

    async def take(self, count: int, by: str) -> list[PromptLease]:
        """See `Prompts`."""
        leases = await self._prompts.take(min(count, self._limit - self._taken), by)
        self._taken += len(leases)
        return leases

    async def finish(self, group_ids: Sequence[str]) -> None:
        """See `Prompts`."""
        await self._prompts.finish(group_ids)

    async def give_back(self, group_ids: Sequence[str]) -> None:
        """See `Prompts`."""
        self._taken -= len(group_ids)
        await self._prompts.give_back(group_ids)
