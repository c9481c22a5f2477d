"""Which rows belong to one group, without holding the file in memory."""

import array
import json
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from offbeat.experience.exchange.layout import Layout, Shape
from offbeat.experience.exchange.records import Broken, Record, Records, Row

BUCKETS: Final = 64
"""Parts that scattered rows are sorted into; one of them is held in memory at a time."""

Rows = tuple[str, list[Row]]
"""Where the first stands, and the rows of one group."""


def rows_by_group(records: Records, layout: Layout) -> Iterator[Rows | Broken]:
    """The rows of each group in turn. Rows that stand together are read as they come, others are sorted on disk."""
    if layout.shape is Shape.LISTS:
        for record in records.read(layout.needed):
            yield record if isinstance(record, Broken) else (record.where, [record.row])
    elif _stand_together(records, layout):
        yield from _neighbours(records.read(layout.needed), layout)
    else:
        yield from _scattered(records.read(layout.needed), layout)


def _stand_together(records: Records, layout: Layout) -> bool:
    """Whether no group is interrupted by another: 8 bytes a group to find out."""
    starts, before = array.array("q"), None
    for record in records.read(layout.needed):
        if isinstance(record, Record) and (key := layout.key(record.row)) != before:
            before = key
            starts.append(hash(key))
    return len(set(starts)) == len(starts)


def _neighbours(records: Iterable[Record | Broken], layout: Layout) -> Iterator[Rows | Broken]:
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


def _scattered(records: Iterable[Record | Broken], layout: Layout) -> Iterator[Rows | Broken]:
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
