"""An in-memory index of the log for one process: the row of each group id, and which rows repeat an id.

Ids are kept as 64-bit hashes in sorted arrays, 16 bytes a group. Every lookup compares the id itself with the stored
row, so a hash collision costs one extra read and never gives a wrong answer.

A group's **ordinal** is its position in the log, counted from 0 in commit order and without the rows that repeat an id.
Rows are only added, and the first row of an id counts, so an ordinal never changes.
"""

import threading
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offbeat.experience.schema import Snapshot, Tables

Ints = NDArray[np.int64]


class SortedMultimap:
    """Rows by 64-bit key, in a few sorted runs: adding is cheap, and a lookup is one binary search in each run.

    >>> rows_by_key = SortedMultimap()
    >>> rows_by_key.add(np.array([7, 5]), np.array([0, 1]))
    >>> rows_by_key.add(np.array([7]), np.array([2]))
    >>> [part.tolist() for part in rows_by_key.find(np.array([5, 7, 9]))]
    [[0, 1, 1], [1, 0, 2]]
    """

    def __init__(self) -> None:
        self._runs: list[tuple[Ints, Ints]] = []

    def add(self, keys: Ints, rows: Ints) -> None:
        """Add pairs of key and row. Rows of the same key must come in ascending order."""
        order = np.argsort(keys, kind="stable")
        run = (keys[order], rows[order])
        # Each run is more than twice as long as the next one, so there are few runs and a pair is rarely moved.
        runs = list(self._runs)
        while runs and len(runs[-1][0]) <= 2 * len(run[0]):
            earlier = runs.pop()
            keys, rows = np.concatenate([earlier[0], run[0]]), np.concatenate([earlier[1], run[1]])
            order = np.argsort(keys, kind="stable")
            run = (keys[order], rows[order])
        self._runs = [*runs, run]  # one assignment, because other threads may be searching

    def keys(self, start: int, stop: int) -> Ints:
        """Return the distinct keys of rows [start, stop)."""
        found = [keys[(rows >= start) & (rows < stop)] for keys, rows in self._runs]
        return np.unique(np.concatenate([np.empty(0, np.int64), *found]))

    def find(self, keys: Ints) -> tuple[Ints, Ints]:
        """Return every match as positions in `keys` and rows, ordered by position and then by row."""
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
    """Follows the log: every row is read once, when it is new."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._seen = Snapshot()
        self._row_by_id, self._late_score_by_row = SortedMultimap(), SortedMultimap()
        self._repeated = np.empty(0, np.int64)
        self.conflicting: list[int] = []
        """Rows that repeat an id with different content."""
        self._dropped_by_event: dict[int, int] = {}
        self.tasks: dict[str, int] = {}
        self.sources: dict[str, int] = {}
        self._reading = threading.Lock()

    def catch_up(self, now: Snapshot) -> None:
        """Read the rows that were added up to `now`."""
        with self._reading:
            seen = self._seen
            if now.groups > seen.groups:
                self._read_groups(seen.groups, now.groups)
            if now.scores > seen.scores:
                new = self._tables.scores.scan(seen.scores, now.scores, ["group_id"])
                at = self.rows_of(new["group_id"].to_pylist())
                self._late_score_by_row.add(at, np.arange(seen.scores, now.scores))
            if now.events > seen.events:
                dropped = self._tables.events.scan(
                    seen.events, now.events, ["group_id"], "event = 'expired' AND cause = 'feedback'"
                )
                at = self.rows_of(dropped["group_id"].to_pylist())
                for row, event in zip(at.tolist(), dropped["_rowid"].to_pylist(), strict=True):
                    self._dropped_by_event.setdefault(row, event)
            self._seen = Snapshot(*map(max, astuple(seen), astuple(now)))

    def _read_groups(self, start: int, stop: int) -> None:
        new = self._tables.groups.scan(start, stop, ["group_id", "task", "sources"])
        ids: list[str] = new["group_id"].to_pylist()
        hashes, rows = _hashes(ids), np.arange(start, stop)
        self._row_by_id.add(hashes, rows)
        self._find_repeats(ids, rows, *self._row_by_id.find(hashes))
        _assign_codes(self.tasks, new["task"])
        _assign_codes(self.sources, new["sources"].combine_chunks().flatten())

    def _find_repeats(self, ids: Sequence[str], rows: Ints, at: Ints, found: Ints) -> None:
        """Note which of these rows have an earlier row with the same id."""
        before = found < rows[at]
        suspects, earlier = at[before], found[before]
        if not len(suspects):
            return
        stored = self._tables.groups.take(earlier, ["group_id", "digest"])
        digests = self._tables.groups.take(rows[suspects], ["digest"])["digest"].to_pylist()
        same_content: dict[int, bool] = {}
        for position, id_, earlier_digest, digest in zip(
            suspects.tolist(), stored["group_id"].to_pylist(), stored["digest"].to_pylist(), digests, strict=True
        ):
            if id_ == ids[position]:
                same_content.setdefault(int(rows[position]), earlier_digest == digest)
        self._repeated = np.concatenate([self._repeated, np.array(sorted(same_content), np.int64)])
        self.conflicting += [row for row in sorted(same_content) if not same_content[row]]

    def rows_of(self, ids: Sequence[str]) -> Ints:
        """Return the first row of each id, −1 for an id that is not in the log."""
        rows = np.full(len(ids), -1, np.int64)
        at, found = self._row_by_id.find(_hashes(ids))
        if not len(at):
            return rows
        stored = self._tables.groups.take(found, ["group_id"])["group_id"].to_pylist()
        for position, row, id_ in zip(at.tolist(), found.tolist(), stored, strict=True):
            if id_ == ids[position] and rows[position] < 0:
                rows[position] = row
        return rows

    def ordinals(self, rows: Ints) -> Ints:
        """Return the ordinal of each row."""
        return rows - np.searchsorted(self._repeated, rows)

    def rows_at(self, ordinals: Ints) -> Ints:
        """Return the row of each ordinal: the inverse of `ordinals`."""
        shifted = self._repeated - np.arange(len(self._repeated))
        return ordinals + np.searchsorted(shifted, ordinals, side="right")

    def without_repeats(self, rows: Ints) -> Ints:
        """Return the rows that do not repeat an earlier id."""
        return rows[~np.isin(rows, self._repeated)]

    def count_repeats(self, now: Snapshot) -> int:
        """Return how many rows of the snapshot repeat an earlier id."""
        return int(np.searchsorted(self._repeated, now.groups))

    def scored_between(self, start: int, stop: int) -> Ints:
        """Return the rows of groups that got late scores in rows [start, stop) of `scores`."""
        found = self._late_score_by_row.keys(start, stop)
        return found[found >= 0]

    def late_scores(self, rows: Ints, now: Snapshot) -> tuple[Ints, Ints]:
        """Return the late scores of these groups as positions in `rows` and rows of `scores` in commit order."""
        at, found = self._late_score_by_row.find(rows)
        in_time = found < now.scores
        return at[in_time], found[in_time]

    def dropped_by_deadline(self, rows: Ints, now: Snapshot) -> NDArray[np.bool_]:
        """Return a mask of the groups that a feedback deadline dropped."""
        return np.array([self._dropped_by_event.get(row, now.events) < now.events for row in rows.tolist()], np.bool_)


def _hashes(ids: Sequence[str]) -> Ints:
    return np.fromiter(map(hash, ids), np.int64, len(ids))


def _assign_codes(codes: dict[str, int], names: pa.ChunkedArray) -> None:
    """Give each new name the next number, in order of appearance."""
    for name in names.unique().to_pylist():
        codes.setdefault(name, len(codes))
