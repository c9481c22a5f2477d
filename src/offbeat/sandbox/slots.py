"""Slots: each sandboxed program runs in one, with its own user id and its own control group (cgroup).

Several processes score at once and any of them may be killed, so a slot is held by a file lock, which the kernel
releases with its holder. The cgroup caps memory and processes of a program and all its children together, which limits
on single processes cannot do. It is kept from run to run; processes found in it between runs are left over from a
holder that died, and are killed.
"""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from offbeat.errors import SandboxError, SandboxMissing
from offbeat.storage.files import FileLock, LockHeld

FIRST_UID: Final = 1_900_000_000
"""The start of a range that no system assigns: above systemd's containers, below 2^31."""
MOST: Final = 1024
_KILL_SECONDS: Final = 10.0
"""Time for killed processes to end."""
_LIMIT_MARGIN: Final = 4 << 20
"""Bytes: a peak this close to the limit means that the limit was hit."""


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

    def _take(self) -> Slot:
        self.place.mkdir(mode=0o700, exist_ok=True)
        if self.place.lstat().st_uid != os.getuid() or self.place.is_symlink():
            raise SandboxError(f"{self.place} belongs to another user or is a symbolic link; remove it")
        for number in range(MOST):
            try:
                return Slot(number, FileLock(self.place / f"{number}.lock", mode=0o600))
            except LockHeld:
                continue
        raise SandboxError(f"all {MOST} slots of this machine are in use; look for scoring processes that do not end")


@dataclass(frozen=True)
class Cgroup:
    """The control group of one slot: a directory per controller in version 1, a single one in version 2."""

    memory: Path
    pids: Path

    @property
    def places(self) -> tuple[Path, ...]:
        """The directories that a process must enter."""
        return tuple(dict.fromkeys([self.memory, self.pids]))

    @property
    def _unified(self) -> bool:
        return self.memory == self.pids

    def cap(self, memory: int, processes: int) -> None:
        """Limit memory in bytes, with swap included, and the number of processes."""
        if self._unified:
            _write(self.memory / "memory.max", memory)
            swap, most = self.memory / "memory.swap.max", 0
        else:
            swap, most = self.memory / "memory.memsw.limit_in_bytes", memory
            if swap.exists():
                _write(swap, -1)  # it must not be below the memory limit at any moment
            _write(self.memory / "memory.limit_in_bytes", memory)
            _write(self.memory / "memory.max_usage_in_bytes", 0)
        if swap.exists():  # kernels without swap accounting do not have it
            _write(swap, most)
        _write(self.pids / "pids.max", processes)

    def out_of_memory(self) -> "CgroupOutOfMemory":
        if self._unified:
            events = _fields(self.memory / "memory.events")
            return CgroupOutOfMemory(events.get("max", 0), events.get("oom_kill", 0))
        kills = _fields(self.memory / "memory.oom_control").get("oom_kill", 0)
        # There is a counter, memory.failcnt, but recent kernels leave it at 0.
        peak, limit = (int(_read(self.memory / f"memory.{name}_in_bytes")) for name in ("max_usage", "limit"))
        return CgroupOutOfMemory(int(peak > limit - _LIMIT_MARGIN), kills)

    def processes(self) -> list[int]:
        listed = " ".join(_read(place / "cgroup.procs") for place in self.places)
        return sorted({int(pid) for pid in listed.split()} - {0})  # 0 is a process that is not visible from here

    def kill(self) -> None:
        """Kill every process in the group, and wait until all have ended."""
        until = time.monotonic() + _KILL_SECONDS
        while left := self.processes():
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            if time.monotonic() > until:
                raise SandboxError(
                    f"processes {left} in {self.memory} have not ended {_KILL_SECONDS:.0f} s after SIGKILL"
                )
            time.sleep(0.001)

    def remove(self) -> None:
        for place in self.places:
            if place.exists():
                place.rmdir()


@dataclass(frozen=True)
class CgroupOutOfMemory:
    """Two counters of a group."""

    limit_hits: int
    """How often the group's limit was hit since it was set; in version 1 only 0 or 1."""
    kills: int
    """Processes that the kernel killed because the group or the whole machine was out of memory."""


@dataclass(frozen=True)
class Version1:
    """The memory and pids hierarchies, each with its own mount point."""

    memory: Path
    pids: Path

    def group(self, name: str) -> Cgroup:
        """Return the group of that name; make it if it does not exist."""
        group = Cgroup(self.memory / "offbeat-sandbox" / name, self.pids / "offbeat-sandbox" / name)
        for place in group.places:
            place.mkdir(parents=True, exist_ok=True)
        return group


@dataclass(frozen=True)
class Version2:
    """Groups beside the group of this process: a group that holds processes cannot have capped subgroups."""

    parent: Path

    def group(self, name: str) -> Cgroup:
        place = self.parent / f"offbeat-sandbox-{name}"
        place.mkdir(exist_ok=True)
        return Cgroup(place, place)


def find_groups(mountinfo: str = "", membership: str = "") -> Version1 | Version2:
    """Find a place where this process can make groups, or raise `SandboxMissing`.

    Args:
        mountinfo: Replaces the content of /proc/self/mountinfo.
        membership: Replaces the content of /proc/self/cgroup.
    """
    mounts = _cgroup_mounts(mountinfo or _read(Path("/proc/self/mountinfo")))
    try:
        if "memory" in mounts and "pids" in mounts:
            found = Version1(mounts["memory"][1], mounts["pids"][1])
            found.group(f"probe-{os.getpid()}").remove()
            return found
        if "" in mounts:
            return _version2(*mounts[""], membership or _read(Path("/proc/self/cgroup")))
    except OSError as error:
        raise SandboxMissing(
            f"no control group can be made here ({error}); run as root, or as a user to whom systemd delegates one: "
            "systemd-run --user --scope -p Delegate=yes COMMAND. To cap each process instead of all together, choose "
            "the sandbox 'bubblewrap-without-cgroups'"
        ) from error
    raise SandboxMissing(
        "this machine has no control groups for memory and processes; choose the sandbox 'bubblewrap-without-cgroups' "
        "to cap each process instead of all together"
    )


def _version2(root: str, mount: Path, membership: str) -> Version2:
    """Use the parent of this process's group if it offers both controllers; otherwise set up the group itself."""
    line = next(line for line in membership.splitlines() if line.startswith("0::"))
    own = mount / os.path.relpath(line.removeprefix("0::"), root)
    for parent in (own.parent, own) if own != mount else (own,):
        controllers = _read(parent / "cgroup.subtree_control").split()
        if {"memory", "pids"} <= set(controllers) and os.access(parent, os.W_OK):
            return _tested(Version2(parent))
    # A delegated group: its processes move into a leaf, as systemd requires of a process that manages its own groups.
    leaf = own / "offbeat-callers"
    leaf.mkdir(exist_ok=True)
    for pid in _read(own / "cgroup.procs").split():
        _write(leaf / "cgroup.procs", pid)
    _write(own / "cgroup.subtree_control", "+memory +pids")
    return _tested(Version2(own))


def _tested(groups: Version2) -> Version2:
    probe = groups.group(f"probe-{os.getpid()}")
    probe.cap(1 << 26, 16)
    probe.remove()
    return groups


def _cgroup_mounts(mountinfo: str) -> dict[str, tuple[str, Path]]:
    """Return root and mount point of each version 1 controller by name, and of version 2 under ''."""
    found: dict[str, tuple[str, Path]] = {}
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        kind, _, options = fields[fields.index("-") + 1 :][:3]
        names: Sequence[str] = {"cgroup": options.split(","), "cgroup2": [""]}.get(kind, [])
        for name in names:
            found.setdefault(name, (fields[3], Path(fields[4])))
    return found


def _read(file: Path) -> str:
    return file.read_text(encoding="ascii", errors="replace")


def _fields(file: Path) -> dict[str, int]:
    return {name: int(value) for name, value in (line.split(" ") for line in _read(file).splitlines())}


def _write(file: Path, value: int | str) -> None:
    # One write and no creation: the kernel takes a line, and a missing file must not appear.
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, str(value).encode())
    finally:
        os.close(descriptor)
