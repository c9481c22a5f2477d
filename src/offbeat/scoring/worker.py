"""A scoring worker: it imports the reward functions once, then grades one completion after another.

The pool starts it as `python -m offbeat.scoring.worker FD POOL_PID` and talks to it through a `Channel`. The process
that the pool started remains as its supervisor (`supervisor.py`). A worker may be killed at any moment, so it holds
nothing that could be lost. Reward functions run on its main thread, so they can use
signals for time limits.
"""

import contextlib
import json
import os
import resource
import socket
import sys
import time
from typing import Any, Final, cast

from offbeat.errors import InvalidReward
from offbeat.imports import resolve
from offbeat.scoring.supervisor import fork_worker
from offbeat.tasks.rewards import DETAIL_LIMIT, FOR_EVALUATION, Answers, Reward, examine
from offbeat.types import Json, Score, Unscorable

Message = dict[str, Json]

_CHUNK: Final = 1 << 16


class ChannelClosed(ConnectionError):
    """The other end of the channel is closed."""


def encode_message(message: Message) -> bytes:
    """Encode a message as one line of JSON; `TypeError` if it is not JSON."""
    return json.dumps(message).encode() + b"\n"


class Channel:
    """One end of a socket that carries lines of JSON, so that nothing is ever unpickled.

    >>> pool_end, worker_end = (Channel(end) for end in socket.socketpair())
    >>> pool_end.send({"text": "one\\ntwo"}, seconds=1.0)
    >>> worker_end.receive(seconds=1.0)
    {'text': 'one\\ntwo'}
    >>> pool_end.close(), worker_end.close()
    (None, None)
    """

    def __init__(self, end: socket.socket, *, max_bytes: int = 1 << 30) -> None:
        self._socket = end
        self._max_bytes = max_bytes
        self._unread = b""

    def send(self, message: Message | bytes, *, seconds: float | None = None) -> None:
        """Send one message, encoded or not; `TimeoutError` if the other end does not read it in time."""
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(message if isinstance(message, bytes) else encode_message(message))
        except ConnectionError as error:
            raise ChannelClosed(str(error)) from None

    def receive(self, *, seconds: float | None = None) -> Message:
        """Return the next message; `TimeoutError` if none arrives in time, `ValueError` if it is not a message."""
        until = None if seconds is None else time.monotonic() + seconds
        parts = [self._unread]
        size = len(self._unread)
        while b"\n" not in parts[-1]:
            self._socket.settimeout(None if until is None else max(until - time.monotonic(), 1e-3))
            try:
                arrived = self._socket.recv(_CHUNK)
            except TimeoutError:
                self._unread = b"".join(parts)  # the next call continues
                raise
            except ConnectionError as error:
                raise ChannelClosed(str(error)) from None
            if not arrived:
                raise ChannelClosed("the connection was closed")
            parts.append(arrived)
            size += len(arrived)
            if size > self._max_bytes:
                raise ValueError(f"a message of more than {self._max_bytes} bytes")
        line, _, self._unread = b"".join(parts).partition(b"\n")
        message = json.loads(line)
        if not isinstance(message, dict):
            raise ValueError(f"not a message: {line[:80]!r}")
        return cast("Message", message)

    def close(self) -> None:
        self._socket.close()


def serve(channel: Channel) -> None:
    """Receive the setup, then grade until the pool closes the channel or the process holds too much memory."""
    setup = channel.receive()
    memory = cast("int", setup["memory"])
    # Limits heap and anonymous mappings, not address space: libraries reserve far more of that than they use.
    resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
    try:
        graders = [_import_grader(grader) for grader in cast("list[dict[str, Json]]", setup["graders"])]
    # The boundary to user code: whatever importing it raises is the reason why the pool cannot start.
    except Exception as error:
        channel.send({"broken": f"{type(error).__name__}: {error}"[:DETAIL_LIMIT]})
        return
    channel.send({"ready": os.getpid()})
    # A worker that has used half of its memory exits between two completions, before the limit hits one of them.
    enough = (_memory_in_use() + memory) // 2
    leaving = False
    while not leaving:
        job = channel.receive()
        answers = Answers(**cast("dict[str, Any]", job["answers"]))
        rewards, reward_range = graders[-1 if cast("Message", answers.columns).pop(FOR_EVALUATION, False) else 0]
        began = _cpu()
        try:
            examined = examine(rewards, reward_range, answers)
            leaving = _memory_in_use() > enough
        except InvalidReward as invalid:
            channel.send({"job": job["job"], "invalid": str(invalid)})
            continue
        except MemoryError:
            full = Unscorable("crash", f"memory: scoring needed more than {memory >> 20} MiB; see task.memory_mib")
            examined, leaving = [full] * len(answers.texts), True
        outcomes: list[Json] = [_outcome(outcome) for outcome in examined]
        channel.send({"job": job["job"], "outcomes": outcomes, "cpu": _cpu() - began, "leaving": leaving})


def _import_grader(described: dict[str, Json]) -> tuple[list[Reward], tuple[float, float]]:
    low, high = cast("list[float]", described["range"])
    return _import_rewards(cast("list[dict[str, Json]]", described["rewards"])), (low, high)


def _import_rewards(references: list[dict[str, Json]]) -> list[Reward]:
    rewards = []
    for reference in references:
        function = resolve(cast("str", reference["target"]), cast("dict[str, Json]", reference["options"]))
        weight, trl = cast("float", reference["weight"]), bool(reference["trl"])
        rewards.append(Reward(function, str(reference["name"]), weight, trl))
        if reference["setup"] is not None:
            setup = cast("dict[str, dict[str, Json]]", reference["setup"])
            resolve(cast("str", setup["target"]), setup["options"])()
    return rewards


def _memory_in_use() -> int:
    """Return the bytes that count against RLIMIT_DATA, or 0 on systems without /proc.

    Not `ru_maxrss`: it starts from what the pool's process held when it started this one.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return 0


def _cpu() -> float:
    """Return the seconds that this process has computed, with its children that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _outcome(outcome: Score | Unscorable) -> Message:
    if isinstance(outcome, Unscorable):
        return {"unscorable": outcome.reason, "detail": outcome.detail}
    return {"reward": outcome.reward, "breakdown": dict(outcome.breakdown)}


def main() -> None:
    """Serve on the socket given as the first argument; the second argument is the pool's process id."""
    descriptor = int(sys.argv[1])
    os.set_inheritable(descriptor, False)  # a program started by a reward function must not keep the channel open
    os.dup2(2, 1)  # what a reward function prints must not reach the standard output of the command
    fork_worker(descriptor, int(sys.argv[2]))
    with contextlib.suppress(ChannelClosed):
        serve(Channel(socket.socket(fileno=descriptor)))


if __name__ == "__main__":
    main()
