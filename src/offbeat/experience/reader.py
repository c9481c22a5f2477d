"""Reading the log: snapshots, groups with their late scores, the sampler's rows, the ledger and the totals."""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from offbeat.errors import LogReadError
from offbeat.experience.catalog import Catalog, Ints
from offbeat.experience.feedback import merge
from offbeat.experience.index import NO_VERSION, Columns, prompt_key
from offbeat.experience.ledger import Ledger, LedgerEvent, LedgerEventKind, LogStats, compute_stats, settle
from offbeat.experience.quarantine import QuarantineEntry, Refusal, RefusalReason
from offbeat.experience.rows import READ, groups_from, reward_figures
from offbeat.experience.schema import Snapshot, Tables, digest, score_from
from offbeat.storage.files import local_path
from offbeat.types import Group, Score, Unscorable

Scores = dict[str, Score | Unscorable]
"""By completion id."""

_SUMMARY: Final = [
    *("oldest_version", "task", "prompt_id", "sources", "scored", "awaited", "reward_mean", "reward_std", "tokens")
]
_SOURCE_BITS: Final = 31
"""All sources from this number on share one bit."""


class LogReader:
    """Reads one log, from any process, while others append to it. Safe to use from many threads.

    >>> import tempfile
    >>> from offbeat.experience.log import ExperienceLog
    >>> from offbeat.types import UNKNOWN, Completion, Prompt
    >>> answer = Completion("g7/0", [4, 2], UNKNOWN, source="human", score=Score(1.0))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     with ExperienceLog.open(place) as log:
    ...         _ = log.append([Group("g7", Prompt(id="p", token_ids=[1], task="arithmetic"), (answer,))])
    ...     reader = LogReader.open(place)
    ...     reader.filter(source="human").tolist(), reader.index_since(None)[0].reward_mean.tolist()
    ([0], [1.0])
    """

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._catalog = Catalog(tables)

    @classmethod
    def open(cls, uri: str | os.PathLike[str], *, storage_options: Mapping[str, str] | None = None) -> "LogReader":
        """Open an existing log for reading."""
        return cls(Tables.open(os.fspath(uri), storage_options, create=False))

    def snapshot(self) -> Snapshot:
        """Return the current snapshot of the log."""
        return self.tables.snapshot()

    def _catch_up(self, snapshot: Snapshot | None) -> Snapshot:
        now = self.snapshot() if snapshot is None else snapshot
        self._catalog.catch_up(now)
        return now

    @property
    def tasks(self) -> list[str]:
        """Task names in the order of their numbers in `Columns.task`."""
        return list(self._catalog.tasks)

    @property
    def sources(self) -> list[str]:
        """Source names in the order of their bits in `Columns.sources`."""
        return list(self._catalog.sources)

    def find(self, group_ids: Sequence[str], snapshot: Snapshot | None = None) -> Ints:
        """Return the ordinal of each group, −1 for a group that is not in the log."""
        now = self._catch_up(snapshot)
        rows = self._catalog.rows_of(group_ids)
        return np.where((rows >= 0) & (rows < now.groups), self._catalog.ordinals(rows), -1)

    def read(self, which: Sequence[int] | Sequence[str] | Ints, snapshot: Snapshot | None = None) -> list[Group]:
        """Return groups by ordinal or by id, in the given order, with late scores filled in."""
        now = self._catch_up(snapshot)
        ordinals = np.asarray(which)
        if ordinals.dtype.kind == "U":
            ids = [str(name) for name in which]
            ordinals = self.find(ids, now)
            if (ordinals < 0).any():
                raise LogReadError(f"there is no group {ids[int(np.argmin(ordinals))]!r} in this log")
        rows = self._catalog.rows_at(ordinals.astype(np.int64))
        if len(rows) and (int(ordinals.min()) < 0 or int(rows.max()) >= now.groups):
            raise LogReadError(
                f"ordinals {ordinals.min()} … {ordinals.max()} were requested; the snapshot has {self.size(now)} groups"
            )
        return self._groups(rows, now)

    def size(self, snapshot: Snapshot | None = None) -> int:
        """Return the number of groups, without repeated rows."""
        now = self._catch_up(snapshot)
        return now.groups - self._catalog.count_repeats(now)

    def groups(self, snapshot: Snapshot | None = None, *, at_once: int = 256) -> Iterator[Group]:
        """Yield every group in commit order, reading `at_once` rows at a time."""
        now = self._catch_up(snapshot)
        for start in range(0, now.groups, at_once):
            rows = np.arange(start, min(start + at_once, now.groups))
            yield from self._groups(self._catalog.without_repeats(rows), now)

    def _groups(self, rows: Ints, now: Snapshot) -> list[Group]:
        if not len(rows):
            return []
        groups = groups_from(self.tables.groups.take(rows, READ))
        late = self._late_scores(rows, now)
        return [merge(group, late[i]) if i in late else group for i, group in enumerate(groups)]

    def unripe(self, *, appended_before: float, snapshot: Snapshot | None = None) -> list[Group]:
        """Return groups appended before that time (unix seconds) that lack feedback and that no deadline dropped."""
        now = self._catch_up(snapshot)
        found = self.tables.groups.scan(0, now.groups, [], f"awaited > 0 AND appended_at <= {appended_before!r}")
        rows = self._catalog.without_repeats(_ints(found["_rowid"]))
        rows = rows[~self._catalog.dropped_by_deadline(rows, now)]
        return [group for group in self._groups(rows, now) if not group.scored]

    def _tasks_and_completions(self, group_ids: Sequence[str]) -> list[tuple[str, list[str]] | None]:
        """Return the task and completion ids of each group, or None for a group that is not in the log."""
        self._catch_up(None)
        rows = self._catalog.rows_of(group_ids)
        stored = self.tables.groups.take(rows[rows >= 0], ["task", "completion_ids"])
        known = zip(stored["task"].to_pylist(), stored["completion_ids"].to_pylist(), strict=True)
        return [next(known) if row >= 0 else None for row in rows.tolist()]

    def _late_scores(self, rows: Ints, now: Snapshot) -> dict[int, Scores]:
        """Return late scores by position in `rows`. The last one for a completion counts."""
        at, found = self._catalog.late_scores(rows, now)
        if not len(at):
            return {}
        columns = ["completion_id", "reward", "unscorable", "detail", "breakdown"]
        stored = self.tables.scores.take(found, columns)
        late: dict[int, Scores] = {}
        for position, (completion_id, *fields) in zip(
            at.tolist(), zip(*(stored[c].to_pylist() for c in columns), strict=True), strict=True
        ):
            score = score_from(*fields)
            assert score is not None  # validation refuses empty feedback
            late.setdefault(position, {})[completion_id] = score
        return late

    def filter(
        self,
        *,
        task: str | None = None,
        source: str | None = None,
        versions: tuple[int, int] | None = None,
        snapshot: Snapshot | None = None,
    ) -> Ints:
        """Return the ordinals of groups by task, by source of a completion, or by oldest version in [low, high]."""
        now = self._catch_up(snapshot)
        conditions = ["true"]
        if task is not None:
            conditions.append(f"task = {_quoted(task)}")
        if source is not None:
            conditions.append(f"array_has(sources, {_quoted(source)})")
        if versions is not None:
            conditions.append(f"oldest_version >= {int(versions[0])} AND oldest_version <= {int(versions[1])}")
        found = self.tables.groups.scan(0, now.groups, [], " AND ".join(conditions))
        return self._catalog.ordinals(self._catalog.without_repeats(_ints(found["_rowid"])))

    def index_since(self, cursor: Snapshot | None, until: Snapshot | None = None) -> tuple[Columns, Snapshot]:
        """Return what to feed a sampler: groups that are new or got feedback after `cursor`, and the next cursor.

        The result depends only on the two snapshots, so a resumed sampler can be fed the same rows again.
        """
        now = self._catch_up(until)
        since = cursor or Snapshot()
        changed = self._catalog.scored_between(since.scores, now.scores)
        changed = changed[changed < since.groups]
        new = self._catalog.without_repeats(np.arange(since.groups, now.groups))
        parts = [self.tables.groups.take(changed, _SUMMARY)] if len(changed) else []
        if len(new):
            scanned = self.tables.groups.scan(since.groups, now.groups, _SUMMARY)
            keep = np.isin(_ints(scanned["_rowid"]), new)
            parts.append(scanned.select(_SUMMARY).filter(pa.array(keep)))
        rows = np.concatenate([changed, new])
        return self._columns(rows, parts, now), now

    def _columns(self, rows: Ints, parts: list[pa.Table], now: Snapshot) -> Columns:
        if not parts:
            return Columns(*([[]] * 10))  # type: ignore[arg-type]
        summary = pa.concat_tables(parts)
        values = {
            name: summary[name].to_numpy() for name in ("scored", "awaited", "reward_mean", "reward_std", "tokens")
        }
        values = {name: np.nan_to_num(array) for name, array in values.items()}
        self._apply_late_scores(rows, values, now)
        sources = summary["sources"].combine_chunks()
        bits = np.array([1 << min(code, _SOURCE_BITS) for code in self._catalog.sources.values()], np.uint32)
        per_completion = bits[_codes(sources.flatten(), self._catalog.sources)]
        sizes = sources.value_lengths().to_numpy()
        return Columns(
            ordinal=self._catalog.ordinals(rows),
            oldest_version=summary["oldest_version"].fill_null(NO_VERSION).to_numpy(),
            task=_codes(summary["task"], self._catalog.tasks).astype(np.uint16),
            sources=np.bitwise_or.reduceat(per_completion, np.cumsum(sizes) - sizes),
            ripe=(values["awaited"] == 0) & ~self._catalog.dropped_by_deadline(rows, now),
            completions=sizes.astype(np.uint16),
            scored=values["scored"].astype(np.uint16),
            reward_mean=values["reward_mean"].astype(np.float32),
            reward_std=values["reward_std"].astype(np.float32),
            tokens=values["tokens"].astype(np.int32),
            prompt=_prompt_keys(summary),
        )

    def _apply_late_scores(self, rows: Ints, values: dict[str, NDArray[np.generic]], now: Snapshot) -> None:
        """Update the figures of groups that got late scores; the stored ones are from the append."""
        late = self._late_scores(rows, now)
        if not late:
            return
        at = np.array(sorted(late), np.int64)
        stored = self.tables.groups.take(rows[at], ["completion_ids", "rewards", "unscorable"])
        for i, ids, rewards, reasons in zip(
            at.tolist(), *(stored[c].to_pylist() for c in stored.column_names), strict=True
        ):
            feedback = {n: score_from(r, u, "", None) for n, r, u in zip(ids, rewards, reasons, strict=True)} | late[i]
            scored, mean, std = reward_figures(feedback.values())
            values["scored"][i] = scored
            values["awaited"][i] = sum(score is None for score in feedback.values())
            values["reward_mean"][i] = mean or 0.0
            values["reward_std"][i] = std or 0.0

    def ledger(self, snapshot: Snapshot | None = None) -> Ledger:
        """Compute the fate of every group from the log alone."""
        now = self._catch_up(snapshot)
        rows = self._catalog.without_repeats(np.arange(now.groups))
        stored = self.tables.groups.scan(0, now.groups, ["group_id"])["group_id"].to_numpy()[rows]
        columns = ["group_id", "event", "step", "cause", "by", "drift", "ess"]
        recorded = self.tables.events.scan(0, now.events, columns)
        events = (
            LedgerEvent(group, LedgerEventKind(event), *fields)
            for group, event, *fields in zip(*(recorded[c].to_pylist() for c in columns), strict=True)
        )
        refusals = self.tables.quarantine.scan(0, now.quarantine, ["group_id", "reason"], "kind = 'group'")
        refused = (
            (group or f"(refused without an id, row {row})", reason)
            for group, reason, row in zip(*(refusals[c].to_pylist() for c in refusals.column_names), strict=True)
        )
        conflicts = sum(row < now.groups for row in self._catalog.conflicting)
        return settle(stored, events, refused, repeated=self._catalog.count_repeats(now), conflicts=conflicts)

    def quarantined(self, snapshot: Snapshot | None = None) -> list[QuarantineEntry]:
        """Return what validation refused, in commit order."""
        now = snapshot or self.snapshot()
        columns = ["group_id", "reason", "detail", "payload", "kind"]
        stored = self.tables.quarantine.scan(0, now.quarantine, columns)
        return [
            QuarantineEntry(group, Refusal(RefusalReason(reason), detail), payload, kind)
            for group, reason, detail, payload, kind in zip(*(stored[c].to_pylist() for c in columns), strict=True)
        ]

    def damaged(self, snapshot: Snapshot | None = None) -> list[str]:
        """Return the ids of groups whose stored content does not match its digest: the storage changed it."""
        now = self._catch_up(snapshot)
        found: list[str] = []
        for start in range(0, now.groups, 256):
            stored = self.tables.groups.take(np.arange(start, min(start + 256, now.groups)), [*READ, "digest"])
            pairs = zip(groups_from(stored), stored["digest"].to_pylist(), strict=True)
            found += [group.id for group, written in pairs if digest(group) != written]
        return found

    def stats(self) -> LogStats:
        """Count what is in the log now, including late scores."""
        rows, now = self.index_since(None)
        reasons = self.tables.quarantine.scan(0, now.quarantine, ["reason"])["reason"].to_pylist()
        path = local_path(self.tables.groups.uri)
        files = [file for file in path.parent.rglob("*") if file.is_file()] if path else []
        size = sum(file.stat().st_size for file in files) if path else None
        return compute_stats(rows, self.tasks, self.sources, reasons, late_scores=now.scores, bytes_on_disk=size)


def _prompt_keys(summary: pa.Table) -> NDArray[np.uint64]:
    """Return the key of each row's prompt; a prompt that repeats is hashed once."""
    names = (
        pc.binary_join_element_wise(summary["task"], summary["prompt_id"], "\0").combine_chunks().dictionary_encode()
    )
    keys = np.array([prompt_key(*name.split("\0", 1)) for name in names.dictionary.to_pylist()], np.uint64)
    found: NDArray[np.uint64] = keys[names.indices.to_numpy()]
    return found


def _ints(column: pa.ChunkedArray) -> Ints:
    return np.asarray(column.to_numpy(), np.int64)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _codes(names: pa.ChunkedArray | pa.Array, codes: Mapping[str, int]) -> Ints:
    """Return the number of each name, with one lookup for each distinct name."""
    chunks = names.dictionary_encode()
    whole = chunks.combine_chunks() if isinstance(chunks, pa.ChunkedArray) else chunks
    numbers = np.array([codes[name] for name in whole.dictionary.to_pylist()], np.int64)
    found: Ints = numbers[whole.indices.to_numpy()]
    return found
