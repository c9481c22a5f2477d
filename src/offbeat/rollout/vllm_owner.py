"""Tie vLLM's processes to the process that owns the engine: when it dies, even by SIGKILL, they end.

    mp   owner ── engine core ── worker, worker …        uni (one GPU)   owner ── engine core, which is also the worker

vLLM does not look after its engine core when the owner is killed, and an orphan keeps the GPU's memory. So every
process of the tree watches the owner by itself, whatever the executor. `tied_children` puts an `OwnerTie` into what
multiprocessing pickles for a spawned process, ahead of the function to run; unpickling it starts the watch. That is
before the process imports vLLM, so there is no moment during the start in which the owner could die unnoticed. The
tie stays in the process and goes on to its own children.
"""

import ctypes
import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ORPHAN_GRACE: Final = 5.0
"""Seconds between the owner's death and the SIGKILL of what is left. An orphaned engine core rarely ends sooner: vLLM
waits for its last messages to be read."""
_PR_SET_PDEATHSIG: Final = 1
_KEY: Final = "offbeat_owner"
_watched: "set[OwnerTie]" = set()


@contextmanager
def tied_children() -> Iterator[None]:
    """Tie the processes that multiprocessing spawns meanwhile, and their children, to this process."""
    # A private attribute, but the only part of a spawned process that is unpickled before its imports.
    config: dict[str, object] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = config.get(_KEY)
    config[_KEY] = OwnerTie(os.getpid(), start_time(os.getpid()))
    try:
        yield
    finally:
        config[_KEY] = before


def start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot: together with the pid it never repeats."""
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[19])


@dataclass(frozen=True)
class OwnerTie:
    """Ties the process that unpickles it to its owner."""

    pid: int
    started: int

    def __reduce__(self) -> "tuple[Callable[[int, int], OwnerTie], tuple[int, int]]":
        return _arrive, (self.pid, self.started)


def _arrive(pid: int, started: int) -> OwnerTie:
    tie = OwnerTie(pid, started)
    if pid != os.getpid() and tie not in _watched:
        _watched.add(tie)
        live_with(pid, started)
    return tie


def _die_with(core: int) -> None:
    """Let the kernel kill this worker when its engine core ends.

    A worker that waits for another one in an all-reduce keeps the processor busy, and its threads may not run for many
    seconds. Only for workers: the signal comes when the thread that spawned a process ends. An engine core spawns from
    its main thread, but an owner from a thread that may end long before it.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != core:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def live_with(pid: int, started: int) -> None:
    """End this process when process `pid`, which started at `started`, ends; at once if it has ended already."""
    try:
        owner = os.pidfd_open(pid)
        alive = start_time(pid) == started  # after the open: otherwise the pid could change hands in between
    except (ProcessLookupError, FileNotFoundError):
        alive = False
    if not alive:
        os.kill(os.getpid(), signal.SIGKILL)
    parent = os.getppid()  # not `multiprocessing.parent_process()`, which is None until everything is unpickled
    is_core = parent == pid
    if not is_core:
        _die_with(parent)

    def follow() -> None:
        select.select([owner], [], [])
        if is_core:  # it ends its workers in order, unless it is still starting: then vLLM only notes the signal
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="offbeat-live-with", daemon=True).start()
