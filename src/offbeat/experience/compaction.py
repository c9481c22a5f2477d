"""Compaction: merge small fragments of a table into larger ones, without leaving a trace of each commit.

Lance's own compaction keeps, for each commit that a row came from, about 22 bytes in the manifest: the versions in
which rows were created and last updated. Every later manifest repeats them, so a log of a million commits would write
20 MB with each new one. Nothing here reads these versions: a row's position is its row id. So the fragments that this
module writes have none. Those of fragments that earlier releases compacted are dropped, without copying their rows.

Rows are copied in the order of their ids, so a fragment holds one range of ids and the manifest one pair of numbers for
it, whatever was appended while an earlier compaction ran.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import lance
import pyarrow as pa
import pyarrow.compute as pc
from lance.fragment import FragmentMetadata, RowIdSequence, write_fragments

BATCH_BYTES: Final = 64 << 20
"""Rows held in memory while they are copied, however long the completions are."""
_ONE_COMMIT: Final = 100
"""Characters of version metadata in a fragment that one commit wrote. More of them grow with the number of commits."""


@dataclass(frozen=True)
class RowRange:
    """Fragments that hold exactly the rows with ids [start, stop)."""

    start: int
    stop: int
    fragments: tuple[FragmentMetadata, ...]

    @property
    def rows(self) -> int:
        return self.stop - self.start


def row_ranges(dataset: lance.LanceDataset) -> list[RowRange]:
    """Return all fragments in the order of their row ids. Fragments whose ids interleave are one range."""
    found: list[RowRange] = []
    for start, stop, fragment in sorted(map(_with_ids, dataset.get_fragments()), key=lambda entry: entry[:2]):
        if found and start < found[-1].stop:
            last = found.pop()
            start, stop, members = last.start, max(stop, last.stop), (*last.fragments, fragment)
        else:
            members = (fragment,)
        found.append(RowRange(start, stop, members))
    return found


def _with_ids(fragment: lance.LanceFragment) -> tuple[int, int, FragmentMetadata]:
    """Return the lowest row id, the highest plus one, and the fragment's metadata."""
    try:
        ids = RowIdSequence.from_inline_metadata(fragment.metadata.row_id_meta).to_pyarrow()
    except (TypeError, ValueError, RuntimeError, NotImplementedError):  # a long list of ids is in a file of its own
        ids = fragment.to_table(columns=[], with_row_id=True)["_rowid"]
    ends = pc.min_max(ids).as_py()
    return ends["min"], ends["max"] + 1, fragment.metadata


def plan(ranges: Sequence[RowRange], target_rows: int) -> list[RowRange]:
    """Return the neighbors to merge, each time up to about `target_rows`.

    >>> small = [RowRange(start, start + 8, ()) for start in range(0, 40, 8)]
    >>> [(merged.start, merged.stop) for merged in plan([*small, RowRange(40, 90, ())], target_rows=20)]
    [(0, 24), (24, 40)]
    """
    merges: list[RowRange] = []
    current: list[RowRange] = []
    for one in [*ranges, None]:
        small = one is not None and one.rows < target_rows
        if one is not None and small:
            current.append(one)
        if current and (not small or sum(each.rows for each in current) >= target_rows):
            members = tuple(fragment for each in current for fragment in each.fragments)
            if len(current) > 1 or len(members) > 1:
                merges.append(RowRange(current[0].start, current[-1].stop, members))
            current = []
    return merges


def write_merged(dataset: lance.LanceDataset, merged: RowRange, batch_rows: int) -> list[FragmentMetadata]:
    """Copy the rows of a range into new fragments that no version has yet."""

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(merged.start, merged.stop, batch_rows):
            ids = range(start, min(start + batch_rows, merged.stop))
            rows = dataset._take_rows(list(ids))
            if rows.num_rows != len(ids):
                raise ValueError(f"{len(ids) - rows.num_rows} rows from row {start} on are missing")
            yield from rows.to_batches()

    reader = pa.RecordBatchReader.from_batches(dataset.schema, batches())
    start, fragments = merged.start, []
    for fragment in write_fragments(reader, dataset, mode="append"):
        ids = range(start, start := start + fragment.physical_rows)
        fragments.append(replace(fragment, row_id_meta=RowIdSequence(ids).to_inline_metadata()))
    return fragments


def without_versions(fragment: FragmentMetadata) -> FragmentMetadata | None:
    """Return the fragment without the versions of its rows, or None if it has none worth dropping."""
    versions = fragment.created_at_version_meta, fragment.last_updated_at_version_meta
    if all(one is None or len(one.json()) <= _ONE_COMMIT for one in versions):
        return None
    return replace(fragment, created_at_version_meta=None, last_updated_at_version_meta=None)


def batch_rows(ranges: Sequence[RowRange]) -> int:
    """Return how many rows to hold in memory while they are copied: about `BATCH_BYTES`."""
    sizes = [file.file_size_bytes or 0 for one in ranges for fragment in one.fragments for file in fragment.files]
    per_row = sum(sizes) / max(1, sum(one.rows for one in ranges))
    return int(min(8_192, max(1, BATCH_BYTES // max(1.0, per_row))))
