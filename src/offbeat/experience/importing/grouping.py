"""Collect the rows of each group, wherever they are in a file, and leave out rows that are there twice."""

import array
import json
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from offbeat.experience.importing.layout import ColumnLayout, RowShape
from offbeat.experience.importing.records import BrokenRecord, Records, Row, SourceRecord, read_id
from offbeat.experience.quarantine import RefusalReason, RefusedError

BUCKETS: Final = 64
"""Files that scattered rows are sorted into. One of them is held in memory at a time."""

GroupRows = list[SourceRecord]
"""The rows of one group."""


def rows_by_group(records: Records, layout: ColumnLayout) -> Iterator[GroupRows | BrokenRecord]:
    """Yield the rows of each group. Contiguous groups are read in order; scattered rows are sorted on disk first."""
    if layout.shape is RowShape.LISTS:
        for record in records.read(layout.needed):
            yield record if isinstance(record, BrokenRecord) else [record]
    elif _is_contiguous(records, layout):
        yield from _contiguous(records.read(layout.needed), layout)
    else:
        yield from _scattered(records.read(layout.needed), layout)


def _is_contiguous(records: Records, layout: ColumnLayout) -> bool:
    """Return True if no group is interrupted by another. Takes 8 bytes of memory for each group."""
    starts, before = array.array("q"), None
    for record in records.read(layout.needed):
        if isinstance(record, SourceRecord) and (key := layout.key(record.row)) != before:
            before = key
            starts.append(hash(key))
    return len(set(starts)) == len(starts)


def _contiguous(
    records: Iterable[SourceRecord | BrokenRecord], layout: ColumnLayout
) -> Iterator[GroupRows | BrokenRecord]:
    key, group = "", list[SourceRecord]()
    for record in records:
        if isinstance(record, BrokenRecord):
            yield record
            continue
        if (next_key := layout.key(record.row)) != key:
            if group:
                yield group
            key, group = next_key, []
        group.append(record)
    if group:
        yield group


def _scattered(
    records: Iterable[SourceRecord | BrokenRecord], layout: ColumnLayout
) -> Iterator[GroupRows | BrokenRecord]:
    """Sort rows into files by their key, and yield the groups of one file at a time."""
    with tempfile.TemporaryDirectory(prefix="offbeat-import-") as place:
        paths = [Path(place, f"{number}.jsonl") for number in range(BUCKETS)]
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("w", encoding="utf-8")) for path in paths]
            for record in records:
                if isinstance(record, BrokenRecord):
                    yield record
                    continue
                key = layout.key(record.row)
                needed = {name: record.row.get(name) for name in layout.needed}
                line = json.dumps([key, record.where, needed], default=str)
                files[zlib.crc32(key.encode()) % BUCKETS].write(line + "\n")
        for path in paths:
            groups: dict[str, GroupRows] = {}
            with path.open(encoding="utf-8") as lines:
                for key, where, row in map(json.loads, lines):
                    groups.setdefault(key, []).append(SourceRecord(where, row))
            yield from groups.values()


def without_repeats(records: GroupRows, layout: ColumnLayout) -> list[Row]:
    """Return the rows of a group without those that repeat an earlier one. Only own ids show that a row is a repeat.

    An id with two different rows is refused: nothing says which of them is right.
    """
    column = layout.columns.get("completion_id")
    if column is None or layout.shape is RowShape.LISTS:
        return [record.row for record in records]
    first: dict[str, SourceRecord] = {}
    for record in records:
        name = read_id(record.row.get(column), "completion id")
        earlier = first.setdefault(name, record)
        if any(earlier.row.get(cell) != record.row.get(cell) for cell in layout.needed):
            detail = (
                f"completion {name!r:.80} is there twice and differs: {earlier.where}; {record.where}. Remove one, or "
                f"say what the column is, for example with prompt_id={column}"
            )
            raise RefusedError(RefusalReason.ID, detail)
    return [record.row for record in first.values()]
