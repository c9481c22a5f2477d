"""Places to run in: each has a number of its own on this machine, and so a user id and a control group of its own.

Several processes score at once and any of them may be killed, so a slot is held by a file lock, which ends with its
holder. Whoever takes a slot next finds its group as it was left.
"""

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from offbeat.errors import SandboxError

FIRST_UID: Final = 1_900_000_000
"""In a range that nobody assigns: above systemd's containers, below 2^31."""
MOST: Final = 1024


@dataclass(frozen=True)
class Slot:
    """A number held by this process, and by no other on this machine."""

    number: int
    lock: int
    """A descriptor; closing it gives the slot up."""

    @property
    def uid(self) -> int:
        """The user its programs run as, where there is a choice.

        >>> Slot(3, -1).uid
        1900000003
        """
        return FIRST_UID + self.number


def default_place() -> Path:
    """Root's slots are known to the whole machine; others', who cannot choose user ids, to themselves."""
    uid = os.getuid()
    return Path("/run/offbeat-sandbox") if uid == 0 else Path(tempfile.gettempdir(), f"offbeat-sandbox-{uid}")


@dataclass
class Slots:
    """Takes slots as they are needed and keeps them for the next run.

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
        """A slot for the length of the block."""
        with self._guard:
            self._forget_the_parents()
            slot = self._idle.pop() if self._idle else self._take()
        try:
            yield slot
        except BaseException:
            os.close(slot.lock)  # its state is unknown; whoever takes it next cleans it first
            raise
        with self._guard:
            self._idle.append(slot)

    def close(self) -> None:
        """Give up those not in use."""
        with self._guard:
            while self._idle:
                os.close(self._idle.pop().lock)

    def _forget_the_parents(self) -> None:
        """After a fork these locks are shared with the parent, which goes on using the slots."""
        if os.getpid() != self._owner:
            for slot in self._idle:
                os.close(slot.lock)
            self._idle.clear()
            self._owner = os.getpid()

    def _take(self) -> Slot:
        self.place.mkdir(mode=0o700, exist_ok=True)
        if self.place.lstat().st_uid != os.getuid() or self.place.is_symlink():
            raise SandboxError(f"{self.place} belongs to somebody else; remove it")
        for number in range(MOST):
            lock = os.open(self.place / f"{number}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                continue
            return Slot(number, lock)
        raise SandboxError(f"all {MOST} slots of this machine are in use; are there processes that never end?")
