"""What a sampler knows of each group: a few numbers in numpy columns, fed by the log as it grows.

A group is called by its **ordinal**: its place in the log after repetitions are left out, counted from 0 in commit
order. An ordinal never changes, so a sampler's state can refer to it.
"""

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

CLOSED: Final = -1
"""In `uses`: this group will not be drawn again, whether dropped or used up."""
NEVER: Final = -1
"""In `last`: not drawn yet."""


class DrawCounts:
    """Uses and last draw, by ordinal.

    >>> history = DrawCounts()
    >>> history.grow(6)
    >>> history.mark(np.array([0, 1, 4]), k=7, budget=2)
    >>> history.mark(np.array([1]), k=9, budget=2)
    >>> history.uses.tolist(), history.runs(since=0)
    ([1, -1, 0, 0, 1, 0], [[0, 1, 1, 7], [1, 1, -1, -1], [4, 1, 1, 7]])
    """

    def __init__(self) -> None:
        self._uses = np.zeros(0, np.int32)
        self._last = np.zeros(0, np.int32)
        self._length = 0
        self.first_open = 0
        """Every group before it is closed: searches start here."""

    @property
    def uses(self) -> NDArray[np.int32]:
        """How often each group was drawn; `CLOSED` where it no longer matters."""
        return self._uses[: self._length]

    @property
    def last(self) -> NDArray[np.int32]:
        """k at the latest draw of each group, or `NEVER`."""
        return self._last[: self._length]

    @property
    def nbytes(self) -> int:
        """Bytes held, idle room included."""
        return self._uses.nbytes + self._last.nbytes

    def grow(self, length: int) -> None:
        """Make room for groups up to ordinal `length` − 1, not drawn yet."""
        room = len(self._uses)
        if length > room:
            more = max(length, room + room // 2, 1024) - room
            self._uses = np.concatenate([self._uses, np.zeros(more, np.int32)])
            self._last = np.concatenate([self._last, np.full(more, NEVER, np.int32)])
        self._length = max(self._length, length)

    def mark(self, ordinals: NDArray[np.int64], k: int, budget: int | None) -> None:
        """These groups are drawn at step k; those that have used up their budget close."""
        self._uses[ordinals] += 1
        self._last[ordinals] = k
        if budget is not None:
            self.close(ordinals[self._uses[ordinals] >= budget])

    def close(self, ordinals: NDArray[np.int64]) -> None:
        """These groups will not be drawn again."""
        self._uses[ordinals] = CLOSED
        self._last[ordinals] = NEVER
        still_open = self.uses[self.first_open :] != CLOSED
        self.first_open += int(still_open.argmax()) if still_open.any() else len(still_open)

    def runs(self, since: int) -> list[list[int]]:
        """[first ordinal, how many, uses, last] of every run of touched groups; draws before `since` are forgotten."""
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
        """The history that wrote these runs, over `length` groups."""
        history = DrawCounts()
        history.grow(length)
        for first, count, uses, last in runs:
            history._uses[first : first + count] = uses
            history._last[first : first + count] = last
        history.close(np.zeros(0, np.int64))
        return history


NO_VERSION: Final = -1
"""In `oldest_version`: no version of ours took part in the group."""

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
}


@dataclass(frozen=True, eq=False)
class Columns:
    """One row for each group that is new or whose feedback has changed; sequences become arrays of the types below.

    New groups carry the next ordinals without a gap. A row with an ordinal seen before replaces what was known of
    that group: its feedback has arrived, or was corrected.

    >>> rows = Columns(ordinal=[0, 1], oldest_version=[3, NO_VERSION], task=[0, 0], sources=[1, 2],
    ...                ripe=[True, False], completions=[8, 8], scored=[8, 0], reward_mean=[0.25, 0.0],
    ...                reward_std=[0.433, 0.0], tokens=[2048, 1900])
    >>> len(rows), rows.oldest_version
    (2, array([ 3, -1], dtype=int32))
    """

    ordinal: NDArray[np.int64]
    """Its place in the log: the order of appending."""
    oldest_version: NDArray[np.int32]
    """The version its lag counts from; `NO_VERSION` where no version of ours took part."""
    task: NDArray[np.uint16]
    """Code of its task: tasks are numbered as they first appear in the log."""
    sources: NDArray[np.uint32]
    """Bit i is set if a completion came from source i; sources are numbered as they first appear, 31 = any later."""
    ripe: NDArray[np.bool_]
    """Whether its feedback is complete, or its deadline policy says that no more will come."""
    completions: NDArray[np.uint16]
    """G."""
    scored: NDArray[np.uint16]
    """How many completions have a reward (an unscorable one has none)."""
    reward_mean: NDArray[np.float32]
    """Over the scored completions; 0 where there are none."""
    reward_std: NDArray[np.float32]
    """Population standard deviation over the scored completions: the root mean square of centred advantages."""
    tokens: NDArray[np.int32]
    """Prompt tokens plus all completion tokens."""

    def __post_init__(self) -> None:
        for name, dtype in _DTYPES.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), dtype=dtype))
        lengths = {name: getattr(self, name).shape for name in _DTYPES}
        if len(set(lengths.values())) != 1 or self.ordinal.ndim != 1:
            raise ValueError(f"columns of one index must be flat and equally long, found {lengths}")

    def __len__(self) -> int:
        return len(self.ordinal)


class Index:
    """The columns of every group so far; room grows by half, so that feeding is cheap and little of it is idle.

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
        """Bytes held, idle room included."""
        return sum(array.nbytes for array in self._room.values())

    def feed(self, rows: Columns) -> None:
        """Take in new groups and replace what is known of groups seen before."""
        fresh = rows.ordinal >= self._length
        arrivals = rows.ordinal[fresh]
        if not np.array_equal(arrivals, np.arange(self._length, self._length + len(arrivals))):
            raise ValueError(
                f"new groups must carry the ordinals from {self._length} on without a gap, found "
                f"{arrivals[:5].tolist()} …; feed what the log lists since the last feeding, in order"
            )
        if len(rows) and rows.ordinal.min() < 0:
            raise ValueError(f"an ordinal counts from 0, found {rows.ordinal.min()}")
        self._length += len(arrivals)
        self._grow()
        for name in _DTYPES:
            self._room[name][rows.ordinal] = getattr(rows, name)
        self.columns = Columns(**{name: array[: self._length] for name, array in self._room.items()})

    def _grow(self) -> None:
        room = len(self._room["ordinal"])
        if self._length > room:
            larger = max(self._length, room + room // 2, 1024)
            for name, array in self._room.items():
                self._room[name] = np.concatenate([array, np.zeros(larger - room, array.dtype)])


assert list(_DTYPES) == [column.name for column in fields(Columns)]
