"""Memory and process caps for a program and all its children together: Linux control groups, version 1 or 2.

Limits of single processes do not hold a program that spreads over many. A slot has one group, kept from run to run;
between runs it is empty, and whatever is found in it was left by somebody who died, and is killed.
"""

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from offbeat.errors import SandboxError, SandboxMissing

_PATIENCE: Final = 10.0
"""Seconds for killed processes to be gone."""
_LARGE_PAGES: Final = 4 << 20
"""A limit is hit this close to it at the latest."""


@dataclass(frozen=True)
class Cgroup:
    """The directories of one slot: one for each controller in version 1, one in all in version 2."""

    memory: Path
    pids: Path

    @property
    def places(self) -> tuple[Path, ...]:
        """Where a process enters the group."""
        return tuple(dict.fromkeys([self.memory, self.pids]))

    @property
    def _unified(self) -> bool:
        return self.memory == self.pids

    def cap(self, memory: int, processes: int) -> None:
        """Set both limits; swap does not count as a way around the first."""
        if self._unified:
            _write(self.memory / "memory.max", memory)
            swap, most = self.memory / "memory.swap.max", 0
        else:
            swap, most = self.memory / "memory.memsw.limit_in_bytes", memory
            if swap.exists():
                _write(swap, -1)  # it may not be below the other one, not even in passing
            _write(self.memory / "memory.limit_in_bytes", memory)
            _write(self.memory / "memory.max_usage_in_bytes", 0)
        if swap.exists():  # kernels without swap accounting do not have it
            _write(swap, most)
        _write(self.pids / "pids.max", processes)

    def out_of_memory(self) -> "CgroupOutOfMemory":
        """What its limit has done so far."""
        if self._unified:
            events = _fields(self.memory / "memory.events")
            return CgroupOutOfMemory(events.get("max", 0), events.get("oom_kill", 0))
        kills = _fields(self.memory / "memory.oom_control").get("oom_kill", 0)
        # There is a counter, memory.failcnt, but recent kernels leave it at 0.
        peak, limit = (int(_read(self.memory / f"memory.{name}_in_bytes")) for name in ("max_usage", "limit"))
        return CgroupOutOfMemory(int(peak > limit - _LARGE_PAGES), kills)

    def processes(self) -> list[int]:
        """Who is in it, in any of its places."""
        listed = " ".join(_read(place / "cgroup.procs") for place in self.places)
        return sorted({int(pid) for pid in listed.split()} - {0})  # 0 stands for one that cannot be seen from here

    def kill(self) -> None:
        """End everything in it, and return when it is gone."""
        until = time.monotonic() + _PATIENCE
        while left := self.processes():
            for pid in left:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            if time.monotonic() > until:
                raise SandboxError(f"processes {left} in {self.memory} are still there {_PATIENCE:.0f} s after SIGKILL")
            time.sleep(0.001)

    def remove(self) -> None:
        """Delete the group; it must be empty."""
        for place in self.places:
            if place.exists():
                place.rmdir()


@dataclass(frozen=True)
class CgroupOutOfMemory:
    """Two counters; the first may only say none or some."""

    limit_hits: int
    """How often the limit stood in the way since it was set."""
    kills: int
    """Processes that the kernel killed for want of memory, its own limit's or the whole machine's."""


class CgroupRoot(Protocol):
    """Where groups are made."""

    def group(self, name: str) -> Cgroup:
        """The group of that name, made if it is not there."""
        ...


@dataclass(frozen=True)
class Version1:
    """The memory and pids hierarchies, each at its own mount point."""

    memory: Path
    pids: Path

    def group(self, name: str) -> Cgroup:
        """The group of that name, made if it is not there."""
        group = Cgroup(self.memory / "offbeat-sandbox" / name, self.pids / "offbeat-sandbox" / name)
        for place in group.places:
            place.mkdir(parents=True, exist_ok=True)
        return group


@dataclass(frozen=True)
class Version2:
    """Groups beside the one this process is in: a group with processes of its own cannot hold capped ones."""

    parent: Path

    def group(self, name: str) -> Cgroup:
        """The group of that name, made if it is not there."""
        place = self.parent / f"offbeat-sandbox-{name}"
        place.mkdir(exist_ok=True)
        return Cgroup(place, place)


def find_groups(mountinfo: str = "", membership: str = "") -> CgroupRoot:
    """Where this process may make groups; `SandboxMissing` where it may not.

    Args:
        mountinfo: What /proc/self/mountinfo says, unless given.
        membership: Likewise /proc/self/cgroup.
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
    """Beside this process's group where its parent hands out both controllers; otherwise make that so."""
    line = next(line for line in membership.splitlines() if line.startswith("0::"))
    own = mount / os.path.relpath(line.removeprefix("0::"), root)
    for parent in (own.parent, own) if own != mount else (own,):
        controllers = _read(parent / "cgroup.subtree_control").split()
        if {"memory", "pids"} <= set(controllers) and os.access(parent, os.W_OK):
            return _proved(Version2(parent))
    # A delegated group: its processes step down into a leaf, as systemd asks of whoever manages groups of its own.
    leaf = own / "offbeat-callers"
    leaf.mkdir(exist_ok=True)
    for pid in _read(own / "cgroup.procs").split():
        _write(leaf / "cgroup.procs", int(pid))
    _write_text(own / "cgroup.subtree_control", "+memory +pids")
    return _proved(Version2(own))


def _proved(groups: Version2) -> Version2:
    probe = groups.group(f"probe-{os.getpid()}")
    probe.cap(1 << 26, 16)
    probe.remove()
    return groups


def _cgroup_mounts(mountinfo: str) -> dict[str, tuple[str, Path]]:
    """Root and mount point of each version 1 controller by name; version 2 is called ''."""
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


def _write(file: Path, value: int) -> None:
    _write_text(file, str(value))


def _write_text(file: Path, text: str) -> None:
    # One write and no creation: the kernel takes a line, and a file that is missing must not appear.
    descriptor = os.open(file, os.O_WRONLY)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)
