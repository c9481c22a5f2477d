"""Import rollouts of other tools into a log: read a few rows at a time, convert to groups, validate, append.

    records = find_records("rollouts.jsonl")
    layout = layout_of(records)                      # print it to see which column has which role
    groups = read_groups(records, layout, ImportDefaults(task="math", source="model:qwen"))
    tally = import_into(log, groups, rules=ValidationRules())

Importing the same rows again adds nothing: a group's id is a hash of its content, and what the log or its quarantine
already contains is skipped. Rows that cannot be imported go to quarantine with a reason and never stop the rest.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final

from offbeat.errors import CannotImport
from offbeat.experience.importing.layout import ColumnLayout, RowShape, detect
from offbeat.experience.importing.records import BrokenRecord, Records, SourceRecord, UnreadableCell
from offbeat.experience.importing.shapes import (
    GroupRows,
    ImportDefaults,
    content_hash,
    group_from,
    rows_by_group,
    without_repeats,
)
from offbeat.experience.log import ExperienceLog
from offbeat.experience.schema import digest
from offbeat.experience.validation import (
    OnRefusal,
    QuarantineEntry,
    Refusal,
    RefusalReason,
    RefusalTally,
    RefusedError,
    ValidationRules,
    refused,
    validate_group,
)
from offbeat.types import UNKNOWN, Group, Score

DETECTION_ROWS: Final = 32
"""Rows from which the layout is detected."""
GROUPS_AT_ONCE: Final = 256
TOKENS_AT_ONCE: Final = 4_000_000
"""A batch ends at either limit."""


@dataclass(frozen=True, eq=False)
class ImportedGroup:
    """A group, or what was refused instead, and its position in the source."""

    where: str
    what: Group | QuarantineEntry
    repeated: int = 0
    """Rows that say again what an earlier row of the group says."""


@dataclass
class ImportTally(RefusalTally):
    """The result of an import in numbers.

    >>> print(ImportTally(taken=2, completions=16, tokens=512, awaited=4, present=1))
    imported     2 groups, 16 completions, 512 tokens
      of which   0 with log-probs, 4 awaiting feedback; mean reward none
    skipped      1 groups that are already in the log
    quarantined  0
    """

    taken: int = 0
    completions: int = 0
    tokens: int = 0
    known: int = 0
    """Completions with log-probs."""
    awaited: int = 0
    """Completions without feedback."""
    rewards: tuple[int, float] = (0, 0.0)
    """The number of rewards and their sum."""
    present: int = 0
    """Groups that are already in the log, or that occur in the file a second time."""
    repeated: int = 0
    """Rows that say again what an earlier row of their group says."""

    def take(self, group: Group) -> None:
        """Count an imported group."""
        rewards = [float(c.score.reward) for c in group.completions if isinstance(c.score, Score)]
        self.taken += 1
        self.completions += len(group.completions)
        self.tokens += _count_tokens(group)
        self.known += sum(c.behavior_logprobs is not UNKNOWN for c in group.completions)
        self.awaited += sum(c.score is None for c in group.completions)
        self.rewards = self.rewards[0] + len(rewards), self.rewards[1] + sum(rewards)

    def __str__(self) -> str:
        scored, total = self.rewards
        mean = f"{total / scored:.4g}" if scored else "none"
        lines = [
            f"imported     {self.taken} groups, {self.completions} completions, {self.tokens} tokens",
            f"  of which   {self.known} with log-probs, {self.awaited} awaiting feedback; mean reward {mean}",
            f"skipped      {self.present} groups that are already in the log",
            *([f"  and        {self.repeated} rows that repeat a row of their group"] if self.repeated else []),
            f"quarantined  {sum(self.refused.values())}",
            *self.refusals(),
        ]
        return "\n".join(lines)


def layout_of(records: Records, given: Mapping[str, str] | None = None, kept: Sequence[str] = ()) -> ColumnLayout:
    """Detect the layout of records from their first rows; see `detect`."""
    rows = [record.row for record in islice(records.read(None), DETECTION_ROWS) if isinstance(record, SourceRecord)]
    if not rows:
        raise CannotImport(f"{records.name} has no rows that can be read")
    return detect(rows, given, kept)


def read_groups(records: Records, layout: ColumnLayout, defaults: ImportDefaults) -> Iterator[ImportedGroup]:
    """Yield every group of the records, and a quarantine entry for rows that cannot be converted."""
    if layout.has_text and defaults.encoder is None:
        kinds = ", ".join(f"{role} is {kind}" for role, kind in layout.kinds.items())
        raise CannotImport(f"{kinds}: text needs the policy's tokenizer; set one, or import token ids")
    for name in ("task", "source"):
        if layout.shape is not RowShape.EXPORT and name not in layout.columns and getattr(defaults, name) is None:
            raise CannotImport(f"the rows have no {name}: set a {name}, or its column with {name}=…")
    for item in rows_by_group(records, layout):
        if isinstance(item, BrokenRecord):
            yield ImportedGroup(item.where, _unreadable(item.problem, item.found))
            continue
        yield _convert(item, layout, defaults)


def _convert(records: GroupRows, layout: ColumnLayout, defaults: ImportDefaults) -> ImportedGroup:
    where, rows = records[0].where, [record.row for record in records]
    try:
        once = without_repeats(records, layout)
        return ImportedGroup(where, group_from(once, layout, defaults), len(rows) - len(once))
    except UnreadableCell as error:
        return ImportedGroup(where, _unreadable(str(error), rows))
    except RefusedError as error:
        return ImportedGroup(where, _refusal(error.refusal, rows))


def _unreadable(problem: str, found: object) -> QuarantineEntry:
    return _refusal(Refusal(RefusalReason.UNREADABLE, problem), found)


def _refusal(refusal: Refusal, found: object) -> QuarantineEntry:
    entry = refused(found, refusal)
    return replace(entry, group_id=f"import-{content_hash(entry.payload)}")


def import_into(
    log: ExperienceLog | None,
    found: Iterable[ImportedGroup],
    *,
    rules: ValidationRules,
    dry_run: bool = False,
    on_batch: Callable[[ImportTally], None] = lambda _: None,
    on_refusal: OnRefusal = lambda _, __: None,
) -> ImportTally:
    """Append the valid groups and quarantine the rest. With `dry_run`, only count what would happen.

    Args:
        log: Open with the same rules; None for a dry run if there is no log yet.
        found: The output of `read_groups`.
        on_batch: Called with the tally after each batch.
        on_refusal: Called with the position and the reason of everything refused.
    """
    tally, importer = ImportTally(on_refusal=on_refusal), _BatchImporter(log, rules, dry_run)
    for batch in _batches(found):
        importer.add(batch, tally)
        on_batch(tally)
    return tally


def _batches(found: Iterable[ImportedGroup]) -> Iterator[list[ImportedGroup]]:
    batch: list[ImportedGroup] = []
    tokens = 0
    for item in found:
        batch.append(item)
        tokens += _count_tokens(item.what) if isinstance(item.what, Group) else len(item.what.payload)
        if len(batch) >= GROUPS_AT_ONCE or tokens >= TOKENS_AT_ONCE:
            yield batch
            batch, tokens = [], 0
    if batch:
        yield batch


def _count_tokens(group: Group) -> int:
    return len(group.prompt.token_ids) + sum(len(c.token_ids) for c in group.completions)


class _BatchImporter:
    """Decides for each batch what to append, skip or refuse, and writes it unless the run is dry."""

    def __init__(self, log: ExperienceLog | None, rules: ValidationRules, dry_run: bool) -> None:
        self._log = log
        self._writable_log = None if dry_run else log
        self._rules = rules
        self._digests: dict[str, str] = {}
        self._quarantined: set[tuple[str, str]] = set()
        if log is not None:
            rows = log.tables.quarantine.scan(0, log.snapshot().quarantine, ["group_id", "reason"])
            self._quarantined = set(zip(rows["group_id"].to_pylist(), rows["reason"].to_pylist(), strict=True))

    def add(self, batch: Sequence[ImportedGroup], tally: ImportTally) -> None:
        stored = self._stored([item.what.id for item in batch if isinstance(item.what, Group)])
        accepted: dict[str, str] = {}
        groups: list[Group] = []
        refusals: list[QuarantineEntry] = []
        for item in batch:
            result = self._validate(item.what, stored)
            tally.repeated += item.repeated
            if result is None:
                tally.present += 1
            elif isinstance(result, Group):
                accepted[result.id] = item.where
                groups.append(result)
            else:
                tally.refuse(item.where, result.refusal)
                if (key := (result.group_id, str(result.refusal.reason))) not in self._quarantined:
                    self._quarantined.add(key)
                    refusals.append(result)
        for entry in self._write(groups, refusals):
            tally.refuse(accepted.pop(entry.group_id), entry.refusal)
        for group in groups:
            if group.id in accepted:
                tally.take(group)

    def _write(self, groups: Sequence[Group], refusals: Sequence[QuarantineEntry]) -> tuple[QuarantineEntry, ...]:
        """Return what the log itself refuses: nothing, unless it has other rules."""
        if self._writable_log is None:
            return ()
        refused_by_log = self._writable_log.append(groups).refused
        self._writable_log.quarantine(refusals)
        self._digests.clear()  # the log has these groups now; only a dry run has to remember them
        return refused_by_log

    def _stored(self, ids: Sequence[str]) -> dict[str, tuple[str, str]]:
        """Return the digests of these groups in the log: as appended, and with late scores filled in."""
        if self._log is None or not ids:
            return {}
        now = self._log.snapshot()
        known = [name for name, at in zip(ids, self._log.find(ids, now), strict=True) if at >= 0]
        versions = (self._log.read(known, replace(now, scores=0)), self._log.read(known, now))
        return {first.id: (digest(first), digest(last)) for first, last in zip(*versions, strict=True)}

    def _validate(
        self, what: Group | QuarantineEntry, stored: Mapping[str, tuple[str, str]]
    ) -> Group | QuarantineEntry | None:
        """Return the group to append, a refusal, or None for a group that is already there."""
        if isinstance(what, QuarantineEntry):
            return what
        if refusal := validate_group(what, self._rules):
            return refused(what, refusal)
        content = digest(what)
        if what.id in stored:
            return None if content in stored[what.id] else _conflict(what)
        if what.id in self._digests:
            return None if content == self._digests[what.id] else _conflict(what)
        self._digests[what.id] = content
        return what


def _conflict(group: Group) -> QuarantineEntry:
    detail = (
        f"group {group.id} is already in the log with other content; add or correct scores with late feedback "
        "(`offbeat feedback`), and give other answers another group id"
    )
    return refused(group, Refusal(RefusalReason.CONFLICT, detail))
