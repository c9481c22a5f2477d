"""Prompt leases: every prompt becomes exactly one group, even if workers die.

    leases.take(8, now, "worker 3", version)   # 8 prompts, each with a deadline
    leases.renew(["g-42"], now, "worker 3")    # still being answered: a later deadline
    leases.finish(["g-41"])                    # its group is in the experience log
    leases.give_back(["g-42"])                 # not answered: the next worker takes it

A worker renews its leases as long as its engine answers, however slow a completion is. So a deadline passes only if
the worker is silent. The prompt is then leased again before any new prompt. It keeps its group id and seed, so a worker
that appends its group after all does no harm: in the experience log, the first group of an id counts.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import Final, Protocol, cast

from offbeat.scoring.tally import OutcomeCount
from offbeat.seeds import derive
from offbeat.types import Group, Json, Prompt

LOOKED_UP: Final = 1024
"""Group ids that are looked up at once. If none of them is in the log, no later one is."""


@dataclass(frozen=True)
class EvaluationSampling:
    """What differs from training when an evaluation prompt is answered."""

    size: int
    """Completions of the prompt."""
    temperature: float
    greedy: bool = False


@dataclass(frozen=True)
class PromptLease:
    """A prompt that one worker may answer until the deadline."""

    group_id: str
    prompt: Prompt
    seed: int
    """The random stream for the group. It depends on the prompt's position in the order, not on the worker."""
    deadline: float = 0.0
    by: str = ""
    """The name of the worker."""
    version: int | None = None
    """The version that the worker served when it took the lease. No token of the group comes from an earlier one."""
    evaluation: EvaluationSampling | None = None
    """None for training. The answers to an evaluation prompt go to `Prompts.evaluated` and to no log."""


class Prompts(Protocol):
    """Where a worker gets its prompts: from its own process, or from another one through an actor."""

    async def serving(self, by: str, version: int | None) -> None:
        """Note the version that a worker serves from now on; None while it has passed no probe."""

    async def take(self, count: int, by: str) -> list[PromptLease]:
        """Lease up to `count` prompts, perhaps none. The call may wait."""

    async def renew(self, group_ids: Sequence[str], by: str) -> list[str]:
        """Keep these leases, because the worker's engine answers; return those that the worker no longer holds."""

    async def finish(self, group_ids: Sequence[str], outcomes: Sequence[OutcomeCount] = ()) -> None:
        """Note that these groups are in the experience log, and what became of their completions in scoring."""

    async def evaluated(self, groups: Sequence[Group]) -> None:
        """Hand over the scored answers to evaluation prompts."""

    async def give_back(self, group_ids: Sequence[str]) -> None:
        """Return leases that the worker will not answer."""


class PromptLeases:
    """Which worker holds which prompt. The caller gives the time.

    >>> leases = PromptLeases(lambda i: Prompt(f"p{i}", [i], "arithmetic"), name="run1", seed=0, seconds=60)
    >>> [lease.group_id for lease in leases.take(2, now=0.0, by="worker 0", version=0)]
    ['run1-0', 'run1-1']
    >>> leases.finish(["run1-1"])
    1
    >>> [lease.group_id for lease in leases.take(2, now=61.0, by="worker 1", version=0)]   # worker 0 is too late
    ['run1-0', 'run1-2']
    """

    def __init__(self, prompt_at: Callable[[int], Prompt | None], *, name: str, seed: int, seconds: float) -> None:
        """Start at the beginning of the prompt order.

        Args:
            prompt_at: Returns the prompt at a position of the order, which has no end; None skips the position.
            name: The prefix of every group id.
            seed: The seed of the run; every position has its own stream under it.
            seconds: How long a lease lasts.
        """
        self._prompt_at, self._name, self._seed, self._seconds = prompt_at, name, seed, seconds
        self._next = 0
        self._logged: set[int] = set()
        self._returned: set[int] = set()
        self._return_order: list[int] = []  # a heap; positions that are no longer in `_returned` are skipped
        self._out: dict[int, PromptLease] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap; entries of ended or renewed leases are skipped
        self.versions_out: Counter[int] = Counter()
        """How many prompts are leased to workers of each version."""

    def take(self, count: int, now: float, by: str, version: int | None) -> list[PromptLease]:
        """Lease the next prompts. Prompts that came back go first."""
        self.expire(now)
        return [self._lease(now + self._seconds, by, version) for _ in range(count)]

    def _lease(self, deadline: float, by: str, version: int | None) -> PromptLease:
        while (lease := self._lease_at(position := self._next_position())) is None:
            pass
        self._out[position] = replace(lease, deadline=deadline, by=by, version=version)
        heappush(self._deadlines, (deadline, position))
        self._count_version(self._out[position], 1)
        return self._out[position]

    def _next_position(self) -> int:
        while self._return_order:
            position = heappop(self._return_order)
            if position in self._returned:
                self._returned.remove(position)
                return position
        while self._next in self._logged:
            self._logged.remove(self._next)
            self._next += 1
        self._next += 1
        return self._next - 1

    def _lease_at(self, position: int) -> PromptLease | None:
        if (prompt := self._prompt_at(position)) is None:
            return None
        return PromptLease(f"{self._name}-{position}", prompt, derive(self._seed, "rollout", position))

    def renew(self, group_ids: Iterable[str], now: float, by: str) -> list[str]:
        """Give the leases of a worker a new deadline; return the ids among them that it no longer holds."""
        self.expire(now)
        lost = []
        for name in group_ids:
            [position] = self._positions([name]) or [-1]
            lease = self._out.get(position)
            if lease is None or lease.by != by:
                lost.append(name)
            else:
                self._out[position] = replace(lease, deadline=now + self._seconds)
                heappush(self._deadlines, (now + self._seconds, position))
        return lost

    def finish(self, group_ids: Iterable[str]) -> int:
        """Note that these groups are in the log, from any worker; return how many of them were still unanswered."""
        done = self._positions(group_ids)
        unanswered = [position for position in done if position in self._out or position in self._returned]
        for position in unanswered:
            self._end(position)
            self._returned.discard(position)
        return len(unanswered)

    def give_back(self, group_ids: Iterable[str]) -> None:
        """Let prompts be leased again, before any new one. Ids that are not leased are ignored."""
        for position in self._positions(group_ids):
            if self._end(position):
                self._returned.add(position)
                heappush(self._return_order, position)

    def _end(self, position: int) -> bool:
        """End the lease of a prompt; return False if it is not leased."""
        lease = self._out.pop(position, None)
        if lease is not None:
            self._count_version(lease, -1)
        return lease is not None

    def _count_version(self, lease: PromptLease, change: int) -> None:
        if lease.version is None:
            return
        self.versions_out[lease.version] += change
        if not self.versions_out[lease.version]:
            del self.versions_out[lease.version]

    def expire(self, now: float) -> list[PromptLease]:
        """Take back the leases whose deadline has passed, and return them."""
        late = []
        while (deadline := self.next_deadline) is not None and deadline < now:
            lease = self._out[heappop(self._deadlines)[1]]
            late.append(lease)
            self.give_back([lease.group_id])
        return late

    @property
    def next_deadline(self) -> float | None:
        """The earliest deadline of a lease; None if nothing is leased."""
        while self._deadlines:
            deadline, position = self._deadlines[0]
            lease = self._out.get(position)
            if lease is not None and lease.deadline == deadline:
                return deadline
            heappop(self._deadlines)
        return None

    def _positions(self, group_ids: Iterable[str]) -> set[int]:
        prefix = f"{self._name}-"
        return {int(name.removeprefix(prefix)) for name in group_ids if name.startswith(prefix)}

    def state(self) -> dict[str, Json]:
        """Return the state for a checkpoint. Prompts that are leased now count as unanswered."""
        return {"next": self._next, "unanswered": [*sorted(self._returned.union(self._out))]}

    def restore(self, state: dict[str, Json]) -> None:
        """Go back to `state`; no prompt is leased."""
        self._next, self._out, self._deadlines, self.versions_out = cast(int, state["next"]), {}, [], Counter()
        self._return_order = sorted(cast(list[int], state["unanswered"]))
        self._returned = set(self._return_order)

    def skip_logged(self, logged: Callable[[Sequence[str]], Iterable[bool]]) -> int:
        """Lease no prompt whose group is in the log already: a run that dies leaves groups after its last checkpoint.

        `logged` says of each group id whether the log has it. Return how many prompts are skipped.
        """
        late = self._found(sorted(self._returned), logged)
        self._returned.difference_update(late)
        start = self._next
        while found := self._found(range(start, start + LOOKED_UP), logged):
            self._logged.update(found)
            start += LOOKED_UP
        return len(late) + len(self._logged)

    def _found(self, positions: Sequence[int], logged: Callable[[Sequence[str]], Iterable[bool]]) -> list[int]:
        here = logged([f"{self._name}-{position}" for position in positions])
        return [position for position, one in zip(positions, here, strict=True) if one]

    @property
    def out(self) -> list[PromptLease]:
        """The current leases."""
        return list(self._out.values())

    @property
    def count_out(self) -> int:
        """How many prompts are leased now."""
        return len(self._out)


class LocalPrompts:
    """`Prompts` for workers in the same process as the leases, without admission."""

    def __init__(self, leases: PromptLeases, clock: Callable[[], float] = time.monotonic) -> None:
        self._leases, self._clock = leases, clock
        self._versions: dict[str, int | None] = {}

    async def serving(self, by: str, version: int | None) -> None:
        self._versions[by] = version

    async def take(self, count: int, by: str) -> list[PromptLease]:
        return self._leases.take(count, self._clock(), by, self._versions.get(by))

    async def renew(self, group_ids: Sequence[str], by: str) -> list[str]:
        return self._leases.renew(group_ids, self._clock(), by)

    async def finish(self, group_ids: Sequence[str], outcomes: Sequence[OutcomeCount] = ()) -> None:
        self._leases.finish(group_ids)

    async def evaluated(self, groups: Sequence[Group]) -> None:
        raise AssertionError(f"{groups[0].id} is no evaluation prompt: a run alone leases those")

    async def give_back(self, group_ids: Sequence[str]) -> None:
        self._leases.give_back(group_ids)


class PerVersion:
    """`Prompts` with at most `limit` leases per version: a worker on its own keeps pace with the weight log.

    If the trainer makes no progress, it publishes nothing, and the worker stops before its groups become too stale.
    """

    def __init__(self, prompts: Prompts, limit: int) -> None:
        self._prompts, self._limit = prompts, limit
        self._taken = 0

    async def serving(self, by: str, version: int | None) -> None:
        self._taken = 0
        await self._prompts.serving(by, version)

    async def take(self, count: int, by: str) -> list[PromptLease]:
        leases = await self._prompts.take(min(count, self._limit - self._taken), by)
        self._taken += len(leases)
        return leases

    async def renew(self, group_ids: Sequence[str], by: str) -> list[str]:
        return await self._prompts.renew(group_ids, by)

    async def finish(self, group_ids: Sequence[str], outcomes: Sequence[OutcomeCount] = ()) -> None:
        await self._prompts.finish(group_ids, outcomes)

    async def evaluated(self, groups: Sequence[Group]) -> None:
        await self._prompts.evaluated(groups)

    async def give_back(self, group_ids: Sequence[str]) -> None:
        self._taken -= len(group_ids)
        await self._prompts.give_back(group_ids)
