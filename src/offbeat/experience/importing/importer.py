"""Somebody else's rollouts enter the log: read a few at a time, made into groups, shown to the door, appended.

    records = find_records("rollouts.jsonl")
    layout = layout_of(records)                      # print it: it says which column was taken for what
    groups = read_groups(records, layout, About(task="math", source="model:qwen"))
    tally = import_into(log, groups, rules=ValidationRules())

Importing the same again adds nothing: a group's id is made of its content, and what the log or its quarantine holds
already is left alone. What cannot be taken goes to quarantine with its reason and never stops the rest.
"""

import array
import json
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Final

from offbeat.errors import CannotImport
from offbeat.experience.importing.layout import ColumnLayout, RowShape, detect
from offbeat.experience.importing.records import Broken, Records, Row, SourceRecord
from offbeat.experience.importing.shapes import About, content_hash, group_from
from offbeat.experience.importing.values import UnreadableCell
from offbeat.experience.log import ExperienceLog
from offbeat.experience.quarantine import QuarantineEntry, Refusal, RefusalReason, refused
from offbeat.experience.schema import digest
from offbeat.experience.validation import ValidationRules, validate_group
from offbeat.types import UNKNOWN, Group, Score

BUCKETS: Final = 64
"""Parts that scattered rows are sorted into; one of them is held in memory at a time."""

Rows = tuple[str, list[Row]]
"""Where the first stands, and the rows of one group."""


def rows_by_group(records: Records, layout: ColumnLayout) -> Iterator[Rows | Broken]:
    """The rows of each group in turn. Rows that stand together are read as they come, others are sorted on disk."""
    if layout.shape is RowShape.LISTS:
        for record in records.read(layout.needed):
            yield record if isinstance(record, Broken) else (record.where, [record.row])
    elif _stand_together(records, layout):
        yield from _neighbours(records.read(layout.needed), layout)
    else:
        yield from _scattered(records.read(layout.needed), layout)


def _stand_together(records: Records, layout: ColumnLayout) -> bool:
    """Whether no group is interrupted by another: 8 bytes a group to find out."""
    starts, before = array.array("q"), None
    for record in records.read(layout.needed):
        if isinstance(record, SourceRecord) and (key := layout.key(record.row)) != before:
            before = key
            starts.append(hash(key))
    return len(set(starts)) == len(starts)


def _neighbours(records: Iterable[SourceRecord | Broken], layout: ColumnLayout) -> Iterator[Rows | Broken]:
    key, group = "", ("", list[Row]())
    for record in records:
        if isinstance(record, Broken):
            yield record
            continue
        if (its := layout.key(record.row)) != key:
            if group[1]:
                yield group
            key, group = its, (record.where, [])
        group[1].append(record.row)
    if group[1]:
        yield group


def _scattered(records: Iterable[SourceRecord | Broken], layout: ColumnLayout) -> Iterator[Rows | Broken]:
    """Rows in any order: parted on disk by their key, so that only one part at a time is held in memory."""
    with tempfile.TemporaryDirectory(prefix="offbeat-import-") as place:
        paths = [Path(place, f"{number}.jsonl") for number in range(BUCKETS)]
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("w", encoding="utf-8")) for path in paths]
            for record in records:
                if isinstance(record, Broken):
                    yield record
                    continue
                key = layout.key(record.row)
                wanted = {name: record.row.get(name) for name in layout.needed}
                line = json.dumps([key, record.where, wanted], default=str)
                files[zlib.crc32(key.encode()) % BUCKETS].write(line + "\n")
        for path in paths:
            groups: dict[str, Rows] = {}
            with path.open(encoding="utf-8") as lines:
                for key, where, row in map(json.loads, lines):
                    groups.setdefault(key, (where, []))[1].append(row)
            yield from groups.values()


LOOKED_AT: Final = 32
"""Rows that the layout is detected from."""
GROUPS_AT_ONCE: Final = 256
TOKENS_AT_ONCE: Final = 4_000_000
"""A batch ends with whichever comes first."""
EXAMPLES: Final = 3
"""Kept for each reason."""


@dataclass(frozen=True, eq=False)
class ImportedGroup:
    """A group, or what was refused instead, and where it stands."""

    where: str
    what: Group | QuarantineEntry


@dataclass
class ImportTally:
    """What became of what was found.

    >>> print(ImportTally(taken=2, completions=16, tokens=512, awaited=4, present=1))
    taken        2 groups, 16 completions, 512 tokens
      of which   0 with log-probs, 4 awaiting feedback; mean reward none
    left alone   1 groups that are there already
    quarantined  0
    """

    taken: int = 0
    completions: int = 0
    tokens: int = 0
    known: int = 0
    """Completions with log-probs."""
    awaited: int = 0
    rewards: tuple[int, float] = (0, 0.0)
    """How many, and their sum."""
    present: int = 0
    """Groups that the log holds already, or that stand in the file a second time."""
    refused: Counter[RefusalReason] = field(default_factory=Counter)
    examples: dict[RefusalReason, list[str]] = field(default_factory=dict)

    def take(self, group: Group) -> None:
        """Count a group that is taken."""
        rewards = [float(c.score.reward) for c in group.completions if isinstance(c.score, Score)]
        self.taken += 1
        self.completions += len(group.completions)
        self.tokens += _tokens(group)
        self.known += sum(c.behavior_logprobs is not UNKNOWN for c in group.completions)
        self.awaited += sum(c.score is None for c in group.completions)
        self.rewards = self.rewards[0] + len(rewards), self.rewards[1] + sum(rewards)

    def refuse(self, where: str, refusal: Refusal) -> None:
        """Count what is refused, and keep the first few as examples."""
        self.refused[refusal.reason] += 1
        examples = self.examples.setdefault(refusal.reason, [])
        if len(examples) < EXAMPLES:
            examples.append(f"{where}: {refusal.detail}")

    def __str__(self) -> str:
        scored, total = self.rewards
        mean = f"{total / scored:.4g}" if scored else "none"
        lines = [
            f"taken        {self.taken} groups, {self.completions} completions, {self.tokens} tokens",
            f"  of which   {self.known} with log-probs, {self.awaited} awaiting feedback; mean reward {mean}",
            f"left alone   {self.present} groups that are there already",
            f"quarantined  {sum(self.refused.values())}",
        ]
        for reason, count in self.refused.most_common():
            lines.append(f"  {reason}: {count}")
            lines += [f"    {example}" for example in self.examples[reason]]
        return "\n".join(lines)


def layout_of(records: Records, told: Mapping[str, str] | None = None, kept: Sequence[str] = ()) -> ColumnLayout:
    """The layout of these records, from the first few rows."""
    rows = [record.row for record in islice(records.read(None), LOOKED_AT) if isinstance(record, SourceRecord)]
    if not rows:
        raise CannotImport(f"{records.name} has no rows that can be read")
    return detect(rows, told, kept)


def read_groups(records: Records, layout: ColumnLayout, about: About) -> Iterator[ImportedGroup]:
    """Every group of the records in turn, and what no group could be made of."""
    if layout.has_text and about.encoder is None:
        given = ", ".join(f"{role} is {found}" for role, found in layout.kinds.items())
        raise CannotImport(f"{given}: text needs the policy's tokenizer, or give token ids")
    for name in ("task", "source"):
        if layout.shape is not RowShape.EXPORT and name not in layout.columns and getattr(about, name) is None:
            raise CannotImport(f"the rows do not say their {name}: give one, or a column with {name}=…")
    for item in rows_by_group(records, layout):
        if isinstance(item, Broken):
            yield ImportedGroup(item.where, _unreadable(item.problem, item.found))
            continue
        where, rows = item
        try:
            yield ImportedGroup(where, group_from(rows, layout, about))
        except UnreadableCell as error:
            yield ImportedGroup(where, _unreadable(str(error), rows))


def _unreadable(problem: str, found: object) -> QuarantineEntry:
    entry = refused(found, Refusal(RefusalReason.UNREADABLE, problem))
    return replace(entry, group_id=f"import-{content_hash(entry.payload)}")


def import_into(
    log: ExperienceLog | None,
    found: Iterable[ImportedGroup],
    *,
    rules: ValidationRules,
    dry_run: bool = False,
    on_batch: Callable[[ImportTally], None] = lambda _: None,
) -> ImportTally:
    """Append the groups that pass the door, quarantine the rest; with `dry_run` only tell what would happen.

    Args:
        log: Open with the same rules; None for a dry run where there is no log yet.
        found: From `read_groups`.
        on_batch: Told how far it has come, after each batch.
    """
    tally, desk = ImportTally(), _Desk(log, rules, dry_run)
    for batch in _batches(found):
        desk.settle(batch, tally)
        on_batch(tally)
    return tally


def _batches(found: Iterable[ImportedGroup]) -> Iterator[list[ImportedGroup]]:
    batch: list[ImportedGroup] = []
    tokens = 0
    for item in found:
        batch.append(item)
        tokens += _tokens(item.what) if isinstance(item.what, Group) else len(item.what.payload)
        if len(batch) >= GROUPS_AT_ONCE or tokens >= TOKENS_AT_ONCE:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _tokens(group: Group) -> int:
    return len(group.prompt.token_ids) + sum(len(c.token_ids) for c in group.completions)


class _Desk:
    """Decides batch by batch what is taken, left alone or refused, and writes it down unless the run is dry."""

    def __init__(self, log: ExperienceLog | None, rules: ValidationRules, dry_run: bool) -> None:
        self._log = log
        self._writes = None if dry_run else log
        self._rules = rules
        self._taken: dict[str, str] = {}
        self._quarantined: set[tuple[str, str]] = set()
        if log is not None:
            rows = log.tables.quarantine.scan(0, log.snapshot().quarantine, ["group_id", "reason"])
            self._quarantined = set(zip(rows["group_id"].to_pylist(), rows["reason"].to_pylist(), strict=True))

    def settle(self, batch: Sequence[ImportedGroup], tally: ImportTally) -> None:
        stored = self._stored([item.what.id for item in batch if isinstance(item.what, Group)])
        admitted: list[Group] = []
        refusals: list[QuarantineEntry] = []
        for item in batch:
            entry = self._judge(item.what, stored)
            if entry is None:
                tally.present += 1
            elif isinstance(entry, Group):
                admitted.append(entry)
            else:
                tally.refuse(item.where, entry.refusal)
                if (known := (entry.group_id, str(entry.refusal.reason))) not in self._quarantined:
                    self._quarantined.add(known)
                    refusals.append(entry)
        self._write(admitted, refusals, tally)

    def _write(self, admitted: Sequence[Group], refusals: Sequence[QuarantineEntry], tally: ImportTally) -> None:
        if self._writes is None:
            also_refused: tuple[QuarantineEntry, ...] = ()
        else:
            also_refused = self._writes.append(admitted).refused  # none, unless the log was opened with other rules
            self._writes.quarantine(refusals)
            self._taken.clear()  # from now on the log itself tells; only a dry run has to remember
        for entry in also_refused:
            tally.refuse(entry.group_id, entry.refusal)
        gone = {entry.group_id for entry in also_refused}
        for group in admitted:
            if group.id not in gone:
                tally.take(group)

    def _stored(self, ids: Sequence[str]) -> dict[str, tuple[str, str]]:
        """What the log holds under these ids: digests as appended, and with late scores in place."""
        if self._log is None or not ids:
            return {}
        now = self._log.snapshot()
        there = [name for name, at in zip(ids, self._log.find(ids, now), strict=True) if at >= 0]
        versions = (self._log.read(there, replace(now, scores=0)), self._log.read(there, now))
        return {first.id: (digest(first), digest(last)) for first, last in zip(*versions, strict=True)}

    def _judge(
        self, what: Group | QuarantineEntry, stored: Mapping[str, tuple[str, str]]
    ) -> Group | QuarantineEntry | None:
        """The group if it is to be taken, a refusal, or None for what is there already."""
        if isinstance(what, QuarantineEntry):
            return what
        if refusal := validate_group(what, self._rules):
            return refused(what, refusal)
        content = digest(what)
        if what.id in stored:
            return None if content in stored[what.id] else _conflict(what)
        if what.id in self._taken:
            return None if content == self._taken[what.id] else _conflict(what)
        self._taken[what.id] = content
        return what


def _conflict(group: Group) -> QuarantineEntry:
    detail = (
        f"group {group.id} is there already, with the same answers but other scores, log-probs or columns; "
        "scores are corrected by late feedback"
    )
    return refused(group, Refusal(RefusalReason.CONFLICT, detail))
