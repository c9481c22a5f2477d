"""A store on a local disk. It forces what it keeps to disk, so that acknowledged files survive a power cut."""

import hashlib
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, Final

from offbeat.errors import AnotherPublisher, WeightLogError
from offbeat.storage.files import FileLock, LockHeld, fsync_paths, write_atomically
from offbeat.storage.store import Claim, StoredFile, Writer

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
