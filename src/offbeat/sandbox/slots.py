"""Slots: each sandboxed program runs in one, with its own user id and its own control group (`cgroups.py`).

Several processes score at once and any of them may be killed, so a slot is held by a file lock, which the kernel
releases with its holder.
"""

import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from offbeat.errors import SandboxError
from offbeat.storage.files import FileLock, LockHeld

FIRST_UID: Final = 1_900_000_000
"""The start of a range that no system assigns: above systemd's containers, below 2^31."""
MOST: Final = 1024
_TURN_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Slot:
    """A number that no other process on this machine holds."""

    number: int
    lock: FileLock

    @property
    def uid(self) -> int:
        """The user id for its programs, if the caller is root and can choose."""
        return FIRST_UID + self.number


def default_place() -> Path:
    """Return the directory of the lock files: one per machine for root, one per user for others.

    Other users cannot choose user ids, so their slots cannot collide.
    """
    uid = os.getuid()
    return Path("/run/offbeat-sandbox") if uid == 0 else Path(tempfile.gettempdir(), f"offbeat-sandbox-{uid}")


@dataclass
class Slots:
    """Takes slots as needed and keeps them for the next run.

    >>> with tempfile.TemporaryDirectory() as place:
    ...     slots = Slots(Path(place))
    ...     with slots.one() as first, slots.one() as second:
    ...         numbers = first.number, second.number
    ...     slots.close()
    >>> numbers
    (0, 1)
    """

    place: Path = field(default_factory=default_place)
    _idle: list[Slot] = field(default_factory=list)
    _guard: threading.Lock = field(default_factory=threading.Lock)
    _owner: int = field(default_factory=os.getpid)

    @contextmanager
    def one(self) -> Iterator[Slot]:
        """Hold a slot for the length of the block."""
        with self._guard:
            self._drop_after_fork()
            slot = self._idle.pop() if self._idle else self._take()
        try:
            yield slot
        except BaseException:
            slot.lock.release()  # its state is unknown; the next holder cleans it first
            raise
        with self._guard:
            self._idle.append(slot)

    @contextmanager
    def one_at_a_time(self) -> Iterator[None]:
        """Hold the one turn for second attempts on this machine, or go without after a minute."""
        until, turn = time.monotonic() + _TURN_SECONDS, None
        while turn is None and time.monotonic() < until:
            try:
                turn = FileLock(self._checked_place() / "turn.lock", mode=0o600)
            except LockHeld:
                time.sleep(0.05)
        try:
            yield
        finally:
            if turn is not None:
                turn.release()

    def close(self) -> None:
        """Release the slots that are not in use."""
        with self._guard:
            while self._idle:
                self._idle.pop().lock.release()

    def _drop_after_fork(self) -> None:
        """In a forked child, drop the idle slots: the child shares their locks with its parent, which uses them."""
        if os.getpid() != self._owner:
            for slot in self._idle:
                slot.lock.release()
            self._idle.clear()
            self._owner = os.getpid()

    def _checked_place(self) -> Path:
        self.place.mkdir(mode=0o700, exist_ok=True)
        if self.place.lstat().st_uid != os.getuid() or self.place.is_symlink():
            raise SandboxError(f"{self.place} belongs to another user or is a symbolic link; remove it")
        return self.place

    def _take(self) -> Slot:
        place = self._checked_place()
        for number in range(MOST):
            try:
                return Slot(number, FileLock(place / f"{number}.lock", mode=0o600))
            except LockHeld:
                continue
        raise SandboxError(f"all {MOST} slots of this machine are in use; look for scoring processes that do not end")
