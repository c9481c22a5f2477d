"""Durable files on a local disk: fsync, atomic replacement, regular files only, a lock that ends with its process."""

import fcntl
import os
import secrets
import socket
import struct
import sys
import time
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urlsplit

from offbeat.errors import RunError


def local_path(uri: str) -> Path | None:
    """Return the path that a URI names on this machine, or None if it names an object store.

    >>> local_path("file:///data/log"), local_path("s3://bucket/log")
    (PosixPath('/data/log'), None)
    """
    parts = urlsplit(uri)
    if parts.scheme in ("file", "file-object-store"):
        return Path(unquote(parts.path))
    return Path(uri) if not parts.scheme else None


def fsync_paths(*paths: Path) -> None:
    """Force files and folders to disk, in this order. A folder's fsync makes the names in it survive a power cut.

    >>> fsync_paths(Path("."))
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def write_atomically(path: Path, content: bytes, *, durable: bool) -> None:
    """Write or replace a file in one step: readers see all of it or the previous file.

    With `durable` the file survives a power cut once this returns. A killed writer leaves a hidden file,
    `.name.random`, beside the target.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write_atomically(Path(folder, "a.txt"), b"whole", durable=True)
    ...     [file.name for file in Path(folder).iterdir()]
    ['a.txt']
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with part.open("xb", buffering=0) as file:
            rest = memoryview(content)
            while rest:
                rest = rest[file.write(rest) :]
            if durable:
                os.fsync(file)
        part.rename(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    if durable:
        fsync_paths(path.parent)


def require_plain_tree(root: Path, only: Collection[str] = ()) -> None:
    """Raise `RunError` if a FIFO would stop readers, or a link would let a run read and prune the files of others.

    With `only`, nothing else in `root` is looked at.
    """
    inside, folders = root.resolve(), [root]
    while folders:
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folders.pop()) as entries:
            for one in entries:
                if only and one.name not in only and Path(one.path).parent == root:
                    continue
                if one.is_dir(follow_symlinks=False):
                    folders.append(Path(one.path))
                elif one.is_symlink() and not Path(one.path).resolve().is_relative_to(inside):
                    raise RunError(f"{one.path} is a link out of {root}; put what it points to in its place")
                elif not one.is_file(follow_symlinks=False) and not one.is_symlink():
                    raise RunError(f"{one.path} is neither a file nor a directory; remove it")


class LockHeld(Exception):
    """The lock is taken. Callers turn this into an error that says what to do."""

    def __init__(self, owner: str, *, by_this_process: bool = False) -> None:
        self.owner = owner
        """For example "process 4711 on host-a"."""
        self.by_this_process = by_this_process
        super().__init__(f"held by {owner}")


class FileLock:
    """An exclusive lock on a file whose content names the owner. It never waits: a taken lock raises `LockHeld`.

    The kernel releases the lock when its process ends, even by SIGKILL. There are two kinds:

    - The default is flock. The lock belongs to the open file, so children forked while it is held share it, and it is
      free only when all of them have closed it or ended.
    - With `per_process` it is a POSIX record lock, which belongs to this process alone: forked children that outlive
      their parent do not block its successor. The kernel does not refuse a second record lock in the same process, so
      a table does. Closing ANY descriptor of the file releases the lock: do not open the file elsewhere.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lock = FileLock(Path(folder, "a.lock"))
    ...     holder = held_by(Path(folder, "a.lock"))
    ...     lock.release()
    ...     holder == f"process {os.getpid()} on {socket.gethostname()}", held_by(Path(folder, "a.lock"))
    (True, None)
    """

    _held: Final[dict[Path, int]] = {}
    """The process id that holds each `per_process` lock; after a fork it differs from the child's own."""

    def __init__(self, path: Path, *, per_process: bool = False, mode: int = 0o666) -> None:
        """`mode` is the permission of a new lock file, before the umask."""
        path = path.resolve()
        if per_process and self._held.get(path) == os.getpid():
            raise LockHeld("this process", by_this_process=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, mode)
        try:
            (fcntl.lockf if per_process else fcntl.flock)(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if sys.platform == "linux" and not per_process:
                fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _WHOLE_FILE)  # as flock, and `held_by` can look at it
        except (BlockingIOError, PermissionError):  # POSIX allows either for a record lock
            owner = _owner(descriptor)
            os.close(descriptor)
            raise LockHeld(owner) from None
        except BaseException:
            os.close(descriptor)
            raise
        with suppress(OSError):  # a full disk does not make the lock less safe
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        if per_process:
            self._held[path] = os.getpid()
        self._close = weakref.finalize(self, _close, path, descriptor)  # also when the object is garbage-collected
        self._close.atexit = False  # at exit, the kernel does it

    def release(self) -> None:
        """Close the file; harmless if it is closed. A lock shared with the parent process stays the parent's."""
        self._close()


_WHOLE_FILE: Final = struct.pack("hhqqi0q", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)  # an exclusive `struct flock`


def _close(path: Path, descriptor: int) -> None:
    FileLock._held.pop(path, None)
    os.close(descriptor)


@contextmanager
def taking_turns(path: Path, *, patience: float = 5.0) -> Iterator[None]:
    """Let one process of this machine at a time run the block, where that is possible.

    For work that is right without a lock and faster with one: after `patience` seconds, or where there are no locks, it
    is done without. So a process that was stopped in the block stops no others. Threads of one process do not wait.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, taking_turns(Path(folder, "turn.lock")):
    ...     pass
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield
        return
    try:
        until = time.monotonic() + patience
        while time.monotonic() < until:
            try:  # a record lock: unlike flock, forked children do not hold it for their parent
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except (BlockingIOError, PermissionError):
                time.sleep(0.001)
            except OSError:
                break
        yield
    finally:
        os.close(descriptor)


def held_by(path: Path) -> str | None:
    """Return who holds a flock `FileLock` at this path, or None if it is free or missing. On Linux it only looks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if sys.platform == "linux":
            found = fcntl.fcntl(descriptor, fcntl.F_OFD_GETLK, _WHOLE_FILE)
            return None if struct.unpack_from("h", found)[0] == fcntl.F_UNLCK else _owner(descriptor)
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(descriptor)
    finally:
        os.close(descriptor)
    return None


def _owner(descriptor: int) -> str:
    return os.pread(descriptor, 1024, 0).decode(errors="replace").strip() or "another process"
