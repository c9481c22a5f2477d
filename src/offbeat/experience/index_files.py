"""The index of a log in files of a run directory, so that a run that resumes need not read a long log again.

A file holds the index at one snapshot. It is written beside a checkpoint once the log has grown by a tenth; a resume
loads the newest file that is not newer than its checkpoint, and reads only the rest from the log. A file that is
missing, damaged or of another log costs time, and nothing else.
"""

import io
import logging
import zipfile
from dataclasses import astuple, fields
from pathlib import Path
from typing import Final

import numpy as np
import xxhash

from offbeat.errors import LogReadError
from offbeat.experience.index import Columns
from offbeat.experience.lance_table import TAKE_ROWS
from offbeat.experience.reader import LogReader
from offbeat.experience.schema import Snapshot
from offbeat.storage.files import write_atomically

SUFFIX: Final = ".index"
"""The suffix of an index file, which has eight bytes with the xxh3 hash of the rest, then what numpy wrote."""
KEPT: Final = 2
"""Files. The checkpoint beside the newest one may not be complete yet."""
DAMAGE: Final = (OSError, EOFError, ValueError, KeyError, TypeError, zipfile.BadZipFile, LogReadError)

_log = logging.getLogger(__name__)


class IndexFiles:
    """The index files of one run.

    >>> import tempfile
    >>> from offbeat.experience.log import ExperienceLog
    >>> with tempfile.TemporaryDirectory() as place, ExperienceLog.open(f"{place}/log") as log:
    ...     rows, cursor = log.index_since(None)
    ...     IndexFiles(Path(place) / "index", log).save_if_grown(rows, cursor)     # a short log is read again as fast
    False
    """

    def __init__(self, place: Path, reader: LogReader) -> None:
        self._place, self._reader = place, reader
        self._saved = max((_groups_of(path) for path in self._files()), default=0)

    def save_if_grown(self, columns: Columns, cursor: Snapshot) -> bool:
        """Write the index at `cursor` if the log has grown enough since the last file."""
        if cursor.groups - self._saved < max(TAKE_ROWS, self._saved // 10):
            return False
        arrays = {f"column.{one.name}": getattr(columns, one.name) for one in fields(Columns)}
        arrays |= {f"catalog.{name}": array for name, array in self._reader.catalog.state().items()}
        content = io.BytesIO()
        np.savez(content, cursor=np.array(astuple(cursor), np.int64), **arrays)
        self._place.mkdir(exist_ok=True)
        signed = xxhash.xxh3_64_digest(content.getbuffer()) + content.getvalue()
        write_atomically(self._place / f"{cursor.groups:012}{SUFFIX}", signed, durable=False)
        self._saved = cursor.groups
        for old in self._files()[KEPT:]:
            old.unlink(missing_ok=True)
        return True

    def load(self, until: Snapshot) -> list[Columns]:
        """Return what to feed a sampler for the snapshot `until`: the newest file, and what the log holds beyond it."""
        for path in self._files():
            if _groups_of(path) > until.groups:
                continue
            try:
                columns, cursor = self._read(path, until)
            except DAMAGE as error:
                _log.warning("the index file %s cannot be used (%s); the log is read instead", path, error)
                continue
            return [columns, self._reader.index_since(cursor, until)[0]]
        return [self._reader.index_since(None, until)[0]]

    def _read(self, path: Path, until: Snapshot) -> tuple[Columns, Snapshot]:
        content = _content(path)
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            arrays = dict(file)
        cursor = Snapshot(*arrays["cursor"].tolist())
        if any(then > now for then, now in zip(astuple(cursor), astuple(until), strict=True)):
            raise ValueError("it is newer than the checkpoint")
        columns = Columns(**{one.name: arrays[f"column.{one.name}"] for one in fields(Columns)})
        catalog = {name.removeprefix("catalog."): array for name, array in arrays.items()}
        self._reader.catalog.load(catalog)
        return columns, cursor

    def _files(self) -> list[Path]:
        """The files, the newest first."""
        return sorted(self._place.glob(f"[0-9]*{SUFFIX}"), reverse=True)


def damaged_files(place: Path) -> list[Path]:
    """Return the index files in a directory that do not match their hash."""
    damaged = []
    for path in sorted(place.glob(f"*{SUFFIX}")):
        try:
            _content(path)
        except (OSError, ValueError):
            damaged.append(path)
    return damaged


def _content(path: Path) -> memoryview:
    signed = memoryview(path.read_bytes())
    if xxhash.xxh3_64_digest(signed[8:]) != signed[:8]:
        raise ValueError("it is damaged")
    return signed[8:]


def _groups_of(path: Path) -> int:
    return int(path.stem)
