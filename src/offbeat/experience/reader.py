"""Reading the log: snapshots, groups with their late scores, the sampler's rows, the ledger and the totals."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from offbeat.errors import LogReadError
from offbeat.experience.catalog import SUMMARY, Catalog, Ints, ScoreIndex
from offbeat.experience.feedback import PendingCompletion, ScoreCard, bounded, merge
from offbeat.experience.index import NO_VERSION, Columns, LogStats, compute_stats, prompt_key
from offbeat.experience.ledger import (
    Ledger,
    LedgerEvent,
    LedgerEventKind,
    LedgerScope,
    LogUses,
    OwnRun,
    count_uses,
    event_kind,
    settle,
)
from offbeat.experience.schema import FLAT, READ, SealCheck, Snapshot, Tables, digest, groups_from, reward_figures
from offbeat.experience.validation import QuarantineEntry, Refusal, RefusalReason
from offbeat.storage.files import local_path
from offbeat.types import LARGEST_REWARD, REWARD_RULE, Group, Score

_SOURCE_BITS: Final = 31
"""All sources from this number on share one bit."""
_SUSPECT: Final = LARGEST_REWARD / 1e3  # a reward of G beyond the bound makes mean or deviation bound / (1 + √G)


class LogReader:
    """Reads one log, from any process, while others append to it. Safe to use from many threads.

    >>> import tempfile
    >>> from offbeat.experience.log import ExperienceLog
    >>> from offbeat.types import UNKNOWN, Completion, Prompt, Score
    >>> answer = Completion("g7/0", [4, 2], UNKNOWN, source="human", score=Score(1.0))
    >>> with tempfile.TemporaryDirectory() as place:
    ...     with ExperienceLog.open(place) as log:
    ...         _ = log.append([Group("g7", Prompt(id="p", token_ids=[1], task="arithmetic"), (answer,))])
    ...     reader = LogReader.open(place)
    ...     reader.filter(source="human").tolist(), reader.index_since(None)[0].reward_mean.tolist()
    ([0], [1.0])
    """

    def __init__(self, tables: Tables, own_run: OwnRun | None = None) -> None:
        self.tables, self.own_run = tables, own_run
        self.catalog = Catalog(tables)
        self._scores = ScoreIndex(tables, self.catalog)

    @classmethod
    def open(
        cls,
        uri: str | os.PathLike[str],
        *,
        storage_options: Mapping[str, str] | None = None,
        own_run: OwnRun | None = None,
    ) -> "LogReader":
        """Open an existing log for reading. With `own_run`, versions of other runs are left out."""
        return cls(Tables.open(os.fspath(uri), storage_options, create=False), own_run)

    def snapshot(self) -> Snapshot:
        """Return the current snapshot of the log."""
        return self.tables.snapshot()

    def _catch_up(self, snapshot: Snapshot | None) -> Snapshot:
        now = self.snapshot() if snapshot is None else snapshot
        self.catalog.catch_up(now)
        return now

    @property
    def tasks(self) -> list[str]:
        """Task names in the order of their numbers in `Columns.task`."""
        return list(self.catalog.tasks)

    @property
    def sources(self) -> list[str]:
        """Source names in the order of their bits in `Columns.sources`."""
        return list(self.catalog.sources)

    def find(self, group_ids: Sequence[str], snapshot: Snapshot | None = None) -> Ints:
        """Return the ordinal of each group, −1 for a group that is not in the log."""
        now = self._catch_up(snapshot)
        rows = self.catalog.rows_of(group_ids)
        return np.where((rows >= 0) & (rows < now.groups), self.catalog.ordinals(rows), -1)

    def read(self, which: Sequence[int] | Sequence[str] | Ints, snapshot: Snapshot | None = None) -> list[Group]:
        """Return groups by ordinal or by id, in the given order, with late scores filled in."""
        now = self._catch_up(snapshot)
        ordinals = np.asarray(which)
        if ordinals.dtype.kind == "U":
            ids = [str(name) for name in which]
            ordinals = self.find(ids, now)
            if (ordinals < 0).any():
                raise LogReadError(f"there is no group {ids[int(np.argmin(ordinals))]!r} in this log")
        rows = self.catalog.rows_at(ordinals.astype(np.int64))
        if len(rows) and (int(ordinals.min()) < 0 or int(rows.max()) >= now.groups):
            raise LogReadError(
                f"ordinals {ordinals.min()} … {ordinals.max()} were requested; the snapshot has {self.size(now)} groups"
            )
        return self._groups(rows, now)

    def size(self, snapshot: Snapshot | None = None) -> int:
        """Return the number of groups, without repeated rows."""
        now = self._catch_up(snapshot)
        return now.groups - self.catalog.count_repeats(now)

    def groups(self, snapshot: Snapshot | None = None, *, at_once: int = 256) -> Iterator[Group]:
        """Yield every group in commit order, reading `at_once` rows at a time."""
        now = self._catch_up(snapshot)
        for start in range(0, now.groups, at_once):
            rows = np.arange(start, min(start + at_once, now.groups))
            yield from self._groups(self.catalog.without_repeats(rows), now)

    def _groups(self, rows: Ints, now: Snapshot) -> list[Group]:
        if not len(rows):
            return []
        groups = self._parse(self.tables.groups.take(rows, READ))
        groups = groups if self.own_run is None else [self.own_run.view(group) for group in groups]
        late = self._scores.late(rows, now)
        return [merge(group, late.get(i, {})) for i, group in enumerate(groups)]

    def _parse(self, stored: pa.Table) -> list[Group]:
        try:
            return groups_from(stored)
        except (ValueError, KeyError, TypeError, IndexError) as error:
            raise LogReadError(
                f"a group in {self.tables.groups.uri} is damaged: {error}. `offbeat fsck` counts them"
            ) from error

    def score_cards(self, group_ids: Sequence[str]) -> list[ScoreCard | None]:
        """Return the scores of each group as they are now, None for a group that is not in the log."""
        return self._scores.of_groups(group_ids, self._catch_up(None))

    def score_cards_with(self, completion_ids: Sequence[str]) -> list[list[ScoreCard]]:
        """Return for each id the score cards of all groups that have a completion of this id."""
        return self._scores.with_completions(completion_ids, self._catch_up(None))

    def unripe(self, *, appended_before: float, snapshot: Snapshot | None = None) -> Iterator[Group]:
        """Yield groups appended before that time (unix seconds) that lack feedback and that no deadline dropped."""
        for group, _ in self._unripe(f"appended_at <= {appended_before!r}", snapshot):
            yield group

    def pending(self, snapshot: Snapshot | None = None) -> Iterator[PendingCompletion]:
        """Yield every completion that waits for a score, in commit order. Groups dropped by a deadline do not wait."""
        for group, appended_at in self._unripe("true", snapshot):
            for completion in group.completions:
                if completion.score is None:
                    yield PendingCompletion(group, completion, appended_at)

    def _unripe(self, where: str, snapshot: Snapshot | None, at_once: int = 256) -> Iterator[tuple[Group, float]]:
        now = self._catch_up(snapshot)
        waits = " OR ".join(["awaited > 0", *(f"group_id = {_quoted(one)}" for one in self.out_of_bounds(now))])
        found = self.tables.groups.scan(0, now.groups, ["appended_at"], f"({waits}) AND {where}")
        appended = dict(zip(_ints(found["_rowid"]).tolist(), found["appended_at"].to_pylist(), strict=True))
        rows = self.catalog.without_repeats(_ints(found["_rowid"]))
        rows = rows[~self.catalog.dropped_by_deadline(rows, now)]
        for start in range(0, len(rows), at_once):
            some = rows[start : start + at_once]
            for row, group in zip(some.tolist(), self._groups(some, now), strict=True):
                if not group.scored:
                    yield group, appended[row]

    def _tasks_and_completions(self, group_ids: Sequence[str]) -> list[tuple[str, list[str]] | None]:
        """Return the task and completion ids of each group, or None for a group that is not in the log."""
        self._catch_up(None)
        rows = self.catalog.rows_of(group_ids)
        stored = self.tables.groups.take(rows[rows >= 0], ["task", "completion_ids"])
        known = zip(stored["task"].to_pylist(), stored["completion_ids"].to_pylist(), strict=True)
        return [next(known) if row >= 0 else None for row in rows.tolist()]

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
        return self.catalog.ordinals(self.catalog.without_repeats(_ints(found["_rowid"])))

    def index_since(self, cursor: Snapshot | None, until: Snapshot | None = None) -> tuple[Columns, Snapshot]:
        """Return what to feed a sampler: groups that are new or got feedback after `cursor`, and the next cursor.

        The result depends only on the two snapshots, so a resumed sampler can be fed the same rows again.
        """
        now = self._catch_up(until)
        since = cursor or Snapshot()
        changed = self.catalog.scored_between(since.scores, now.scores)
        changed = changed[changed < since.groups]
        new = self.catalog.without_repeats(np.arange(since.groups, now.groups))
        parts = [self.tables.groups.take(changed, SUMMARY)] if len(changed) else []
        if len(new):
            summary = self.catalog.summary(since.groups, now.groups)
            parts.append(summary if len(new) == summary.num_rows else summary.take(pa.array(new - since.groups)))
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
        self._update_figures(rows, values, now)
        sources = summary["sources"].combine_chunks()
        bits = np.array([1 << min(code, _SOURCE_BITS) for code in self.catalog.sources.values()], np.uint32)
        per_completion = bits[_codes(sources.flatten(), self.catalog.sources)]
        sizes = sources.value_lengths().to_numpy()
        versions, guest = summary["oldest_version"].fill_null(NO_VERSION).to_numpy(), None
        if self.own_run is not None:
            own, guest = self.own_run.masks(summary)
            versions = np.where(own, versions, NO_VERSION)
        return Columns(
            ordinal=self.catalog.ordinals(rows),
            oldest_version=versions,
            task=_codes(summary["task"], self.catalog.tasks).astype(np.uint16),
            sources=np.bitwise_or.reduceat(per_completion, np.cumsum(sizes) - sizes),
            ripe=(values["awaited"] == 0) & ~self.catalog.dropped_by_deadline(rows, now),
            completions=sizes.astype(np.uint16),
            scored=values["scored"].astype(np.uint16),
            reward_mean=values["reward_mean"].astype(np.float32),
            reward_std=values["reward_std"].astype(np.float32),
            tokens=values["tokens"].astype(np.int32),
            prompt=_prompt_keys(summary),
            guest=guest,  # type: ignore[arg-type]  # None becomes False
        )

    def _update_figures(self, rows: Ints, values: dict[str, NDArray[np.generic]], now: Snapshot) -> None:
        """Update the figures of groups that got late scores, or may have a reward out of bounds."""
        large = np.maximum(np.abs(values["reward_mean"]), values["reward_std"]) > _SUSPECT
        at = np.union1d(self.catalog.late_scores(rows, now)[0], np.flatnonzero(large))
        for i, card in zip(at.tolist(), self._scores.cards(rows[at], now), strict=True):
            scored, mean, std = reward_figures(card.scores.values())
            values["scored"][i] = scored
            values["awaited"][i] = sum(score is None for score in card.scores.values())
            values["reward_mean"][i] = mean or 0.0
            values["reward_std"][i] = std or 0.0

    def out_of_bounds(self, now: Snapshot) -> dict[str, str]:
        """Return the groups that have a reward, as it is now, that no step can train on: id and reason."""
        reach = f"abs(reward_mean) > {_SUSPECT} OR reward_std > {_SUSPECT} OR isnan(reward_std)"
        late = f"isnan(reward) OR abs(reward) > {LARGEST_REWARD}"
        found = self.tables.groups.scan(0, now.groups, ["group_id"], reach)["group_id"].to_pylist()
        found += self.tables.scores.scan(0, now.scores, ["group_id"], late)["group_id"].to_pylist()
        return {
            card.group_id: f"completion {name} has reward {one.reward:g}; {REWARD_RULE}"
            for card in self._scores.cards(self.catalog.rows_of(list(dict.fromkeys(found))), now, raw=True)
            for name, one in card.scores.items()
            if one is not bounded(one) and isinstance(one, Score)
        }

    def ledger(self, snapshot: Snapshot | None = None, scope: LedgerScope | None = None) -> Ledger:
        """Compute the fate of every group from the log alone; of the groups in `scope` if it is given."""
        now = self._catch_up(snapshot)
        rows = self.catalog.without_repeats(np.arange(now.groups))
        stored = self.tables.groups.scan(0, now.groups, ["group_id"])["group_id"].to_numpy()[rows]
        columns = ["group_id", "event", "step", "cause", "by", "drift", "ess", "updates", "run"]
        recorded, damaged = self._events(now)
        # That a stored group was started or unfinished says nothing more, and most events of a long run say that.
        starts = recorded.filter(pc.equal(recorded["event"], LedgerEventKind.STARTED))
        early = pc.is_in(recorded["event"], pa.array([LedgerEventKind.STARTED, LedgerEventKind.UNFINISHED, "lost"]))
        of_stored = pc.is_in(recorded["group_id"], pa.array(stored, pa.string()))
        recorded = recorded.filter(pc.invert(pc.and_(early, of_stored)))
        events: Iterable[LedgerEvent] = (
            LedgerEvent(group, event_kind(event), *fields)
            for group, event, *fields in zip(*(recorded[c].to_pylist() for c in columns), strict=True)
        )
        refusals = self.tables.quarantine.scan(0, now.quarantine, ["group_id", "reason"], "kind = 'group'")
        refused: Iterable[tuple[str, str]] = (
            (group or f"(refused without an id, row {row})", reason)
            for group, reason, row in zip(*(refusals[c].to_pylist() for c in refusals.column_names), strict=True)
        )
        if self.own_run is not None and self.own_run.past:
            events = self.own_run.adopt(events)
        if scope is not None:
            stored, events, refused = scope.restrict(stored.tolist(), events, refused)
        return settle(
            stored, events, refused, invalid=self.out_of_bounds(now), damaged=damaged,
            repeated=self.catalog.count_repeats(now), conflicts=self._conflicts(now, starts),
        )  # fmt: skip

    def _events(self, now: Snapshot) -> tuple[pa.Table, tuple[str, ...]]:
        """Return the events that are as they were written, and what is wrong with the others."""
        rows, check = self.tables.events.scan(0, now.events, FLAT["events"]), SealCheck()
        return rows.filter(pa.array(check.add(rows))), tuple(check.wrong)

    def _conflicts(self, now: Snapshot, starts: pa.Table) -> int:
        """Count the rows that repeat an id with other content, without what a run generated a second time.

        A run that was killed may do that, and a random reward or a judge then gives other scores. Its worker records a
        start under the id each time; run and prompt are the same.
        """
        rows = np.array([row for row in self.catalog.conflicting if row < now.groups], np.int64)
        repeated = self.tables.groups.take(rows, ["group_id"])["group_id"].to_pylist() if len(rows) else []
        every = np.unique(self.catalog.every_row_of(repeated))
        names, by_id = ["group_id", "run", "prompt_id", "prompt_token_ids"], dict[str, list[tuple[object, ...]]]()
        for one in self.tables.groups.take(every[every < now.groups], names).to_pylist() if repeated else ():
            by_id.setdefault(one["group_id"], []).append((one["run"], one["prompt_id"], *one["prompt_token_ids"]))
        started = Counter(zip(starts["group_id"].to_pylist(), starts["run"].to_pylist(), strict=True))
        return sum(len({*by_id[one]}) > 1 or started[one, by_id[one][0][0]] < len(by_id[one]) for one in repeated)

    def uses(self) -> LogUses:
        """Count how often groups were trained on, by trainer and by task."""
        now = self._catch_up(None)
        columns = ["group_id", "event", "step", "by"]
        recorded, damaged = self._events(now)
        if damaged:
            raise LogReadError(f"{len(damaged)} events in {self.tables.events.uri} are damaged: {damaged[0]}")
        recorded = recorded.filter(pc.is_in(recorded["event"], pa.array(["trained", "rewound"])))
        events = [
            LedgerEvent(group, LedgerEventKind(event), step, by=by)
            for group, event, step, by in zip(*(recorded[c].to_pylist() for c in columns), strict=True)
        ]
        stored = self.tables.groups.scan(0, now.groups, ["group_id", "task"]) if events else None
        tasks = zip(stored["group_id"].to_pylist(), stored["task"].to_pylist(), strict=True) if stored else ()
        return count_uses(events, dict(tasks))

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
            found += self._damaged(stored)
        return found

    def _damaged(self, stored: pa.Table) -> list[str]:
        try:
            pairs = zip(self._parse(stored), stored["digest"].to_pylist(), strict=True)
            return [group.id for group, written in pairs if digest(group) != written]
        except (LogReadError, ValueError):  # find the row that cannot even be parsed
            if stored.num_rows == 1:
                return [str(stored["group_id"][0].as_py())]
            return [name for at in range(stored.num_rows) for name in self._damaged(stored.slice(at, 1))]

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
