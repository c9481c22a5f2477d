"""How much CPU a tree of processes used, and how long it waited for one: what tells a slow program from a starved one.

On a crowded machine, the clock on the wall says how busy the machine is and not how slow a program is. So a program
pays for the CPU that all its processes use, and has a second, wider limit for the time in which it neither computes nor
waits for a CPU: it sleeps, or waits for itself. `bubblewrap.py` has the rule.

The kernel counts waits for each thread in /proc/PID/task/TID/schedstat, and only when the wait ends; until then, a
thread that is ready and whose counters stand still counts as waiting. Kernels without schedstat report no wait.

It is a wait too if the root of the tree is stopped, which nothing in a sandbox can do, if this meter looks late, and if
a thread waits inside the kernel, for a lock whose holder has no CPU: programs that start processes share the locks of
the files that these map. The last has a limit, because a program may be able to cause it.
"""

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SAMPLE_SECONDS: Final = 0.1
"""Between two looks at a tree. Waits of different threads count as one if they end between the same two looks."""
MOST_BLOCKED: Final = 10.0
"""Seconds inside the kernel that count as waiting. Longer ones count against the program, which thus cannot look
starved for ever."""
CROWDED: Final = 0.1
"""Share of the wall time; on a quiet machine, a program with one process waits for a hundredth of it."""
MANY_PROCESSES: Final = 500
"""An honest program starts fewer in all."""
_TICKS: Final = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """What a tree of processes received since the meter was made.

    >>> Usage(wall=9.0, cpu=0.5, waited=8.0).idle
    0.5
    >>> Usage(wall=9.0, cpu=17.0, waited=0.0).idle
    0.0
    """

    wall: float
    cpu: float
    """Seconds of CPU, of all processes together."""
    waited: float
    """Seconds in which the machine kept it from running; at most `wall`."""

    @property
    def served(self) -> float:
        """Wall time in which the tree had the CPU that it asked for."""
        return self.wall - self.waited

    @property
    def idle(self) -> float:
        """Seconds in which it neither computed nor waited for a CPU, less what it computed on several CPUs at once."""
        return max(0.0, self.served - self.cpu)

    @property
    def price(self) -> float:
        """What a second counts: two thirds where it had to wait, since on a crowded machine a CPU is slower as well."""
        return 2 / 3 if self.waited > CROWDED * self.wall else 1.0

    def __str__(self) -> str:
        return f"{self.cpu:.2f} s of CPU, {self.waited:.2f} s of waiting for one, in {self.wall:.2f} s"


@dataclass
class _Thread:
    ran: int
    delayed: int
    changed_at: float


@dataclass(frozen=True)
class _Wait:
    """What a look at a thread shows."""

    ended: int = 0
    """Nanoseconds of waiting for a CPU that ended since the last look."""
    pending: float = 0.0
    """Seconds of such a wait that has not ended."""
    blocked: bool = False
    """True if it waited inside the kernel since the last look, and for none of its children, as after vfork."""


class TreeMeter:
    """Measures a process and its descendants from now on. Call `read` every `SAMPLE_SECONDS`.

    >>> meter = TreeMeter(os.getpid())
    >>> sum(range(1_000_000)) > 0 and meter.read().wall > 0
    True
    """

    def __init__(self, pid: int, cpu_seconds: Callable[[], float] | None = None) -> None:
        """
        Args:
            pid: The root of the tree.
            cpu_seconds: An exact count of the tree's CPU, from its control group; otherwise /proc is added up. That
                misses children which end between two looks and which their parent chose not to wait for. A program
                could starve itself with those and look innocent, so one with many processes is never starved.
        """
        self._pid, self._exact = pid, cpu_seconds
        self._threads: dict[int, _Thread] = {}
        self._own_ticks: dict[int, int] = {}
        self._highest_pid = 0
        self._waited = self._blocked = self._most_cpu = self._cpu_before = 0.0
        self._started = self._looked = time.monotonic()
        self.read()
        self._waited, self._cpu_before, self._most_cpu = 0.0, self._most_cpu, 0.0

    def read(self) -> Usage:
        """Look at the tree now."""
        now, summed, waits = time.monotonic(), 0, [_Wait()]
        missed = now - self._looked - 2 * SAMPLE_SECONDS
        for pid in _tree(self._pid):
            fields = _stat(f"/proc/{pid}/stat")
            if fields is None:
                continue
            if pid == self._pid and fields[0] == "T":
                missed = now - self._looked
            if self._exact is None:
                self._highest_pid = max(self._highest_pid, _pid_in_namespace(pid))
            self._own_ticks[pid] = int(fields[11]) + int(fields[12])
            summed += self._own_ticks[pid] + int(fields[13]) + int(fields[14])
            waits += [self._look(pid, tid, now) for tid in _numbers(f"/proc/{pid}/task")]
        self._waited += max(missed, *(one.ended / 1e9 for one in waits))
        if any(one.blocked for one in waits):
            self._blocked = min(self._blocked + now - self._looked, MOST_BLOCKED)
        waited = self._waited + self._blocked + max(one.pending for one in waits)
        self._looked, wall = now, now - self._started
        if self._exact is None:
            cpu = max(summed, sum(self._own_ticks.values())) / _TICKS
            self._most_cpu = max(self._most_cpu, cpu - self._cpu_before)
        innocent = self._exact is not None or self._highest_pid <= MANY_PROCESSES
        return Usage(wall, self.cpu(), min(waited, wall) if innocent else 0.0)

    def cpu(self) -> float:
        """Return the CPU used until now if the control group counts it, otherwise until the last look."""
        if self._exact:
            self._most_cpu = max(self._most_cpu, self._exact() - self._cpu_before)
        return self._most_cpu

    def _look(self, pid: int, tid: int, now: float) -> _Wait:
        try:
            ran, delayed = map(int, Path(f"/proc/{pid}/task/{tid}/schedstat").read_bytes().split()[:2])
        except (OSError, ValueError):
            return _Wait()
        seen = self._threads.setdefault(tid, _Thread(0, 0, now))
        if (ran, delayed) != (seen.ran, seen.delayed):
            self._threads[tid] = _Thread(ran, delayed, now)
            return _Wait(ended=delayed - seen.delayed)
        fields = _stat(f"/proc/{pid}/task/{tid}/stat")
        state = fields[0] if fields else ""
        pending = now - seen.changed_at if state == "R" else 0.0
        return _Wait(pending=pending, blocked=state == "D" and not _children(pid, tid))


def descendants(pid: int) -> list[int]:
    """Return the processes that a process has started, those that they started, and so on."""
    return list(_tree(pid))[1:]


def _tree(root: int) -> Iterator[int]:
    waiting, seen = [root], {root}
    while waiting:
        pid = waiting.pop()
        yield pid
        children = [child for tid in _numbers(f"/proc/{pid}/task") for child in _children(pid, tid)]
        waiting += [child for child in children if child not in seen]
        seen.update(children)


def _children(pid: int, tid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{tid}/children").read_bytes().split()]
    except OSError:
        return []


def _numbers(folder: str) -> list[int]:
    try:
        return [int(name) for name in os.listdir(folder)]
    except OSError:
        return []


def _pid_in_namespace(pid: int) -> int:
    """Return the id of a process in its own pid namespace, where ids count the processes started; 0 outside of one."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
    except OSError:
        return 0
    ids = next((line.split()[1:] for line in status.splitlines() if line.startswith("NSpid:")), [])
    return int(ids[-1]) if len(ids) > 1 else 0


def _stat(file: str) -> list[str] | None:
    """Return the fields after the name, which may contain anything: state first, then those of proc(5) from ppid on."""
    try:
        return Path(file).read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
