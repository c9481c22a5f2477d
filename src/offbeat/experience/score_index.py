"""The scores of groups as they are now, found by group or by completion, without reading any token.

The index of completion ids is built when it is first used. Like the catalog, it keeps 64-bit hashes, 16 bytes a
completion, and a lookup compares the ids themselves.
"""

import threading
from collections.abc import Sequence
from typing import Final

import numpy as np

from offbeat.experience.catalog import Catalog, Ints, SortedMultimap, hashes
from offbeat.experience.feedback import ScoreCard
from offbeat.experience.schema import Snapshot, Tables, score_from
from offbeat.types import Score, Unscorable

GROUPS_AT_ONCE: Final = 65_536
"""Groups whose completion ids are in memory while the index is built."""

Scores = dict[str, Score | Unscorable]
"""By completion id."""


class ScoreIndex:
    """Finds scores. The catalog must have caught up with the snapshot that a method gets."""

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

    def cards(self, rows: Ints, now: Snapshot) -> list[ScoreCard]:
        """Return the scores of the groups in these rows, late ones filled in."""
        if not len(rows):
            return []
        names = ["group_id", "prompt_id", "task", "completion_ids", "rewards", "unscorable"]
        stored, late = self._tables.groups.take(rows, names), self.late(rows, now)
        cards = []
        for i, values in enumerate(zip(*(stored[n].to_pylist() for n in names), strict=True)):
            group_id, prompt_id, task, ids, rewards, reasons = values
            scores = {n: score_from(r, u, "", None) for n, r, u in zip(ids, rewards, reasons, strict=True)}
            scores.update(late.get(i, {}))
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
