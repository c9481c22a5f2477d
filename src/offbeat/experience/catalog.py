"""What a process remembers of the log so as not to read it twice: which id stands where, and which rows repeat.

Ids are kept as 64-bit hashes in sorted arrays, 16 bytes a group; whoever looks one up compares the id itself with the
stored row, so a collision of hashes costs a read and never an error.

A group's **ordinal** is its place in the log, counted from 0 in commit order, rows that repeat an id left out. Rows are
only added, and of one id the first row counts, so an ordinal never changes.
"""

import threading
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offbeat.experience.schema import Snapshot, Tables

Ints = NDArray[np.int64]


class Runs:
    """Pairs of a 64-bit key and a row, in a few sorted runs: adding is cheap, finding is a binary search in each.

    >>> runs = Runs()
    >>> runs.add(np.array([7, 5]), np.array([0, 1]))
    >>> runs.add(np.array([7]), np.array([2]))
    >>> [part.tolist() for part in runs.find(np.array([5, 7, 9]))]
    [[0, 1, 1], [1, 0, 2]]
    """

    def __init__(self) -> None:
        self._runs: list[tuple[Ints, Ints]] = []

    def add(self, keys: Ints, rows: Ints) -> None:
        """Add pairs; rows of one key come in ascending order."""
        order = np.argsort(keys, kind="stable")
        run = (keys[order], rows[order])
        # Each run is more than twice as long as the next, so there are few and each pair is moved rarely.
        runs = list(self._runs)
        while runs and len(runs[-1][0]) <= 2 * len(run[0]):
            earlier = runs.pop()
            keys, rows = np.concatenate([earlier[0], run[0]]), np.concatenate([earlier[1], run[1]])
            order = np.argsort(keys, kind="stable")
            run = (keys[order], rows[order])
        self._runs = [*runs, run]  # in one step: others may be searching

    def keys(self, start: int, stop: int) -> Ints:
        """Distinct keys of rows [start, stop)."""
        found = [keys[(rows >= start) & (rows < stop)] for keys, rows in self._runs]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def find(self, keys: Ints) -> tuple[Ints, Ints]:
        """Every match, as positions in `keys` and rows, ordered by position and then by row."""
        positions, rows = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for run_keys, run_rows in self._runs:
            first, last = np.searchsorted(run_keys, keys, "left"), np.searchsorted(run_keys, keys, "right")
            counts = last - first
            at = np.repeat(np.arange(len(keys)), counts)
            within = np.arange(len(at)) - np.repeat(np.cumsum(counts) - counts, counts)
            positions.append(at)
            rows.append(run_rows[first[at] + within])
        where, found = np.concatenate(positions), np.concatenate(rows)
        order = np.lexsort((found, where))
        return where[order], found[order]


class Catalog:
    """Keeps up with the log by reading, once each, the rows that are new."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._seen = Snapshot()
        self._ids, self._late = Runs(), Runs()
        self._repeated = np.empty(0, np.int64)
        self.conflicting: list[int] = []
        """Rows that repeat an id with other content."""
        self._given_up: dict[int, int] = {}
        self.tasks: dict[str, int] = {}
        self.sources: dict[str, int] = {}
        self._reading = threading.Lock()

    def catch_up(self, now: Snapshot) -> None:
        """Read what was added until `now`."""
        with self._reading:
            seen = self._seen
            if now.groups > seen.groups:
                self._read_groups(seen.groups, now.groups)
            if now.scores > seen.scores:
                fresh = self._tables.scores.scan(seen.scores, now.scores, ["group_id"])
                at = self.rows_of(fresh["group_id"].to_pylist())
                self._late.add(at, np.arange(seen.scores, now.scores))
            if now.events > seen.events:
                dropped = self._tables.events.scan(
                    seen.events, now.events, ["group_id"], "event = 'expired' AND cause = 'feedback'"
                )
                at = self.rows_of(dropped["group_id"].to_pylist())
                for row, event in zip(at.tolist(), dropped["_rowid"].to_pylist(), strict=True):
                    self._given_up.setdefault(row, event)
            self._seen = Snapshot(*(max(a, b) for a, b in zip(_counts(seen), _counts(now), strict=True)))

    def _read_groups(self, start: int, stop: int) -> None:
        fresh = self._tables.groups.scan(start, stop, ["group_id", "task", "sources"])
        ids: list[str] = fresh["group_id"].to_pylist()
        hashes, rows = _hashes(ids), np.arange(start, stop)
        self._ids.add(hashes, rows)
        self._note_repetitions(ids, rows, *self._ids.find(hashes))
        _number(self.tasks, fresh["task"])
        _number(self.sources, fresh["sources"].combine_chunks().flatten())

    def _note_repetitions(self, ids: Sequence[str], rows: Ints, at: Ints, found: Ints) -> None:
        """Which of these rows have a row of the same id before them."""
        before = found < rows[at]
        suspects, earlier = at[before], found[before]
        if not len(suspects):
            return
        stored = self._tables.groups.take(earlier, ["group_id", "digest"])
        own = self._tables.groups.take(rows[suspects], ["digest"])["digest"].to_pylist()
        repeated: dict[int, bool] = {}
        for position, id_, theirs, ours in zip(
            suspects.tolist(), stored["group_id"].to_pylist(), stored["digest"].to_pylist(), own, strict=True
        ):
            if id_ == ids[position]:
                repeated.setdefault(int(rows[position]), theirs == ours)
        self._repeated = np.concatenate([self._repeated, np.array(sorted(repeated), np.int64)])
        self.conflicting += [row for row in sorted(repeated) if not repeated[row]]

    def rows_of(self, ids: Sequence[str]) -> Ints:
        """The row of each id, −1 where it is not in the log."""
        rows = np.full(len(ids), -1, np.int64)
        at, found = self._ids.find(_hashes(ids))
        if not len(at):
            return rows
        stored = self._tables.groups.take(found, ["group_id"])["group_id"].to_pylist()
        for position, row, id_ in zip(at.tolist(), found.tolist(), stored, strict=True):
            if id_ == ids[position] and rows[position] < 0:
                rows[position] = row
        return rows

    def ordinals(self, rows: Ints) -> Ints:
        """Where these rows stand when repetitions are left out."""
        return rows - np.searchsorted(self._repeated, rows)

    def rows_at(self, ordinals: Ints) -> Ints:
        """The inverse of `ordinals`."""
        shifted = self._repeated - np.arange(len(self._repeated))
        return ordinals + np.searchsorted(shifted, ordinals, side="right")

    def first(self, rows: Ints) -> Ints:
        """Of these rows, the ones that do not repeat an id."""
        return rows[~np.isin(rows, self._repeated)]

    def repetitions(self, now: Snapshot) -> int:
        """How many rows repeat an id."""
        return int(np.searchsorted(self._repeated, now.groups))

    def scored_between(self, start: int, stop: int) -> Ints:
        """Rows of groups that got late scores in rows [start, stop) of the scores."""
        found = self._late.keys(start, stop)
        return found[found >= 0]

    def late_scores(self, rows: Ints, now: Snapshot) -> tuple[Ints, Ints]:
        """Late scores of these groups: positions in `rows`, and rows of the scores in commit order."""
        at, found = self._late.find(rows)
        in_time = found < now.scores
        return at[in_time], found[in_time]

    def given_up(self, rows: Ints, now: Snapshot) -> NDArray[np.bool_]:
        """Whether a deadline dropped these groups."""
        return np.array([self._given_up.get(row, now.events) < now.events for row in rows.tolist()], np.bool_)


def _counts(snapshot: Snapshot) -> tuple[int, int, int, int]:
    return snapshot.groups, snapshot.scores, snapshot.events, snapshot.quarantine


def _hashes(ids: Sequence[str]) -> Ints:
    return np.fromiter(map(hash, ids), np.int64, len(ids))


def _number(codes: dict[str, int], names: pa.ChunkedArray) -> None:
    """Give each name that is new the next number, in order of appearance."""
    for name in names.unique().to_pylist():
        codes.setdefault(name, len(codes))
