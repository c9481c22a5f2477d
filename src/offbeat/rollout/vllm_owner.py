"""Tie vLLM's processes to the process that owns the engine: when it dies, even by SIGKILL, they end.

    mp   owner ── engine core ── worker, worker …        uni (one GPU)   owner ── engine core, which is also the worker

vLLM does not look after its engine core when the owner is killed, and an orphan keeps the GPU's memory. So every
process of the tree watches the owner by itself, whatever the executor. An `OwnerTie` is part of vLLM's configuration,
which vLLM pickles for each process that it spawns, and unpickling it starts the watch. That is the first thing such a
process does, so there is no moment during the start in which the owner could die unnoticed.
"""

import multiprocessing
import os
import select
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

ORPHAN_GRACE: Final = 5.0
"""Seconds between the owner's death and the SIGKILL of what is left. An orphaned engine core rarely ends sooner: vLLM
waits for its last messages to be read."""
_watched: set[tuple[int, int]] = set()


def start_time(pid: int) -> int:
    """Return when a process started, in clock ticks since boot: together with the pid it never repeats."""
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[19])


class OwnerTie(str):
    """Text for vLLM's `additional_config` that ties whichever process unpickles it to the process that made it.

    The text is always the same, because vLLM hashes it into the name of its compile cache.

    >>> OwnerTie()
    'tied to its owner'
    """

    __slots__ = ("owner",)
    owner: tuple[int, int]

    def __new__(cls) -> "OwnerTie":
        tie = super().__new__(cls, "tied to its owner")
        tie.owner = (os.getpid(), start_time(os.getpid()))
        return tie

    def __reduce__(self) -> tuple[Callable[[int, int], "OwnerTie"], tuple[int, int]]:
        return _arrive, self.owner


def _arrive(pid: int, started: int) -> OwnerTie:
    """Live with the owner from now on. Called by pickle, and also by `copy.deepcopy`, so it may run many times."""
    tie = OwnerTie()
    tie.owner = (pid, started)
    if pid != os.getpid() and tie.owner not in _watched:
        _watched.add(tie.owner)
        live_with(pid, started)
    return tie


def live_with(pid: int, started: int) -> None:
    """End this process when process `pid`, which started at `started`, ends; at once if it has ended already."""
    try:
        owner = os.pidfd_open(pid)
        alive = start_time(pid) == started  # after the open: otherwise the pid could change hands in between
    except (ProcessLookupError, FileNotFoundError):
        alive = False
    if not alive:
        os.kill(os.getpid(), signal.SIGKILL)
    parent = multiprocessing.parent_process()
    is_core = parent is None or parent.pid == pid

    def follow() -> None:
        select.select([owner], [], [])
        if is_core:  # it ends its workers in order, unless it is still starting: then vLLM only notes the signal
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(ORPHAN_GRACE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="offbeat-live-with", daemon=True).start()
