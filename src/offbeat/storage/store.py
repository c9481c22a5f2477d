"""Where a weight log lies: a folder of files that are written once, and small ones that are replaced whole.

`LocalStore` forces to disk what it is asked to keep, so that it survives a power cut; `object_store.py` does the same
for S3 and the like, which acknowledge durable writes themselves.
"""

import fcntl
import hashlib
import os
import secrets
import socket
import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final, Protocol
from urllib.parse import unquote, urlsplit

from offbeat.errors import AnotherPublisher

FOLDERS: Final = ("versions", "data", "readers", "pins")
_LOCK: Final = "publisher.lock"
_LARGE: Final = 1 << 20
"""Bytes from which a second thread pays."""


@dataclass(frozen=True)
class StoredFile:
    """A file of a listing."""

    name: str
    """Within its folder."""
    modified: float
    """Unix seconds."""


class Writer(Protocol):
    """A file being written; it counts only when a manifest names it."""

    def write(self, data: bytes | memoryview) -> None:
        """Append."""

    def finished(self) -> tuple[int, str]:
        """Make it durable; returns its size and sha256."""


class Claim(Protocol):
    """The right to publish."""

    def check(self) -> None:
        """Raises `AnotherPublisher` where it was lost."""

    def release(self) -> None:
        """Give it up."""


class Store(Protocol):
    """What a weight log asks of its storage. Names are relative, with `/`. A missing file is a `FileNotFoundError`."""

    uri: str

    def names(self, folder: str) -> list[str]:
        """The files of a folder; none where there is no such folder."""

    def found(self, folder: str) -> list[StoredFile]:
        """The same with their times."""

    def read(self, name: str) -> bytes:
        """A whole file."""

    def open(self, name: str) -> BinaryIO:
        """A file to read from its beginning."""

    def create(self, name: str) -> AbstractContextManager[Writer]:
        """A new file, removed again where writing it fails."""

    def put(self, name: str, content: bytes, *, durable: bool = True) -> None:
        """Write or replace a small file in one step: others see all of it or nothing."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files for good before returning; those that are gone already are no error."""

    def claim(self) -> Claim:
        """Become the publisher, or raise `AnotherPublisher`."""


def local_path(uri: str) -> Path | None:
    """Where a URI lies on this machine's file system; None for an object store.

    >>> local_path("file:///data/weights"), local_path("s3://bucket/weights")
    (PosixPath('/data/weights'), None)
    """
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return Path(unquote(parts.path))
    return Path(uri) if not parts.scheme else None


def open_store(uri: str | os.PathLike[str]) -> Store:
    """The store at a local path, a `file:` URI, or an object-store URI such as `s3://bucket/run`.

    >>> open_store("weights").uri
    'weights'
    """
    path = local_path(os.fspath(uri))
    if path is not None:
        return LocalStore(path)
    from offbeat.storage.object_store import ObjectStore  # its libraries load only where they are used

    return ObjectStore.at(os.fspath(uri))


class LocalStore:
    """A folder on a file system that has atomic renames and locks."""

    def __init__(self, root: Path) -> None:
        self.uri = str(root)
        self._root = root

    def names(self, folder: str) -> list[str]:
        try:
            return [name for name in os.listdir(self._root / folder) if not name.startswith(".")]
        except FileNotFoundError:
            return []

    def found(self, folder: str) -> list[StoredFile]:
        found = []
        for name in self.names(folder):
            with suppress(FileNotFoundError):  # it went in the meantime
                found.append(StoredFile(name, (self._root / folder / name).stat().st_mtime))
        return found

    def read(self, name: str) -> bytes:
        return (self._root / name).read_bytes()

    def open(self, name: str) -> BinaryIO:
        return (self._root / name).open("rb", buffering=0)

    @contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        path = self._root / name
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
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            with part.open("xb", buffering=0) as file:
                file.write(content)
                if durable:
                    os.fsync(file)
            part.rename(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        if durable:
            force(path.parent)

    def remove(self, names: Iterable[str]) -> None:
        folders = set()
        for name in names:
            path = self._root / name
            with suppress(FileNotFoundError):
                path.unlink()
                folders.add(path.parent)
        for folder in folders:
            force(folder)

    def claim(self) -> Claim:
        for folder in FOLDERS:
            (self._root / folder).mkdir(parents=True, exist_ok=True)
        claim = _LocalClaim(self._root / _LOCK)
        for part in (self._root / "versions").glob(".*"):  # what a killed publisher had not yet renamed
            part.unlink(missing_ok=True)
        force(self._root)
        force(self._root.absolute().parent)
        return claim


class _LocalWriter:
    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._sha256 = hashlib.sha256()
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> None:
        if len(data) < _LARGE:
            self._sha256.update(data)
            self._put(data)
        else:  # hashed while the kernel takes it
            hashing = threading.Thread(target=self._sha256.update, args=(data,))
            hashing.start()
            self._put(data)
            hashing.join()
        self._bytes += len(data)

    def _put(self, data: bytes | memoryview) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]

    def finished(self) -> tuple[int, str]:
        os.fsync(self._file)
        force(Path(self._file.name).parent)
        return self._bytes, self._sha256.hexdigest()

    def close(self) -> None:
        self._file.close()


class _LocalClaim:
    """A lock that the kernel releases when its process ends, however it ends.

    Record locks belong to a process and not, as those of flock do, to every child it forked. They say nothing about a
    second claim in the same process, hence the table.
    """

    _held: Final[dict[Path, int]] = {}

    def __init__(self, path: Path) -> None:
        self._path = path.resolve()
        if self._held.get(self._path) == os.getpid():
            raise AnotherPublisher(f"{path.parent} is being published to by this very process; close that log first")
        self._file = self._path.open("a+b", buffering=0)
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.seek(0)
            who = self._file.read().decode(errors="replace").strip() or "another process"
            self._file.close()
            raise AnotherPublisher(
                f"{path.parent} is being published to by {who}; stop it first, or publish to another place"
            ) from error
        self._held[self._path] = os.getpid()
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())

    def check(self) -> None:
        """The kernel keeps the lock as long as the process lives."""

    def release(self) -> None:
        self._held.pop(self._path, None)
        self._file.close()


def force(folder: Path) -> None:
    """Fsync a folder: names in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
