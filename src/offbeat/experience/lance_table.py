"""One append-only table of the log, stored with Lance.

Order. Lance's stable row ids number the rows of a table 0, 1, 2, … in commit order, across writers, and keep their
numbers through compaction. (Positions do not: a compaction that runs beside an append reorders fragments.) So a row id
is the row's permanent position in the log, and "the first n rows" is a snapshot that needs no version kept alive.

Durability. Lance writes each file whole and makes a commit visible with one atomic link, so a killed process leaves
either nothing or everything. It never calls fsync (checked with strace), so on a local path this module does: data
files and their directory before the commit, the manifest and its directory after it, and only then is the append
acknowledged. A power cut can lose only what was not acknowledged; a manifest that it left incomplete is set aside at
the next open. Object stores acknowledge durable writes themselves and need none of this.

Failing storage. Lance may commit a file although a write to it failed (seen with ENOSPC at the end of a file), so the
size of each local data file is checked before the commit.

Compaction. Small fragments are merged here and not by Lance, whose own compaction keeps about 22 bytes in the manifest
for each commit that a row came from: the versions in which rows were created and last updated. Every later manifest
repeats them, so a log of a million commits would write 20 MB with each new one. Nothing here reads these versions, so
merged fragments have none, and those of fragments that earlier releases compacted are dropped. Rows are copied in the
order of their ids, so the manifest needs one pair of numbers for a fragment.
"""

import functools
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Final

import lance
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from lance.fragment import FragmentMetadata, RowIdSequence, write_fragments
from numpy.typing import NDArray

from offbeat.errors import LogReadError, LogWriteError
from offbeat.storage.files import fsync_paths, local_path, taking_turns

TAKE_ROWS: Final = 4_096
"""Up to so many rows are read by id. A scan looks at every row of the table, so it costs more the longer the log is."""
TURN: Final = "_commit.lock"
"""The file in a table's directory whose lock is held during a commit."""
COMMIT_RETRIES: Final = 64
"""Commits that may be lost to other writers before an append fails. Each loss means another writer made progress."""
MOST_VERSIONS: Final = 1_024
"""Versions that clean-up leaves, if they are older than `SHORTEST_KEEP`."""
SHORTEST_KEEP: Final = timedelta(seconds=20)
CACHE_BYTES: Final = 64 << 20
"""Bytes of Lance's metadata to keep, and as many of its indexes, for all tables of a process."""
BATCH_BYTES: Final = 64 << 20
"""Rows held in memory while compaction copies them, however long the completions are."""
_ONE_COMMIT: Final = 100
"""Characters of version metadata in a fragment that one commit wrote. More of them grow with the number of commits."""

_RewriteGroup = lance.LanceOperation.RewriteGroup
LANCE_ERRORS = (OSError, ValueError, RuntimeError)
"""What Lance raises for I/O errors, conflicts and missing files."""


def is_lance_error(error: BaseException) -> bool:
    """Return True for what Lance raises for damaged files. Its decoder panics, and a panic is no `Exception`."""
    return isinstance(error, (*LANCE_ERRORS, LogReadError)) or type(error).__name__ == "PanicException"


@functools.lru_cache(maxsize=1)
def _session(process: int) -> lance.Session:
    """Return the caches that all tables of a process share. Without one, every handle may fill a gigabyte of its own.

    A process that was forked gets new ones.
    """
    return lance.Session(index_cache_size_bytes=CACHE_BYTES, metadata_cache_size_bytes=CACHE_BYTES)


def exists(uri: str, storage_options: Mapping[str, str] | None = None) -> bool:
    """Return True if there is a table at `uri`, readable or not. Checking never creates one."""
    path = local_path(uri)
    if path is not None:  # a creation that was killed leaves directories without files
        return any((path / "_versions").glob("*.manifest")) or any((path / "data").glob("*"))
    return written_versions(uri, storage_options) > 0


def written_versions(uri: str, storage_options: Mapping[str, str] | None = None) -> int:
    """Return the newest version of a table: 1 if nothing was ever added to it, 0 if it cannot be opened."""
    options = dict(storage_options) if storage_options else None
    try:
        return int(lance.dataset(uri, storage_options=options, session=_session(os.getpid())).version)
    except LANCE_ERRORS:
        return 0


def is_torn(manifest: Path) -> bool:
    """Return True if a manifest does not end as Lance ends every one."""
    return manifest.read_bytes()[-4:] != b"LANC"


def set_aside_torn_manifests(table: Path) -> list[Path]:
    """Rename the newest manifests if a power cut left them incomplete, so that the last complete one is used.

    A running process never sees an incomplete manifest, because Lance links it into place when it is complete. Nothing
    in an incomplete one was acknowledged, because an acknowledged manifest is on disk.
    """
    torn: list[Path] = []
    for manifest in sorted((table / "_versions").glob("*.manifest")):  # newest first: names count down
        if not is_torn(manifest):
            break
        torn.append(manifest.rename(manifest.with_suffix(".torn")))
    return torn


class Table:
    """A table to which any number of processes add rows. Safe to use from many threads.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     table = Table(f"{place}/names.lance", pa.schema([("name", pa.string())]))
    ...     table.append(pa.table({"name": ["a", "b"]}))
    ...     table.rows(), table.take(np.array([1])).to_pylist()
    (2, [{'name': 'b'}])
    """

    def __init__(
        self, uri: str, schema: pa.Schema, storage_options: Mapping[str, str] | None = None, *, create: bool = True
    ) -> None:
        self.uri = uri
        self._options = dict(storage_options) if storage_options else None
        self._path = local_path(uri)
        self._refreshing = threading.Lock()
        self._committing = threading.Lock()  # the threads of a process take turns, so that none of them starves
        if self._path is not None:
            set_aside_torn_manifests(self._path)
        self._schema = schema
        self._dataset = self._open_or_create(schema, create)
        if create:
            self._add_missing_columns(schema)
        present = self._dataset.schema
        if not present.equals(schema) and (create or not _is_earlier(present, schema)):
            raise LogReadError(
                f"{uri} does not have the columns that this version of offbeat writes; read it with the version that"
                f" wrote it, or export it with that version and import it again"
            )

    def _add_missing_columns(self, schema: pa.Schema) -> None:
        """Add the nullable columns at the end that an earlier version of offbeat did not write; they hold null."""
        present = self._dataset.schema
        if not _is_earlier(present, schema):
            return
        added = list(schema)[len(present) :]
        try:
            self._dataset.add_columns(pa.schema(added))
        except LANCE_ERRORS as error:
            self._dataset = self._open()  # another process may have added them at the same time
            if len(self._dataset.schema) == len(present):
                names = [field.name for field in added]
                raise LogWriteError(f"cannot add the columns {names} to {self.uri}: {error}") from error

    def _open_or_create(self, schema: pa.Schema, create: bool) -> lance.LanceDataset:
        try:
            return self._open()
        except LANCE_ERRORS as error:
            if "not found" not in str(error).lower():
                raise LogReadError(f"cannot open {self.uri}: {error}") from error
            if exists(self.uri, self._options):  # a new table would hide what is left of this one
                return self._open_existing()
            if not create:
                raise LogReadError(f"there is no experience log here: {self.uri} is missing") from error
        return self._create(schema)

    def _create(self, schema: pa.Schema) -> lance.LanceDataset:
        """Create the table, or open it if another process has created it since we looked.

        `lance.write_dataset` looks and commits in two steps: what another process created and filled between them is
        overwritten. A commit on top of version 0 without retries succeeds only if there is no version at all.
        """
        refusal: Exception | None = None
        try:
            lance.LanceDataset.commit(
                self.uri,
                lance.LanceOperation.Overwrite(schema, []),
                storage_options=self._options,
                enable_v2_manifest_paths=True,
                enable_stable_row_ids=True,
                read_version=0,
                max_retries=0,
            )
        except LANCE_ERRORS as error:
            refusal = error
        try:
            created = self._open()
        except LANCE_ERRORS as error:
            raise LogWriteError(f"cannot create {self.uri}: {refusal or error}") from error
        if self._path is not None:
            self._force_manifest(1)
            fsync_paths(self._path, self._path.parent)
        return created

    def _open_existing(self) -> lance.LanceDataset:
        """Open a table that was not found and is there: another process has just created it, or it is damaged."""
        try:
            return self._open()
        except LANCE_ERRORS as error:
            raise LogReadError(
                f"{self.uri} is damaged: none of its versions can be read. Restore its directory `_versions` from a "
                "copy, or start a new run"
            ) from error

    def _open(self) -> lance.LanceDataset:
        dataset = lance.dataset(self.uri, storage_options=self._options, session=_session(os.getpid()))
        try:
            _ = dataset.schema
        except BaseException as error:  # Lance panics if a type in a manifest is damaged
            if not is_lance_error(error):
                raise
            raise LogReadError(f"cannot open {self.uri}: {' '.join(str(error).split())[:200]}") from None
        return dataset

    def append(self, rows: pa.Table) -> None:
        """Add all rows or none. When this returns, they are committed and on disk."""
        base = self.refresh()
        try:
            fragments = write_fragments(rows, base, mode="append", storage_options=self._options)
            committed = self._commit(base, lance.LanceOperation.Append(fragments), fragments)
        except LANCE_ERRORS as error:
            raise LogWriteError(
                f"{rows.num_rows} rows were not added to {self.uri}: {error}. Everything acknowledged before is safe; "
                f"check that the path is writable and has free space, then append again: repeating a group is harmless"
            ) from error
        self._adopt(committed)

    def _commit(
        self, base: lance.LanceDataset, operation: lance.LanceOperation.BaseOperation, written: list[FragmentMetadata]
    ) -> lance.LanceDataset:
        self._force_data((file.path, file.file_size_bytes) for fragment in written for file in fragment.files)
        # Lance repeats a commit that another one has overtaken. Beside a fast writer a compaction, whose commits take
        # longer, would be overtaken for ever.
        turn = taking_turns(self._path / TURN) if self._path else nullcontext()
        with self._committing, turn:
            committed = lance.LanceDataset.commit(
                base,
                operation,
                read_version=base.version,
                storage_options=self._options,
                max_retries=COMMIT_RETRIES,
            )
        self._force_manifest(committed.version)
        return committed

    def _force_data(self, files: Iterable[tuple[str, int | None]]) -> None:
        """Check that the files of a commit are complete, and force them to disk."""
        if self._path is None:
            return
        directory = self._path / "data"
        for name, size in files:
            found = (directory / name).stat().st_size
            if found != size:
                raise OSError(f"{directory / name} has {found} bytes instead of {size}: the storage lost a write")
            fsync_paths(directory / name)
        fsync_paths(directory)

    def _force_manifest(self, version: int) -> None:
        if (manifest := self._manifest(version)) is not None:
            fsync_paths(manifest, manifest.parent)

    def _manifest(self, version: int) -> Path | None:
        """Return the path of a version's manifest. Lance names manifests so that the newest sorts first."""
        return self._path and self._path / "_versions" / f"{2**64 - 1 - version:020}.manifest"

    def _adopt(self, dataset: lance.LanceDataset) -> lance.LanceDataset:
        with self._refreshing:
            if dataset.version > self._dataset.version:
                self._dataset = dataset
            return self._dataset

    def refresh(self) -> lance.LanceDataset:
        """Return a handle to the newest commit. Handles never change in place, so a thread that reads keeps its own."""
        dataset = self._dataset
        try:
            newest = dataset.latest_version
            return dataset if newest == dataset.version else self._adopt(dataset.checkout_version(newest))
        except LANCE_ERRORS as error:
            raise LogReadError(f"cannot read {self.uri}: {error}") from error

    def rows(self) -> int:
        """Return the current number of rows. Their ids are 0 … rows − 1."""
        return int(self.refresh().count_rows())

    def take(self, rows: NDArray[np.int64], columns: list[str] | None = None) -> pa.Table:
        """Return the rows with these ids, in this order."""
        return self._read(lambda dataset: self._take(dataset, rows, columns or self._schema.names))

    def _take(self, dataset: lance.LanceDataset, rows: NDArray[np.int64], columns: list[str]) -> pa.Table:
        return self._with_missing(_take(dataset, rows, self._present(dataset, columns)), columns)

    def _present(self, dataset: lance.LanceDataset, columns: list[str]) -> list[str]:
        return [name for name in columns if name in dataset.schema.names]

    def _with_missing(self, found: pa.Table, columns: list[str]) -> pa.Table:
        """Add columns that an earlier version of offbeat did not write: reading changes no table."""
        for place, name in enumerate(columns):
            if name not in found.column_names:
                field = self._schema.field(name)
                found = found.add_column(place, field, pa.nulls(found.num_rows, field.type))
        return found

    def scan(self, start: int, stop: int, columns: list[str], where: str | None = None) -> pa.Table:
        """Return rows [start, stop) that match the SQL condition, in commit order, with their ids as `_rowid`."""
        condition = f"_rowid >= {start} AND _rowid < {stop}" + (f" AND ({where})" if where else "")
        if start >= stop:
            condition = "false"

        def scan(dataset: lance.LanceDataset) -> pa.Table:
            if dataset.count_rows() < stop:
                raise ValueError(
                    f"{stop} rows were requested, but there are {dataset.count_rows()}: is it another log's snapshot?"
                )
            if where is None and 0 < stop - start <= TAKE_ROWS:
                rows = np.arange(start, stop)
                return self._take(dataset, rows, columns).append_column("_rowid", pa.array(rows, pa.uint64()))
            names = [*self._present(dataset, columns), "_rowid"]
            return self._with_missing(dataset.to_table(columns=names, filter=condition), columns).sort_by("_rowid")

        return self._read(scan)

    def _read(self, read: Callable[[lance.LanceDataset], pa.Table]) -> pa.Table:
        try:
            return read(self._dataset)
        except BaseException as error:  # the handle is outdated: too few rows, or files that clean-up has removed
            if not is_lance_error(error):
                raise
        try:
            return read(self.refresh())
        except BaseException as error:
            if not is_lance_error(error):
                raise
            raise LogReadError(f"cannot read {self.uri}: {error}. `offbeat fsck` says what is damaged") from error

    def compact(self, target_rows: int) -> int:
        """Merge adjacent fragments into ones of about `target_rows`. Return by how many fragments the table shrank.

        Runs beside appends and reads: an append only delays it, and only appends through this object wait for its
        commit. If another process compacts at the same time, one of the two fails.
        """
        # A separate handle: the commit changes it in place, and Lance panics if another thread reads through it.
        dataset = self._open()
        ranges = row_ranges(dataset)
        rows_at_once = batch_rows(ranges)
        merges = plan(ranges, target_rows)
        written = [write_merged(dataset, merged, rows_at_once) for merged in merges]
        groups = [_RewriteGroup(one.fragments, new) for one, new in zip(merges, written, strict=True)]
        merged_ids = {fragment.id for one in merges for fragment in one.fragments}
        others = [fragment for one in ranges for fragment in one.fragments if fragment.id not in merged_ids]
        groups += [_RewriteGroup([one], [shorter]) for one in others if (shorter := without_versions(one))]
        if not groups:
            return 0
        self._commit(dataset, lance.LanceOperation.Rewrite(groups, []), [one for new in written for one in new])
        return sum(len(list(group.old_fragments)) - len(list(group.new_fragments)) for group in groups)

    def fragment_sizes(self) -> list[int]:
        """Return the number of rows in each fragment."""
        return [fragment.metadata.num_rows for fragment in self.refresh().get_fragments()]

    def clean(self, older_than: timedelta) -> None:
        """Remove manifests and data files that no version younger than `older_than` needs.

        If there are more than `MOST_VERSIONS`, younger ones go too: each is a manifest that every clean-up reads.
        """
        if self._path is not None:
            manifests = sorted((self._path / "_versions").glob("*.manifest"))  # newest first: names count down
            if len(manifests) > MOST_VERSIONS:
                age = timedelta(seconds=time.time() - manifests[MOST_VERSIONS].stat().st_mtime)
                older_than = min(older_than, max(age, SHORTEST_KEEP))
        newest = self.refresh()
        self._force_manifest(newest.version)  # another process may have committed it and not forced it to disk yet
        newest.cleanup_old_versions(older_than=older_than)


def _is_earlier(present: pa.Schema, schema: pa.Schema) -> bool:
    """Return True if a schema lacks only nullable columns at the end, as one of an earlier version of offbeat does."""
    earlier, added = pa.schema(list(schema)[: len(present)]), list(schema)[len(present) :]
    return bool(added) and present.equals(earlier) and all(field.nullable for field in added)


def _take(dataset: lance.LanceDataset, rows: NDArray[np.int64], columns: list[str] | None) -> pa.Table:
    found = dataset._take_rows(rows.tolist(), columns=columns)
    if found.num_rows != len(rows):
        raise ValueError(f"{len(rows) - found.num_rows} of {len(rows)} rows are missing")
    return found


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


def unreadable_versions(table: Path) -> list[Path]:
    """Return the manifests of the newest versions that cannot be read at all, the newest first."""
    unreadable = []
    for manifest in sorted((table / "_versions").glob("*.manifest")):  # newest first: names count down
        if not is_torn(manifest) and count_rows(table, manifest) is not None:
            break
        unreadable.append(manifest)
    return unreadable


def count_rows(table: Path, manifest: Path | None = None) -> int | None:
    """Return the number of rows in a version, or in the newest readable one; None if there is none."""
    for one in [manifest] if manifest else sorted((table / "_versions").glob("*.manifest")):
        version = 2**64 - 1 - int(one.stem)
        try:
            return int(lance.dataset(str(table), version=version, session=lance.Session()).count_rows())
        except BaseException as error:
            if not is_lance_error(error):
                raise
    return None
