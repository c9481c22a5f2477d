"""One scoring worker as the pool sees it: a process to start, to ask and to kill."""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, cast, get_args

from offbeat.errors import RewardDoesNotImport, WorkerDoesNotEnd, WorkerDoesNotStart
from offbeat.imports import reference
from offbeat.scoring.channel import Channel, ChannelClosed, Message
from offbeat.tasks.rewards import Reason, Reward
from offbeat.types import Json, Score, Unscorable

_LONGEST_REPLY: Final = 1 << 20
_REAPING_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Recipe:
    """What a worker needs to know: where the reward functions are, the range, the cap."""

    rewards: tuple[dict[str, Json], ...]
    reward_range: tuple[float, float]
    memory_mib: int

    @classmethod
    def of(cls, rewards: Sequence[Reward], reward_range: tuple[float, float], memory_mib: int) -> "Recipe":
        """References to the functions; raises where another process could not find one."""
        found = tuple(
            reference(r.function) | {"name": r.name, "weight": r.weight, "trl": r.trl}  # as `worker._rewards` reads it
            for r in rewards
        )
        return cls(found, reward_range, memory_mib)

    def message(self) -> Message:
        """As it is sent."""
        return {"rewards": [*self.rewards], "range": [*self.reward_range], "memory": self.memory_mib << 20}


class WorkerProcess:
    """A running worker. A fresh interpreter, not a fork: the pool's process may hold torch and threads."""

    def __init__(self) -> None:
        self._code: int | None = None
        here, there = socket.socketpair()
        self._channel = Channel(here, longest=_LONGEST_REPLY)
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        with there:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "offbeat.scoring.worker", str(there.fileno()), str(os.getpid())],
                env=os.environ | threads | {"PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                start_new_session=True,  # its children are killed with it, and Ctrl-C is the pool's to handle
            )

    def prepare(self, recipe: Recipe, *, seconds: float) -> None:
        """Send the recipe and wait until the reward functions are imported."""
        until = time.monotonic() + seconds
        targets = ", ".join(str(reward["target"]) for reward in recipe.rewards)
        try:
            self._channel.send(recipe.message(), seconds=seconds)
            said = self._channel.receive(seconds=until - time.monotonic())
        except TimeoutError:
            raise WorkerDoesNotStart(f"waited {seconds:g} s for a scoring worker to import {targets}") from None
        except (ChannelClosed, ValueError) as error:
            raise WorkerDoesNotStart(f"a scoring worker {self.ending() or error} while importing {targets}") from None
        if "broken" in said:
            raise RewardDoesNotImport(f"a scoring worker could not import {targets}: {said['broken']}")

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs, as far as can be seen now; a stopped process runs."""
        return self._exit_code(0.0) is None

    def _exit_code(self, seconds: float) -> int | None:
        """None where it has not ended within that time."""
        if self._code is None:
            try:
                code = self._process.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                return None
            self.signal_kill()  # what it started; at once, while its number cannot belong to anybody else
            self._code = code
        return self._code

    def ask(self, job: int, request: bytes, *, seconds: float) -> tuple[Score | Unscorable, bool]:
        """One completion graded, `request` being `encoded` job, text and columns; also whether the worker can take
        another. One that cannot is to be killed.

        Raises `ChannelClosed` where it was gone before it could have taken the job.
        """
        until = time.monotonic() + seconds
        try:
            self._channel.send(request, seconds=seconds)
        except TimeoutError:
            return self._late(seconds), False
        try:
            reply = self._channel.receive(seconds=until - time.monotonic())
            return _outcome(reply, job), not reply["leaving"]
        except TimeoutError:
            return self._late(seconds), False
        except ChannelClosed:
            return Unscorable("crash", f"the worker {self.ending() or 'hung up'} while scoring"), False
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            return Unscorable("crash", f"the worker answered nonsense: {error}"), False

    def _late(self, seconds: float) -> Unscorable:
        # A child of a dead worker may hold its line open: then there is no end of file, only silence.
        if not self.alive:
            return Unscorable("crash", f"the worker {self.ending()} while scoring")
        return Unscorable("timeout", f"scoring was stopped after {seconds:g} s")

    def ending(self) -> str | None:
        """How it ended, in words; None where it has not within a moment."""
        code = self._exit_code(1.0)
        if code is None:
            return None
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"

    def signal_kill(self) -> None:
        """Send SIGKILL to it and to what it started; whoever waits for it sees the end."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def kill(self) -> None:
        """End it and what it started, whatever state it is in."""
        self.signal_kill()
        self._channel.close()
        if self._exit_code(_REAPING_SECONDS) is None:
            raise WorkerDoesNotEnd(f"waited {_REAPING_SECONDS:g} s for scoring worker {self.pid} to end after SIGKILL")


def _outcome(reply: Message, job: int) -> Score | Unscorable:
    if reply["job"] != job:
        raise ValueError(f"it answers job {reply['job']!r}, and was asked job {job}")
    if "unscorable" in reply:
        reason = reply["unscorable"]
        if reason not in get_args(Reason):
            raise ValueError(f"{reason!r} is not a reason")
        return Unscorable(cast("Reason", reason), str(reply["detail"]))
    reward = float(cast("float", reply["reward"]))
    parts = {name: float(part) for name, part in cast("dict[str, float]", reply["breakdown"]).items()}
    if not all(map(math.isfinite, [reward, *parts.values()])):
        raise ValueError(f"a reward of {reward} from {parts}")
    return Score(reward, parts)
