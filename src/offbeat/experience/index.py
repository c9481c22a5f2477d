"""The index of a log: a few numbers for each group in numpy columns, for the sampler and for totals.

Groups are identified by their **ordinal** (`catalog.py`), which never changes, so a sampler's state can refer to it.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

CLOSED: Final = -1
"""In `uses`: the group will not be drawn again, because it was dropped or its budget is used up."""
NEVER: Final = -1
"""In `last`: not drawn yet."""
VERSION_RANGES: Final = 10
"""Ranges that versions are collected into if there are more of them."""


NO_VERSION: Final = -1
"""In `oldest_version`: no token of the group has a policy version, as in imported answers."""

_DTYPES: Final[dict[str, type[np.generic]]] = {
    "ordinal": np.int64,
    "oldest_version": np.int32,
    "task": np.uint16,
    "sources": np.uint32,
    "ripe": np.bool_,
    "completions": np.uint16,
    "scored": np.uint16,
    "reward_mean": np.float32,
    "reward_std": np.float32,
    "tokens": np.int32,
    "prompt": np.uint64,
    "guest": np.bool_,
}


@dataclass(frozen=True, eq=False)
class Columns:
    """One row for each group that is new or whose feedback has changed. Sequences become arrays of the types below.

    New groups have the next ordinals without a gap. A row with a known ordinal replaces that group's values, because
    its feedback has arrived or was corrected.

    >>> rows = Columns(ordinal=[0, 1], oldest_version=[3, NO_VERSION], task=[0, 0], sources=[1, 2],
    ...                ripe=[True, False], completions=[8, 8], scored=[8, 0], reward_mean=[0.25, 0.0],
    ...                reward_std=[0.433, 0.0], tokens=[2048, 1900])
    >>> len(rows), rows.oldest_version
    (2, array([ 3, -1], dtype=int32))
    """

    ordinal: NDArray[np.int64]
    """Position in the log, in commit order."""
    oldest_version: NDArray[np.int32]
    """The version that lag counts from, or `NO_VERSION`."""
    task: NDArray[np.uint16]
    """Number of the task. Tasks are numbered in the order in which they first appear in the log."""
    sources: NDArray[np.uint32]
    """Bit i is set if a completion came from source i, numbered like tasks. All sources from 31 on share bit 31."""
    ripe: NDArray[np.bool_]
    """True if every completion has feedback and no deadline dropped the group."""
    completions: NDArray[np.uint16]
    """The number of completions, G."""
    scored: NDArray[np.uint16]
    """The number of completions with a reward. An unscorable completion has none."""
    reward_mean: NDArray[np.float32]
    """Over the scored completions; 0 if there are none."""
    reward_std: NDArray[np.float32]
    """Population standard deviation over the scored completions: the root mean square of centered advantages."""
    tokens: NDArray[np.int32]
    """Prompt tokens plus all completion tokens."""
    prompt: NDArray[np.uint64] = None  # type: ignore[assignment]  # None becomes 0: not known
    """`prompt_key` of the group's prompt: equal for groups of the same prompt."""
    guest: NDArray[np.bool_] = None  # type: ignore[assignment]  # None becomes False
    """True for groups of the run's policy that the run did not admit: they are drawn after those that it did."""

    def __post_init__(self) -> None:
        for name in ("prompt", "guest"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, np.zeros(len(self.ordinal), _DTYPES[name]))
        for name, dtype in _DTYPES.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=dtype))
        lengths = {name: getattr(self, name).shape for name in _DTYPES}
        if len(set(lengths.values())) != 1 or self.ordinal.ndim != 1:
            raise ValueError(f"columns must be one-dimensional and equally long; found shapes {lengths}")

    def __len__(self) -> int:
        return len(self.ordinal)

    def take(self, rows: Sequence[int]) -> "Columns":
        """Return these rows, in this order."""
        return Columns(**{name: getattr(self, name)[np.asarray(rows, np.int64)] for name in _DTYPES})


assert list(_DTYPES) == [column.name for column in fields(Columns)]


class Index:
    """The columns of all groups so far.

    >>> index = Index()
    >>> index.feed(Columns([0, 1], [3, 3], [0, 0], [1, 1], [True, False], [8, 8], [8, 0], [0.5, 0], [0.5, 0], [90, 80]))
    >>> index.feed(Columns([1], [3], [0], [1], [True], [8], [7], [0.1], [0.2], [80]))
    >>> len(index), index.columns.scored
    (2, array([8, 7], dtype=uint16))
    """

    def __init__(self) -> None:
        self._length = 0
        self._room = {name: np.zeros(0, dtype) for name, dtype in _DTYPES.items()}
        self.columns = Columns(**self._room)

    def __len__(self) -> int:
        return self._length

    @property
    def nbytes(self) -> int:
        """Bytes held, including spare capacity."""
        return sum(array.nbytes for array in self._room.values())

    def feed(self, rows: Columns) -> None:
        """Add new groups, and replace the values of known groups."""
        fresh = rows.ordinal >= self._length
        arrivals = rows.ordinal[fresh]
        if not np.array_equal(arrivals, np.arange(self._length, self._length + len(arrivals))):
            raise ValueError(
                f"new groups must have the ordinals from {self._length} on without a gap; found "
                f"{arrivals[:5].tolist()} …; feed the rows of index_since(cursor), in order"
            )
        if len(rows) and rows.ordinal.min() < 0:
            raise ValueError(f"an ordinal counts from 0; found {rows.ordinal.min()}")
        end = self._length + len(arrivals)
        where = slice(self._length, end) if len(arrivals) == len(rows) else rows.ordinal
        self._length = end
        for name in _DTYPES:
            self._room[name] = extended(self._room[name], self._length)
            self._room[name][where] = getattr(rows, name)
        self.columns = Columns(**{name: array[: self._length] for name, array in self._room.items()})


class DrawCounts:
    """The number of draws and the last draw of each group, by ordinal.

    >>> counts = DrawCounts()
    >>> counts.grow(6)
    >>> counts.mark(np.array([0, 1, 4]), k=7, budget=2)
    >>> counts.mark(np.array([1]), k=9, budget=2)
    >>> counts.uses.tolist(), counts.runs(since=0)
    ([1, -1, 0, 0, 1, 0], [[0, 1, 1, 7], [1, 1, -1, -1], [4, 1, 1, 7]])
    """

    def __init__(self) -> None:
        self._uses = np.zeros(0, np.int32)
        self._last = np.zeros(0, np.int32)
        self._length = 0

    @property
    def uses(self) -> NDArray[np.int32]:
        """How often each group was drawn, or `CLOSED`."""
        return self._uses[: self._length]

    @property
    def last(self) -> NDArray[np.int32]:
        """The step k of the last draw of each group, or `NEVER`."""
        return self._last[: self._length]

    @property
    def nbytes(self) -> int:
        """Bytes held, including spare capacity."""
        return self._uses.nbytes + self._last.nbytes

    def grow(self, length: int) -> None:
        """Extend to `length` groups; the new ones are not drawn yet."""
        self._uses, self._last = extended(self._uses, length), extended(self._last, length, NEVER)
        self._length = max(self._length, length)

    def mark(self, ordinals: NDArray[np.int64], k: int, budget: int | None) -> None:
        """Count a draw of these groups at step k, and close those that have used up their budget."""
        self._uses[ordinals] += 1
        self._last[ordinals] = k
        if budget is not None:
            self.close(ordinals[self._uses[ordinals] >= budget])

    def close(self, ordinals: NDArray[np.int64]) -> None:
        """Mark groups that will not be drawn again."""
        self._uses[ordinals] = CLOSED
        self._last[ordinals] = NEVER

    def runs(self, since: int) -> list[list[int]]:
        """Return the run-length encoding of `uses` and `last`: [first ordinal, count, uses, last] for each run.

        Runs of groups that were never drawn are left out, and so is the step of a draw before `since`.
        """
        uses, last = self.uses, np.where(self.last < since, NEVER, self.last)
        if not len(uses):
            return []
        changes = np.flatnonzero((np.diff(uses) != 0) | (np.diff(last) != 0)) + 1
        first = np.concatenate([[0], changes])
        count = np.diff(np.concatenate([first, [len(uses)]]))
        touched = uses[first] != 0
        return np.stack([first, count, uses[first], last[first]], axis=1)[touched].tolist()  # type: ignore[no-any-return]

    @staticmethod
    def from_runs(length: int, runs: list[list[int]]) -> "DrawCounts":
        """Restore the counts of `length` groups from the output of `runs`."""
        counts = DrawCounts()
        counts.grow(length)
        first, count, uses, last = np.array(runs, np.int64).reshape(-1, 4).T
        ends = np.cumsum(count)
        within = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - count, count)
        ordinals = np.repeat(first, count) + within
        counts._uses[ordinals], counts._last[ordinals] = np.repeat(uses, count), np.repeat(last, count)
        return counts


def prompt_key(task: str, prompt_id: str) -> int:
    """Return 64 bits that identify a prompt: the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(f"{task}\0{prompt_id}".encode(), digest_size=8).digest(), "little")


def extended(array: NDArray[Any], length: int, fill: float = 0) -> NDArray[Any]:
    """Return the array with room for `length` entries. Capacity grows by half, so repeated growth is cheap."""
    capacity = len(array)
    if length <= capacity:
        return array
    spare = max(length, capacity + capacity // 2, 1024) - capacity
    return np.concatenate([array, np.full(spare, fill, array.dtype)])


@dataclass(frozen=True)
class GroupTotals:
    """Totals over some groups."""

    groups: int
    completions: int
    scored: int
    reward_mean: float | None

    @classmethod
    def of(cls, rows: Columns, chosen: NDArray[np.bool_]) -> "GroupTotals":
        """Add up the groups where the mask `chosen` is True."""
        scored = rows.scored[chosen].astype(np.int64)
        total = float((rows.reward_mean[chosen].astype(np.float64) * scored).sum())
        count = int(scored.sum())
        completions = int(rows.completions[chosen].sum(dtype=np.int64))
        return cls(int(chosen.sum()), completions, count, total / count if count else None)

    def __str__(self) -> str:
        mean = "none" if self.reward_mean is None else f"{self.reward_mean:.4g}"
        return f"{self.groups} groups, {self.completions} completions, {self.scored} scored, mean reward {mean}"


@dataclass(frozen=True)
class LogStats:
    """The totals of a log. A group with several sources counts for each of them."""

    all: GroupTotals
    tokens: int
    unripe: int
    """Groups whose feedback is incomplete."""
    tasks: Mapping[str, GroupTotals]
    sources: Mapping[str, GroupTotals]
    versions: Mapping[str, GroupTotals]
    """By the oldest version in a group."""
    quarantined: Mapping[str, int]
    """Refused groups and late scores, by reason."""
    late_scores: int
    bytes_on_disk: int | None
    """None for an object store."""


def compute_stats(
    rows: Columns,
    tasks: Sequence[str],
    sources: Sequence[str],
    refusals: Iterable[str],
    *,
    late_scores: int,
    bytes_on_disk: int | None,
) -> LogStats:
    """Compute the totals of a log from its index, the names behind the index's codes, and the reasons of refusals."""
    return LogStats(
        all=GroupTotals.of(rows, np.ones(len(rows), np.bool_)),
        tokens=int(rows.tokens.sum(dtype=np.int64)),
        unripe=int((~rows.ripe).sum()),
        tasks={name: GroupTotals.of(rows, rows.task == code) for code, name in enumerate(tasks)},
        sources=_totals_by_source(rows, sources),
        versions=_totals_by_version(rows),
        quarantined=dict(Counter(refusals).most_common()),
        late_scores=late_scores,
        bytes_on_disk=bytes_on_disk,
    )


def _totals_by_source(rows: Columns, names: Sequence[str]) -> dict[str, GroupTotals]:
    """Return totals for each bit of `rows.sources`. Sources that share the last bit get one entry."""
    bits = names if len(names) <= 32 else [*names[:31], f"({len(names) - 31} others)"]
    return {name: GroupTotals.of(rows, (rows.sources & np.uint32(1 << bit)) != 0) for bit, name in enumerate(bits)}


def _totals_by_version(rows: Columns) -> dict[str, GroupTotals]:
    """Return totals for each oldest version, or for each range of versions if there are many."""
    versions = rows.oldest_version
    known = np.unique(versions[versions != NO_VERSION])
    totals = {}
    for part in np.array_split(known, min(VERSION_RANGES, len(known))) if len(known) else []:
        name = f"{part[0]}" if len(part) == 1 else f"{part[0]} … {part[-1]}"
        totals[name] = GroupTotals.of(rows, (versions >= part[0]) & (versions <= part[-1]))
    if (versions == NO_VERSION).any():
        totals["no version"] = GroupTotals.of(rows, versions == NO_VERSION)
    return totals
