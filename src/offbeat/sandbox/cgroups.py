"""What programs in the sandbox may use: slots, how many run at once, and the control groups (cgroups) of each.

Limits on single processes cannot cap a program and all its children together: a program that starts sixty others, each
in a session of its own, would get sixty shares. A group is kept from run to run; processes found in it between runs are
left over from a holder that died, and are killed.

Caps for memory and processes are required (`find_groups` fails without them). The CPU share is used if the machine
offers it: a slot then has the share of one process with the caller's priority, however many processes its program
starts. Without it, the kernel's autogroups do the same if they are on, because no program can make a new session
(`jail.py`); and everywhere a program is judged by the CPU that it received (`meter.py`).
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
from typing import Final, TypeVar

from offbeat.errors import SandboxError, SandboxMissing
from offbeat.storage.files import FileLock, LockHeld

_KILL_SECONDS: Final = 10.0
"""Time for killed processes to end."""
_LIMIT_MARGIN: Final = 4 << 20
"""Bytes: a peak this close to the limit means that the limit was hit."""
_ONE_PROCESS: Final = 1024
"""The weight of a process of priority 0, in version 1."""
_PER_NICE: Final = 1.25
"""The kernel's ratio between the weights of two neighboring priorities."""


@dataclass(frozen=True)
class Cgroup:
    """The control group of one slot: a directory per controller in version 1, a single one in version 2."""

    memory: Path
    pids: Path
    cpu: Path | None = None
    """None if the machine offers no CPU shares."""
    cpu_account: Path | None = None
    """Where the CPU that the group used is counted; None if nowhere."""

    @property
    def places(self) -> tuple[Path, ...]:
        """The directories that a process must enter."""
        found = [self.memory, self.pids, self.cpu, self.cpu_account]
        return tuple(dict.fromkeys(place for place in found if place is not None))

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
        # Processes that have ended count until they are reaped, perhaps by the machine's init.
        _write(self.pids / "pids.max", processes + int(_read(self.pids / "pids.current")))

    def share_cpu(self) -> None:
        """Give the group the CPU share of one process with the priority of the caller."""
        if self.cpu is None:
            return
        idle, lazy = self.cpu / "cpu.idle", os.sched_getscheduler(0) == os.SCHED_IDLE
        if idle.exists():  # since Linux 5.15; an idle group has no weight to set
            _write(idle, int(lazy))
        if not (lazy and idle.exists()):
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            if self._unified:
                _write(self.cpu / "cpu.weight.nice", nice)
            else:
                _write(self.cpu / "cpu.shares", max(2, round(_ONE_PROCESS / _PER_NICE**nice)))

    def cpu_seconds(self) -> float:
        """Return the CPU that all processes of the group have used since it was made."""
        if self.cpu_account is None:
            raise SandboxError(f"the CPU time of {self.memory} is not counted")
        if self._unified:
            return _fields(self.cpu_account / "cpu.stat")["usage_usec"] / 1e6
        return int(_read(self.cpu_account / "cpuacct.usage")) / 1e9

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
    """The hierarchies, each with its own mount point."""

    memory: Path
    pids: Path
    cpu: Path | None = None
    cpu_account: Path | None = None

    def group(self, name: str) -> Cgroup:
        """Return the group of that name; make it if it does not exist."""
        memory, pids, account = (
            place and place / "offbeat-sandbox" / name for place in (self.memory, self.pids, self.cpu_account)
        )
        # Not below a common parent: all slots together would have the share of one process.
        cpu = self.cpu and self.cpu / f"offbeat-sandbox-{name}"
        assert memory is not None and pids is not None
        group = Cgroup(memory, pids, cpu, cpu if self.cpu == self.cpu_account else account)
        for place in group.places:
            place.mkdir(parents=True, exist_ok=True)
        return group


@dataclass(frozen=True)
class Version2:
    """Groups beside the group of this process: a group that holds processes cannot have capped subgroups."""

    parent: Path
    shares: bool = False
    """True if the parent distributes CPU shares."""

    def group(self, name: str) -> Cgroup:
        place = self.parent / f"offbeat-sandbox-{name}"
        place.mkdir(exist_ok=True)
        counted = place if (place / "cpu.stat").exists() else None
        return Cgroup(place, place, place if self.shares else None, counted)


def find_groups(mountinfo: str = "", membership: str = "") -> Version1 | Version2:
    """Find a place where this process can make groups, or raise `SandboxMissing`.

    Args:
        mountinfo: Replaces the content of /proc/self/mountinfo.
        membership: Replaces the content of /proc/self/cgroup.
    """
    mounts = _cgroup_mounts(mountinfo or _read(Path("/proc/self/mountinfo")))
    try:
        if "memory" in mounts and "pids" in mounts:
            memory, pids = mounts["memory"][1], mounts["pids"][1]
            cpu, account = (mounts[name][1] if name in mounts else None for name in ("cpu", "cpuacct"))
            with suppress(OSError):
                return _tested(Version1(memory, pids, cpu, account))
            return _tested(Version1(memory, pids))  # without CPU shares
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
            return _with_shares(parent, "cpu" in controllers)
    # A delegated group: its processes move into a leaf, as systemd requires of a process that manages its own groups.
    leaf = own / "offbeat-callers"
    leaf.mkdir(exist_ok=True)
    for pid in _read(own / "cgroup.procs").split():
        _write(leaf / "cgroup.procs", pid)
    try:
        _write(own / "cgroup.subtree_control", "+memory +pids +cpu")
        shares = True
    except OSError:  # systemd delegates only some controllers to users
        _write(own / "cgroup.subtree_control", "+memory +pids")
        shares = False
    return _with_shares(own, shares)


def _with_shares(parent: Path, shares: bool) -> Version2:
    """Return groups below `parent`, with CPU shares if they work: some kernels and containers lack files of them."""
    with suppress(OSError):
        return _tested(Version2(parent, shares))
    return _tested(Version2(parent))


Hierarchy = TypeVar("Hierarchy", Version1, Version2)


def _tested(groups: Hierarchy) -> Hierarchy:
    probe = groups.group(f"probe-{os.getpid()}")
    try:
        if isinstance(groups, Version2):  # there a controller can be missing although the folder can be made
            probe.cap(1 << 26, 16)
        probe.share_cpu()
    finally:
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
        """Drop the idle slots in a forked child: it shares their locks with its parent, which uses them."""
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
