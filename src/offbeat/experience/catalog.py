"""An in-memory index of the log for one process: the row of each group, which rows repeat an id, and its scores now.

Ids are kept as 64-bit hashes in sorted arrays, 16 bytes a group. Every lookup compares the id itself with the stored
row, so a hash collision costs one extra read and never gives a wrong answer.

A group's **ordinal** is its position in the log, counted from 0 in commit order and without the rows that repeat an id.
Rows are only added, and the first row of an id counts, so an ordinal never changes.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import xxhash
from numpy.typing import NDArray

from offbeat.experience.feedback import ScoreCard, bounded
from offbeat.experience.lance_table import TAKE_ROWS
from offbeat.experience.schema import Snapshot, Tables, score_from
from offbeat.types import Score, Unscorable

Ints = NDArray[np.int64]

SUMMARY: Final = [
    *("group_id", "run"),
    *("oldest_version", "task", "prompt_id", "sources", "scored", "awaited", "reward_mean", "reward_std", "tokens"),
]
"""The columns that the sampler's index is made of."""
GROUPS_AT_ONCE: Final = 65_536
"""Groups whose completion ids are in memory while the index is built."""

Scores = dict[str, Score | Unscorable]
"""By completion id."""


class SortedMultimap:
    """Rows by 64-bit key, in a few sorted runs: adding is cheap, and a lookup is one binary search in each run.

    >>> rows_by_key = SortedMultimap()
    >>> rows_by_key.add(np.array([7, 5]), np.array([0, 1]))
    >>> rows_by_key.add(np.array([7]), np.array([2]))
    >>> [part.tolist() for part in rows_by_key.find(np.array([5, 7, 9]))]
    [[0, 1, 1], [1, 0, 2]]
    """

    def __init__(self, pairs: Ints | None = None) -> None:
        """Start empty, or with what `pairs` returned."""
        self._runs: list[tuple[Ints, Ints]] = [] if pairs is None or not pairs.size else [(pairs[0], pairs[1])]

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

    def pairs(self) -> Ints:
        """Return all keys and their rows, as two rows of an array in the order of keys."""
        pairs = np.concatenate([np.empty((2, 0), np.int64), *map(np.stack, self._runs)], axis=1)
        return np.asarray(pairs[:, np.lexsort(pairs[::-1])])

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
        self._newest: tuple[int, pa.Table] | None = None
        self._reading = threading.Lock()

    def state(self) -> dict[str, NDArray[Any]]:
        """Return the catalog as arrays."""
        with self._reading:
            return {
                "seen": np.array(astuple(self._seen), np.int64),
                "rows_by_id": self._row_by_id.pairs(),
                "late_scores_by_row": self._late_score_by_row.pairs(),
                "repeated": self._repeated,
                "conflicting": np.array(self.conflicting, np.int64),
                "dropped_by_event": np.array([*self._dropped_by_event.items()], np.int64).reshape(-1, 2),
                "tasks": np.array([*self.tasks], np.str_),
                "sources": np.array([*self.sources], np.str_),
            }

    def load(self, state: Mapping[str, NDArray[Any]]) -> None:
        """Go to `state`, which another process may have saved; raise `ValueError` if it is of another log."""
        seen, rows_by_id = Snapshot(*state["seen"].tolist()), SortedMultimap(state["rows_by_id"])
        late_scores = SortedMultimap(state["late_scores_by_row"])
        ends = [0, seen.groups - 1]
        ids = self._tables.groups.take(np.array(ends), ["group_id"])["group_id"].to_pylist()
        if not set(ends) <= set(rows_by_id.find(hashes(ids))[1].tolist()):
            raise ValueError("it is the index of another log")
        with self._reading:
            self._seen, self._row_by_id, self._late_score_by_row = seen, rows_by_id, late_scores
            self._repeated, self.conflicting = state["repeated"], state["conflicting"].tolist()
            self._dropped_by_event = dict(state["dropped_by_event"].tolist())
            self.tasks = {name: code for code, name in enumerate(state["tasks"].tolist())}
            self.sources = {name: code for code, name in enumerate(state["sources"].tolist())}

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
                new = self._tables.events.scan(seen.events, now.events, ["group_id", "event", "cause"])
                dropped = new.filter((pc.field("event") == "expired") & (pc.field("cause") == "feedback"))
                at = self.rows_of(dropped["group_id"].to_pylist())
                for row, event in zip(at.tolist(), dropped["_rowid"].to_pylist(), strict=True):
                    self._dropped_by_event.setdefault(row, event)
            self._seen = Snapshot(*map(max, astuple(seen), astuple(now)))

    def _read_groups(self, start: int, stop: int) -> None:
        few = stop - start <= TAKE_ROWS
        new = self._tables.groups.scan(start, stop, SUMMARY if few else ["group_id", "task", "sources"])
        self._newest = (start, new) if few else None
        ids: list[str] = new["group_id"].to_pylist()
        keys, rows = hashes(ids), np.arange(start, stop)
        self._row_by_id.add(keys, rows)
        self._find_repeats(ids, rows, *self._row_by_id.find(keys))
        _assign_codes(self.tasks, new["task"])
        _assign_codes(self.sources, new["sources"].combine_chunks().flatten())

    def summary(self, start: int, stop: int) -> pa.Table:
        """Return the `SUMMARY` of rows [start, stop). Rows that were new at the last `catch_up` are not read again."""
        newest = self._newest
        if newest is not None and newest[0] <= start and stop <= newest[0] + newest[1].num_rows:
            return newest[1].slice(start - newest[0], stop - start).select(SUMMARY)
        return self._tables.groups.scan(start, stop, SUMMARY).select(SUMMARY)

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
        at, found = self._row_by_id.find(hashes(ids))
        if not len(at):
            return rows
        stored = self._tables.groups.take(found, ["group_id"])["group_id"].to_pylist()
        for position, row, id_ in zip(at.tolist(), found.tolist(), stored, strict=True):
            if id_ == ids[position] and rows[position] < 0:
                rows[position] = row
        return rows

    def every_row_of(self, ids: Sequence[str]) -> Ints:
        """Return all rows of these ids, repeats included; a row of another id with the same hash may be among them."""
        return self._row_by_id.find(hashes(ids))[1]

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


def hashes(ids: Sequence[str]) -> Ints:
    """Return a 64-bit hash of each id: the same in every process."""
    return np.fromiter(
        (xxhash.xxh3_64_intdigest(id_.encode(errors="surrogatepass")) for id_ in ids), np.uint64, len(ids)
    ).view(np.int64)


def _assign_codes(codes: dict[str, int], names: pa.ChunkedArray) -> None:
    """Give each new name the next number, in order of appearance."""
    for name in names.unique().to_pylist():
        codes.setdefault(name, len(codes))


class ScoreIndex:
    """Finds the scores of groups as they are now, by group or by completion, without reading any token.

    The index of completion ids is built when it is first used. The catalog must have caught up with the snapshot that a
    method gets.
    """

    def __init__(self, tables: Tables, catalog: Catalog) -> None:
        self._tables, self._catalog = tables, catalog
        self._indexed = 0
        self._row_by_completion = SortedMultimap()
        self._indexing = threading.Lock()

    def late(self, rows: Ints, now: Snapshot) -> dict[int, Scores]:
        """Return late scores by position in `rows`. The last one for a completion counts."""
        at, found = self._catalog.late_scores(rows, now)
        if not len(at):
            return {}
        columns = ["completion_id", "reward", "unscorable", "detail", "breakdown"]
        stored = self._tables.scores.take(found, columns)
        late: dict[int, Scores] = {}
        for position, (completion_id, *fields) in zip(
            at.tolist(), zip(*(stored[c].to_pylist() for c in columns), strict=True), strict=True
        ):
            score = score_from(*fields)
            assert score is not None  # validation refuses empty feedback
            late.setdefault(position, {})[completion_id] = score
        return late

    def cards(self, rows: Ints, now: Snapshot, *, raw: bool = False) -> list[ScoreCard]:
        """Return the scores of the groups in these rows, late ones filled in; those out of bounds only if `raw`."""
        if not len(rows):
            return []
        names = ["group_id", "prompt_id", "task", "completion_ids", "rewards", "unscorable"]
        stored, late = self._tables.groups.take(rows, names), self.late(rows, now)
        cards = []
        for i, values in enumerate(zip(*(stored[n].to_pylist() for n in names), strict=True)):
            group_id, prompt_id, task, ids, rewards, reasons = values
            scores = {n: score_from(r, u, "", None) for n, r, u in zip(ids, rewards, reasons, strict=True)}
            scores.update(late.get(i, {}))
            scores = scores if raw else {name: bounded(one) for name, one in scores.items()}
            cards.append(ScoreCard(group_id, prompt_id, task, scores))
        return cards

    def of_groups(self, group_ids: Sequence[str], now: Snapshot) -> list[ScoreCard | None]:
        """Return the card of each group, None for a group that is not in the log."""
        rows = self._catalog.rows_of(group_ids)
        cards = iter(self.cards(rows[rows >= 0], now))
        return [next(cards) if row >= 0 else None for row in rows.tolist()]

    def with_completions(self, completion_ids: Sequence[str], now: Snapshot) -> list[list[ScoreCard]]:
        """Return for each id the cards of all groups that have a completion of this id."""
        self._index_completions(now.groups)
        at, rows = self._row_by_completion.find(hashes(completion_ids))
        distinct = self._catalog.without_repeats(np.unique(rows[rows < now.groups]))
        cards = dict(zip(distinct.tolist(), self.cards(distinct, now), strict=True))
        found: list[list[ScoreCard]] = [[] for _ in completion_ids]
        for position, row in zip(at.tolist(), rows.tolist(), strict=True):
            if row in cards and completion_ids[position] in cards[row].scores:
                found[position].append(cards[row])
        return found

    def _index_completions(self, groups: int) -> None:
        with self._indexing:
            for start in range(self._indexed, groups, GROUPS_AT_ONCE):
                stop = min(start + GROUPS_AT_ONCE, groups)
                ids = self._tables.groups.scan(start, stop, ["completion_ids"])["completion_ids"].combine_chunks()
                rows = np.repeat(np.arange(start, stop), ids.value_lengths().to_numpy())
                self._row_by_completion.add(hashes(ids.flatten().to_pylist()), rows)
                self._indexed = stop
