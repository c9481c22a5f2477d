"""The protocol of a store, a folder of files that are written once and small ones that are replaced; a local store.

`LocalStore` forces what it keeps to disk, so that acknowledged files survive a power cut.
"""

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol

from offbeat.errors import AnotherPublisher, WeightLogError
from offbeat.storage.files import FileLock, LockHeld, fsync_paths, write_atomically


@dataclass(frozen=True)
class StoredFile:
    """One entry of a folder listing."""

    name: str
    """Relative to the folder."""
    modified: float
    """Unix seconds."""


class Writer(Protocol):
    """A file being written. Readers ignore it until a manifest names it."""

    def write(self, data: bytes | memoryview) -> None:
        """Append `data`."""

    def finished(self) -> tuple[int, str]:
        """Make the file durable and return its size and sha256."""


class Claim(Protocol):
    """The right to publish."""

    def check(self) -> None:
        """Raise `AnotherPublisher` if another process has taken over."""

    def release(self) -> None:
        """Let another process publish."""


class Store(Protocol):
    """The storage of a weight log. Names are relative and use `/`. A missing file raises `FileNotFoundError`."""

    uri: str

    def list_names(self, folder: str) -> list[str]:
        """Return the file names in a folder; none if the folder does not exist."""

    def list_files(self, folder: str) -> list[StoredFile]:
        """Return the files in a folder with their modification times."""

    def read(self, name: str) -> bytes:
        """Return the content of a file."""

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading."""

    def create(self, name: str) -> AbstractContextManager[Writer]:
        """Create a file, and remove it if the block raises."""

    def put(self, name: str, content: bytes, *, durable: bool = True) -> None:
        """Write or replace a small file in one step: readers see all of it or nothing."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files durably; files that are already gone are not an error."""

    def claim(self) -> Claim:
        """Become the publisher, or raise `AnotherPublisher`."""


FOLDERS: Final = ("versions", "data", "readers", "pins")
_LOCK: Final = "publisher.lock"
_LARGE: Final = 1 << 20
"""Bytes from which hashing in a second thread pays off."""


class LocalStore:
    """A folder on a file system that has atomic renames and locks."""

    def __init__(self, root: Path) -> None:
        self.uri = str(root)
        self._root = root

    def list_names(self, folder: str) -> list[str]:
        try:
            return [name for name in os.listdir(self._root / folder) if not name.startswith(".")]
        except FileNotFoundError:
            return []

    def list_files(self, folder: str) -> list[StoredFile]:
        files = []
        for name in self.list_names(folder):
            with suppress(FileNotFoundError):  # removed since it was listed
                files.append(StoredFile(name, (self._root / folder / name).stat().st_mtime))
        return files

    def read(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def open(self, name: str) -> BinaryIO:
        return (self._root / name).open("rb", buffering=0)

    @contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        writer = _LocalWriter(path)
        try:
            yield writer
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        finally:
            writer.close()

    def put(self, name: str, content: bytes, *, durable: bool = True) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content, durable=durable)

    def remove(self, names: Iterable[str]) -> None:
        folders = set()
        for name in names:
            path = self._root / name
            with suppress(FileNotFoundError):
                path.rmdir() if path.is_dir() else path.unlink()  # an empty directory may have replaced a file
                folders.add(path.parent)
        fsync_paths(*folders)

    def claim(self) -> Claim:
        try:
            for folder in FOLDERS:
                (self._root / folder).mkdir(parents=True, exist_ok=True)
            claim = _LocalClaim(self._root / _LOCK)
        except OSError as error:
            raise WeightLogError(
                f"{self._root} cannot be used as a weight log: {error}. Move it away, or make it writable"
            ) from error
        for part in (self._root / "versions").glob(".*"):  # a killed publisher had not renamed them yet
            part.unlink(missing_ok=True)
        fsync_paths(self._root, self._root.absolute().parent)
        return claim


class _LocalWriter:
    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._sha256 = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        if len(data) < _LARGE:
            self._sha256.update(data)
            self._write_all(data)
        else:  # hash while the kernel copies
            hashing = threading.Thread(target=self._sha256.update, args=(data,))
            hashing.start()
            self._write_all(data)
            hashing.join()
        self._bytes += len(data)

    def _write_all(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def finished(self) -> tuple[int, str]:
        os.fsync(self._file)
        fsync_paths(Path(self._file.name).parent)
        return self._bytes, self._sha256.hexdigest()

    def close(self) -> None:
        self._file.close()


class _LocalClaim:
    """A `per_process` lock: children that a killed publisher leaves behind must not block the next publisher."""

    def __init__(self, path: Path) -> None:
        try:
            self._lock = FileLock(path, per_process=True)
        except LockHeld as held:
            way_out = "close that log first" if held.by_this_process else "stop it first, or publish to another place"
            raise AnotherPublisher(f"{path.parent} is being published to by {held.owner}; {way_out}") from None

    def check(self) -> None:
        """Do nothing: the kernel keeps the lock as long as the process lives."""

    def release(self) -> None:
        self._lock.release()
