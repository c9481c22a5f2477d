"""The supervisor of a scoring worker: a process that ends everything the worker has started, whatever session it is in.

A reward function may start programs, and those may leave the worker's session, outlive their parents, or outlive the
worker. So the process that the pool starts is the supervisor. It forks the worker, and orphans below it become its
children (Linux: PR_SET_CHILD_SUBREAPER). When the worker ends, the pool sends SIGTERM, or the pool itself ends, the
supervisor kills all of them, waits until they are gone, and ends as the worker ended.

    pool ── supervisor ── worker ── programs of reward functions
                └──────── orphans of those
"""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import time
from typing import Final

from offbeat.sandbox.meter import descendants

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_SIGNALS: Final = {signal.SIGCHLD, signal.SIGTERM}
_ROUNDS: Final = 100
"""How often to look for processes that were started while others were stopped."""
_END_SECONDS: Final = 5.0


def fork_worker(channel: int, pool_pid: int) -> None:
    """Return in the worker, a child of this process, which stays behind as its supervisor and never returns.

    `channel` is the worker's connection to the pool, which must end with the worker. On systems other than Linux
    nothing is forked, and the pool kills the worker's process group.
    """
    if sys.platform != "linux":
        return
    _die_with(pool_pid, signal.SIGTERM)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    supervisor = os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        _die_with(supervisor, signal.SIGKILL)
        return
    os.close(channel)
    status = _wait_for(worker)
    kill_descendants()
    _end_as(status)


def kill_descendants() -> None:
    """Kill every process below this one, and wait until all have ended. It must be their subreaper."""
    own, until = os.getpid(), time.monotonic() + _END_SECONDS
    while (found := descendants(own)) and time.monotonic() < until:
        stopped: set[int] = set()
        for _ in range(_ROUNDS):  # a process that is stopped starts no others
            if not (new := set(found) - stopped):
                break
            _signal(new, signal.SIGSTOP)
            stopped |= new
            found = descendants(own)
        _signal(stopped, signal.SIGKILL)
        _reap()
        time.sleep(0.001)


def _wait_for(worker: int) -> int | None:
    """Wait until the worker ends, and return its status; None if SIGTERM comes first."""
    while True:
        if signal.sigwait(_SIGNALS) == signal.SIGTERM:
            return None
        if (status := _reap().get(worker)) is not None:
            return status


def _reap() -> dict[int, int]:
    """Collect the children that have ended, by pid, each with its status."""
    ended = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def _end_as(status: int | None) -> None:
    """End this process in the way in which the worker ended, so that the pool sees it."""
    if status is not None and os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        number = os.WTERMSIG(status)
        with contextlib.suppress(OSError, ValueError):  # SIGKILL has no handler
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
        os.kill(os.getpid(), number)
    os._exit(0 if status is None else os.waitstatus_to_exitcode(status) & 0xFF)


def _signal(pids: set[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def _die_with(parent: int, number: signal.Signals) -> None:
    """Ask the kernel for a signal to this process when its parent ends: a reward function may be in C code."""
    _prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        sys.exit("the pool's process has ended")


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)
