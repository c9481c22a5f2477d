"""Ranks on this machine: started together, watched, and ended together.

    results = run_ranks(work, 2, arguments)       # work(ranks, *arguments) in each of two processes

A rank that dies leaves the others waiting in an exchange that never ends. So the parent watches: it sees a process end,
reads what went wrong, hears a heartbeat twice a second, and as soon as one rank is lost ends all others and raises a
`RankLost` that names it. Nothing is lost but the steps since the last checkpoint.
"""

import faulthandler
import json
import multiprocessing
import os
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from typing import Final

from offbeat.errors import RankDied, RankFailed, RankLost, RankSilent
from offbeat.trainer.fsdp import PATIENCE, Ranks, join, leave
from offbeat.types import Json

BEAT: Final = 0.5
"""Seconds between two signs of life."""
GRACE: Final = 1.0
"""Seconds after the first trouble in which its cause may still show: who waits for a dead rank fails as well."""


@dataclass
class Watch:
    """Who is to blame, from what was heard and seen. Times are given in, in seconds.

    >>> watch = Watch(size=2, began=0.0)
    >>> watch.hear(0, 5.0), watch.hear(1, 5.0), watch.verdict(14.0)
    (None, None, None)
    >>> watch.fail(0, "raised RuntimeError: Connection closed by peer", 14.1)
    >>> watch.end(1, -9, 14.2)
    >>> print(watch.verdict(14.2))
    rank 1 was ended by SIGKILL; the kernel does that to a process when memory runs out
    """

    size: int
    began: float
    silence: float = 10.0
    """Seconds without a sign of life that are too many."""
    starting: float = 120.0
    """The same before the first one: imports take their time."""
    _heard: dict[int, float] = field(default_factory=dict)
    _ended: dict[int, int] = field(default_factory=dict)
    _failed: dict[int, tuple[float, str]] = field(default_factory=dict)
    _trouble: float | None = None

    def hear(self, rank: int, now: float) -> None:
        """A sign of life."""
        self._heard[rank] = now

    def fail(self, rank: int, what: str, now: float) -> None:
        """It said what went wrong."""
        self._failed[rank] = (now, what)
        self._trouble = now if self._trouble is None else self._trouble

    def end(self, rank: int, code: int, now: float) -> None:
        """Its process ended: 0 is well, −n is signal n."""
        self._ended[rank] = code
        if code != 0 and self._trouble is None:
            self._trouble = now

    @property
    def done(self) -> bool:
        """Whether every rank ended well."""
        return len(self._ended) == self.size and not any(self._ended.values())

    def verdict(self, now: float) -> RankLost | None:
        """The rank that is lost, once that can be told."""
        for rank, code in self._ended.items():
            if code < 0:
                return RankDied(rank, f"was ended by {signal.Signals(-code).name}{_HINTS.get(-code, '')}")
        if self._trouble is not None:
            return self._blame() if now >= self._trouble + GRACE else None
        for rank in range(self.size):
            limit = self.silence if rank in self._heard else self.starting
            since = now - self._heard.get(rank, self.began)
            if rank not in self._ended and since > limit:
                return RankSilent(rank, f"has given no sign of life for {since:.0f} s (limit {limit:.0f} s)")
        return None

    def _blame(self) -> RankLost:
        """Who failed first; who ended without a word comes before that."""
        for rank, code in self._ended.items():
            if code != 0 and rank not in self._failed:
                return RankDied(rank, f"ended with exit code {code} and without a word")
        rank = min(self._failed, key=lambda one: self._failed[one])
        return RankFailed(rank, self._failed[rank][1])


_HINTS: Final[dict[int, str]] = {signal.SIGKILL: "; the kernel does that to a process when memory runs out"}


def run_ranks(
    work: Callable[..., Json],
    size: int,
    arguments: Sequence[object] = (),
    *,
    device: str = "cpu",
    silence: float = 10.0,
    patience: timedelta = PATIENCE,
    started: Callable[[Sequence[int]], None] | None = None,
) -> list[Json]:
    """What `work(ranks, *arguments)` returns in each of `size` new processes, by rank; raises `RankLost`.

    `work` must be a function that a new process can import. `started` is told the process ids.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch and transformers are imported once for all ranks
    with tempfile.TemporaryDirectory(prefix="offbeat-ranks-") as place:  # readable by this user alone
        processes, pipes = [], []
        for rank in range(size):
            hear, say = context.Pipe(duplex=False)
            meeting = (rank, size, f"file://{place}/meet", device, patience)
            process = context.Process(target=_rank, args=(meeting, say, work, arguments), name=f"rank {rank}")
            process.start()
            say.close()
            processes.append(process)
            pipes.append(hear)
        try:
            if started is not None:
                started([process.pid or 0 for process in processes])
            return _watch(processes, pipes, Watch(size, time.monotonic(), silence))
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join()


def _watch(processes: Sequence[ForkServerProcess], pipes: Sequence[Connection], watch: Watch) -> list[Json]:
    results: list[Json] = [None] * len(processes)
    talking, running = dict(enumerate(pipes)), dict(enumerate(processes))
    while not watch.done:
        wait([*talking.values(), *(process.sentinel for process in running.values())], timeout=BEAT)
        now = time.monotonic()
        for rank in list(talking):
            results[rank] = _listen(rank, talking, watch, now, results[rank])
        for rank, process in list(running.items()):
            if process.exitcode is not None:
                watch.end(rank, process.exitcode, now)
                del running[rank]
        if (lost := watch.verdict(now)) is not None:
            if isinstance(lost, RankSilent):
                _dump_stacks(running)
            raise lost
    return results


def _listen(rank: int, talking: dict[int, Connection], watch: Watch, now: float, result: Json) -> Json:
    """Take in what a rank has said."""
    try:
        while talking[rank].poll():
            said = json.loads(talking[rank].recv_bytes())
            watch.hear(rank, now)
            if "failed" in said:
                watch.fail(rank, said["failed"], said["at"])
            result = said.get("result", result)
    except EOFError:
        del talking[rank]
    return result


def _dump_stacks(running: dict[int, ForkServerProcess]) -> None:
    """Have every rank that can write where it stands to stderr."""
    for process in running.values():
        os.kill(process.pid or 0, signal.SIGUSR1)
    time.sleep(BEAT)


def _rank(
    meeting: tuple[int, int, str, str, timedelta],
    pipe: Connection,
    work: Callable[..., Json],
    arguments: Sequence[object],
) -> None:
    """What a rank's process runs."""
    faulthandler.register(signal.SIGUSR1)
    speaking = threading.Lock()

    def say(**what: Json) -> None:
        with speaking:
            pipe.send_bytes(json.dumps(what).encode())

    threading.Thread(target=_beat, args=(say,), daemon=True).start()
    rank, size, rendezvous, device, patience = meeting
    try:
        ranks: Ranks = join(rank, size, rendezvous, device=device, patience=patience)
        result = work(ranks, *arguments)
        leave()
        say(result=result)
    except BaseException as error:  # the boundary of the process: its parent must hear of it
        told = f"raised {type(error).__name__}: {error}\n{traceback.format_exc()}"
        say(failed=told, at=time.monotonic())
        os._exit(1)  # an exchange that others have left would keep the interpreter from ending


def _beat(say: Callable[[], None]) -> None:
    while True:
        try:
            say()
        except OSError:  # the parent is gone, and nobody would end this process
            os._exit(1)
        time.sleep(BEAT)
