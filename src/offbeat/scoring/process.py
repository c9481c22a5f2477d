"""Scoring workers as the pool sees them: processes to start, ask, kill and replace."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Final, Literal, cast, get_args

from offbeat.errors import (
    PoolClosed,
    PoolError,
    RewardDoesNotImport,
    WorkerDoesNotEnd,
    WorkerDoesNotStart,
)
from offbeat.imports import reference
from offbeat.sandbox.meter import SAMPLE_SECONDS, TreeMeter, Usage, descendants
from offbeat.scoring.worker import Channel, ChannelClosed, Message
from offbeat.tasks.rewards import Reason, Reward
from offbeat.types import Json, Score, Unscorable, is_reward

Grader = tuple[Sequence[Reward], tuple[float, float]]
"""Reward functions, and the range of their weighted sum."""
LONGEST_PAUSE: Final = 5.0
"""Seconds between two attempts to start a worker, at most."""
_MAX_REPLY_BYTES: Final = 1 << 20
_IMPORT_ATTEMPTS: Final = 3
"""How often a worker tries to import the reward functions before the pool stops."""
_SHORTEST_START: Final = 2.0
"""Seconds that every start may take."""
_KILL_SECONDS: Final = 10.0
_SUPERVISOR_SECONDS: Final = 6.0
"""Time for a supervisor to end everything below it, before the pool does it."""
_PATIENCE: Final = 4.0
"""How many times its deadline a completion may take by the clock while its worker is starved."""
_LEAST_DEADLINE: Final = 10.0
"""A shorter deadline counts as this for patience: a wait of seconds is usual beside a trainer."""
_UNMETERED: Final = 0.25
"""Seconds before the pool looks at the CPU of a worker; most completions take milliseconds."""
_SHORTEST_WAIT: Final = 0.01

Failure = Literal["", "failed", "invalid", "starved"]
"""Why a completion has no score: the scoring failed; it gave what can be no reward of the task (`InvalidReward`); the
machine had too little CPU for it. Empty if there is a score."""


@dataclass(frozen=True)
class Reply:
    """What a worker said about one completion, or why it said nothing."""

    outcomes: Sequence[Score | Unscorable]
    """One for each completion that was asked for."""
    failure: Failure
    cpu: float = 0.0
    """Seconds that the worker computed; 0 if it died."""
    usable: bool = False
    """True if the worker can take another completion; if not, kill it."""


def longest_wait(deadline: float) -> float:
    """Return the wall time after which a completion with this deadline ends in any case, starved or not."""
    return _PATIENCE * max(deadline, _LEAST_DEADLINE)


def setup_message(graders: Sequence[Grader], memory_mib: int) -> Message:
    """Return the first message to a worker; `UnreachableFunction` if another process cannot import a function.

    `graders` are those of training and, if they differ, those of evaluation.
    """
    described: list[Json] = []
    for rewards, reward_range in graders:
        references: list[Json] = [
            reference(r.function)
            | {"name": r.name, "weight": r.weight, "trl": r.trl, "setup": reference(r.setup) if r.setup else None}
            for r in rewards  # see `worker._import_rewards`
        ]
        described.append({"rewards": references, "range": [*reward_range]})
    return {"graders": described, "memory": memory_mib << 20}


class WorkerProcess:
    """A running worker and its supervisor: a fresh interpreter, since the pool may hold torch and threads."""

    _may_print = 16 << 20  # bytes, by all workers of this process: no policy may fill a disk

    def __init__(self) -> None:
        self._code: int | None = None
        self._worker_pid = 0
        pool_end, worker_end = socket.socketpair()
        self._channel = Channel(pool_end, max_bytes=_MAX_REPLY_BYTES)
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with worker_end:
            descriptor = worker_end.fileno()
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "offbeat.scoring.worker", str(descriptor), str(os.getpid())],
                env=os.environ | threads | {"PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=[descriptor],
                start_new_session=True,  # only the pool handles Ctrl-C
            )
        threading.Thread(target=self._pass_on, args=[self._process.stderr], daemon=True).start()

    @classmethod
    def _pass_on(cls, printed: IO[bytes]) -> None:
        with printed:  # to its end, so that nobody waits
            while part := os.read(printed.fileno(), 1 << 16):
                shown, cls._may_print = part[: cls._may_print], max(cls._may_print - len(part), 0)
                cut = b"" if cls._may_print else b"\nreward functions print too much: the rest is not shown\n"
                with contextlib.suppress(OSError):
                    os.write(2, shown + cut if shown else b"")

    def prepare(self, setup: Message, *, seconds: float) -> None:
        """Send the setup and wait until the worker has imported the reward functions."""
        until = time.monotonic() + seconds
        graders = cast("list[dict[str, list[dict[str, Json]]]]", setup["graders"])
        targets = ", ".join(str(reward["target"]) for grader in graders for reward in grader["rewards"])
        try:
            self._channel.send(setup, seconds=seconds)
            reply = self._channel.receive(seconds=until - time.monotonic())
        except TimeoutError:
            raise WorkerDoesNotStart(f"waited {seconds:g} s for a scoring worker to import {targets}") from None
        except (ChannelClosed, ValueError) as error:
            raise WorkerDoesNotStart(f"a scoring worker {self.ending() or error} while importing {targets}") from None
        if "broken" in reply:
            raise RewardDoesNotImport(f"a scoring worker could not import {targets}: {reply['broken']}")
        self._worker_pid = cast("int", reply["ready"])

    @property
    def pid(self) -> int:
        """The worker; until it is ready, its supervisor."""
        return self._worker_pid or self._process.pid

    @property
    def alive(self) -> bool:
        """True until its end has been observed; a stopped process counts as alive."""
        return self._exit_code(0.0) is None

    def _exit_code(self, seconds: float) -> int | None:
        """Wait so long for its end; None if it has not ended."""
        if self._code is None:
            try:
                code = self._process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                return None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # at once, while no other process can have this group id
            self._code = code
        return self._code

    def ask(self, job: int, request: bytes, count: int, *, seconds: float) -> Reply:
        """Let the process grade completions of one prompt; `request` is the encoded job number and the `Answers`.

        `seconds` are wall time without the time in which the worker waited for a CPU: a reward function may use several
        processes. Raises `ChannelClosed` if the worker was gone before it could have received the job.
        """
        try:
            self._channel.send(request, seconds=longest_wait(seconds))
        except TimeoutError:
            return self._late(Usage(longest_wait(seconds), 0.0, 0.0), seconds, count)
        try:
            reply = self._receive(seconds)
            if isinstance(reply, Usage):
                return self._late(reply, seconds, count)
            if "invalid" in reply:
                invalid = [Unscorable("invalid", str(reply["invalid"]))] * count
                return Reply(invalid, "invalid", usable=True)
            outcomes, failure = _outcomes(reply, job, count)
            return Reply(outcomes, failure, float(cast("float", reply["cpu"])), usable=not reply["leaving"])
        except ChannelClosed:
            return self._crash(f"the worker {self.ending() or 'closed its channel'} while scoring", count)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return self._crash(f"the worker sent an invalid reply: {error}", count)

    def _receive(self, seconds: float) -> Message | Usage:
        """Return the reply of the worker; what the worker had received if its time, or the pool's patience, is up."""
        unmetered = min(_UNMETERED, seconds / 4)  # counts as CPU
        with contextlib.suppress(TimeoutError):
            return self._channel.receive(seconds=unmetered)
        meter, wait = TreeMeter(self._process.pid), _SHORTEST_WAIT
        while True:
            with contextlib.suppress(TimeoutError):
                return self._channel.receive(seconds=wait)
            seen = meter.read()
            usage = Usage(seen.wall + unmetered, seen.cpu + unmetered, seen.waited)
            if usage.served >= seconds or usage.wall >= longest_wait(seconds):
                return usage
            wait = min(max(seconds - usage.served, _SHORTEST_WAIT), SAMPLE_SECONDS)

    def _late(self, usage: Usage, seconds: float, count: int) -> Reply:
        # A child of a dead worker may hold its channel open: then there is no end of file, only silence.
        if not self.alive:
            return self._crash(f"the worker {self.ending()} while scoring", count)
        if usage.served < seconds and usage.cpu < seconds:  # what starves itself computes
            busy = f"the machine was too busy to score it: the worker received {usage}; run fewer things at once"
            return Reply([Unscorable("sandbox", busy)] * count, "starved", usage.cpu)
        outcome = Unscorable("timeout", f"scoring was stopped after {seconds:g} s, with {usage}")
        return Reply([outcome] * count, "failed", usage.cpu)

    def _crash(self, what: str, count: int) -> Reply:
        return Reply([Unscorable("crash", what)] * count, "failed")

    def ending(self) -> str | None:
        """Describe how the process ended, or return None if it does not end."""
        code = self._exit_code(_KILL_SECONDS)
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def signal_kill(self) -> None:
        """Tell the supervisor to kill everything below it, without waiting."""
        if self._code is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            if sys.platform == "linux":
                os.kill(self._process.pid, signal.SIGTERM)
                os.kill(self._process.pid, signal.SIGCONT)  # it may be stopped
            else:
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """Kill the worker and everything it has started, and wait until all have ended."""
        self.signal_kill()
        self._channel.close()
        if self._exit_code(_SUPERVISOR_SECONDS) is None:
            self._kill_tree()
        if self._exit_code(_KILL_SECONDS) is None:
            raise WorkerDoesNotEnd(f"waited {_KILL_SECONDS:g} s for scoring worker {self.pid} to end after SIGKILL")

    def _kill_tree(self) -> None:
        """Kill what the supervisor did not kill, and the supervisor."""
        for pid in [*descendants(self._process.pid), self._process.pid]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)


def _outcomes(reply: Message, job: int, count: int) -> tuple[list[Score | Unscorable], Failure]:
    """Parse a reply, which a reward function that took over the worker may have written."""
    if reply["job"] != job:
        raise ValueError(f"it is for job {reply['job']!r}, not for job {job}")
    parts = cast("list[Message]", reply["outcomes"])
    outcomes = [_outcome(part) for part in parts]
    if len(outcomes) != count:
        raise ValueError(f"it has {len(outcomes)} outcomes, not {count}")
    failed = [one for one in outcomes if isinstance(one, Unscorable)]
    starved = failed and all(one.detail.split(": ", 2)[1:2] == ["SandboxStarved"] for one in failed)
    return outcomes, "starved" if starved else "failed" if failed else ""


def _outcome(reply: Message) -> Score | Unscorable:
    if "unscorable" in reply:
        reason = reply["unscorable"]
        if reason not in get_args(Reason):
            raise ValueError(f"{reason!r} is not a reason")
        return Unscorable(cast("Reason", reason), str(reply["detail"]))
    reward = float(cast("float", reply["reward"]))
    parts = {name: float(part) for name, part in cast("dict[str, float]", reply["breakdown"]).items()}
    if not all(map(is_reward, [reward, *parts.values()])):
        raise ValueError(f"a reward of {reward} from {parts}")
    return Score(reward, parts)


class WorkerProcesses:
    """Keeps one live worker per slot. Each slot belongs to one thread of the pool."""

    def __init__(self, setup: Message, start_seconds: float, closing: threading.Event) -> None:
        self.restarts = 0
        self._setup, self._start_seconds, self._closing = setup, start_seconds, closing
        self._processes: dict[int, WorkerProcess] = {}
        self._lock = threading.Lock()
        self._last_ready = time.monotonic()
        self._slowest_start = 0.0

    @property
    def pids(self) -> list[int]:
        with self._lock:
            return [process.pid for process in self._processes.values()]

    def ready(self, slot: int) -> WorkerProcess:
        """Return the worker of a slot; start one if there is none or it has died."""
        process = self._processes.get(slot)
        if process is not None and process.alive:
            return process
        attempt = 0
        while True:
            self.kill(slot)
            attempt += 1
            began = time.monotonic()
            try:
                fresh = WorkerProcess()
                with self._lock:
                    self._processes[slot] = fresh
                if self._closing.is_set():  # `signal_kill` may have run just before
                    raise PoolClosed("the scoring pool was closed")
                fresh.prepare(self._setup, seconds=self._start_timeout(attempt))
            except (WorkerDoesNotStart, OSError) as error:
                self._pause_or_raise(error, attempt)
            else:
                self._last_ready = time.monotonic()
                self._slowest_start = max(self._slowest_start, self._last_ready - began)
                return fresh

    def kill(self, slot: int) -> None:
        """Kill the worker of a slot, if there is one."""
        with self._lock:
            process = self._processes.pop(slot, None)
            self.restarts += process is not None and not self._closing.is_set()
        if process is not None:
            process.kill()

    def signal_kill(self) -> None:
        """Send SIGKILL to all workers without waiting; their threads see the end."""
        with self._lock:
            for process in self._processes.values():
                process.signal_kill()

    def _start_timeout(self, attempt: int) -> float:
        """Return the seconds for a start: a few times what starts have taken, so that a stuck one is noticed early."""
        if not self._slowest_start:
            return self._start_seconds
        usual = max(_SHORTEST_START, 4 * self._slowest_start)
        return min(self._start_seconds, usual * 2.0 ** (attempt - 1))

    def _pause_or_raise(self, error: Exception, attempt: int) -> None:
        """After a failed start, pause before the next attempt, or raise if another attempt is no use."""
        if isinstance(error, RewardDoesNotImport) and attempt >= _IMPORT_ATTEMPTS:
            raise PoolError(f"{error} ({attempt} attempts)") from error
        if (idle := time.monotonic() - self._last_ready) > 2 * self._start_seconds:
            raise PoolError(f"no scoring worker has been ready for {idle:.0f} s; the last error: {error}") from error
        if self._closing.wait(min(0.2 * 2**attempt, LONGEST_PAUSE)):
            raise PoolClosed("the scoring pool was closed")
