"""How often each group was drawn, and when last: all that a sampler has to remember of the past.

Kept as two columns, written as runs of equal neighbours. Groups drawn for the first time are neighbours in the log,
and those that can never be drawn again look alike, so the runs stay few.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

CLOSED: Final = -1
"""In `uses`: this group will not be drawn again, whether dropped or used up."""
NEVER: Final = -1
"""In `last`: not drawn yet."""


class History:
    """Uses and last draw, by ordinal.

    >>> history = History()
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
    def from_runs(length: int, runs: list[list[int]]) -> "History":
        """The history that wrote these runs, over `length` groups."""
        history = History()
        history.grow(length)
        for first, count, uses, last in runs:
            history._uses[first : first + count] = uses
            history._last[first : first + count] = last
        history.close(np.zeros(0, np.int64))
        return history
