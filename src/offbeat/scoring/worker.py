"""What runs in a scoring worker: it imports the reward functions once and grades one completion after another.

Started by `scoring.py` as `python -m offbeat.scoring.worker FD`. It may be killed at any moment; it holds nothing that
could be lost. Reward functions run on its main thread, so that those which use signals for time limits work.
"""

import contextlib
import ctypes
import os
import resource
import signal
import socket
import sys
from typing import Final, cast

from offbeat.imports import resolve
from offbeat.scoring.channel import Channel, ChannelClosed, Message
from offbeat.tasks.rewards import DETAIL_LIMIT, Reward, grade
from offbeat.types import Json, Score, Unscorable

_PR_SET_PDEATHSIG: Final = 1


def _die_with(parent: int) -> None:
    """On Linux, be killed when the pool's process ends, however it ends: a reward function may be deep in C code."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            sys.exit("the pool's process has ended")


def _cap_memory(limit: int) -> None:
    """Heap and anonymous mappings, not address space: libraries reserve far more of that than they use."""
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _held() -> int:
    """Bytes of data this process holds, as the cap counts them; 0 where the system does not say.

    Not `ru_maxrss`: that begins with what the pool's process held when it started this one.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return 0


def _rewards(recipes: list[Json]) -> list[Reward]:
    found = []
    for recipe in cast("list[dict[str, Json]]", recipes):
        function = resolve(cast("str", recipe["target"]), cast("dict[str, Json]", recipe["options"]))
        found.append(Reward(function, str(recipe["name"]), cast("float", recipe["weight"]), bool(recipe["trl"])))
    return found


def _reply(outcome: Score | Unscorable) -> Message:
    if isinstance(outcome, Unscorable):
        return {"unscorable": outcome.reason, "detail": outcome.detail}
    return {"reward": outcome.reward, "breakdown": dict(outcome.breakdown)}


def serve(channel: Channel) -> None:
    """Take the recipe, then grade until the pool hangs up, or until too much memory has been taken."""
    recipe = channel.receive()
    memory = cast("int", recipe["memory"])
    _cap_memory(memory)
    try:
        rewards = _rewards(cast("list[Json]", recipe["rewards"]))
    # The boundary to other people's modules: whatever importing them raises is why the pool cannot start.
    except Exception as error:
        channel.send({"broken": f"{type(error).__name__}: {error}"[:DETAIL_LIMIT]})
        return
    low, high = cast("list[float]", recipe["range"])
    channel.send({"ready": True})
    # One that has filled half of its room leaves between two completions, before the cap hits an innocent one.
    enough = (_held() + memory) // 2
    leaving = False
    while not leaving:
        job = channel.receive()
        try:
            reply = _reply(grade(rewards, (low, high), cast("str", job["text"]), cast("Message", job["columns"])))
            leaving = _held() > enough
        except MemoryError:
            reply = _reply(Unscorable("crash", f"memory: scoring needed more than {memory >> 20} MiB"))
            leaving = True
        channel.send(reply | {"job": job["job"], "leaving": leaving})


def main() -> None:
    """Serve on the socket whose number is the first argument; the second is the pool's process id."""
    number = int(sys.argv[1])
    os.set_inheritable(number, False)  # programs that a reward function starts must not hold the line open
    _die_with(int(sys.argv[2]))
    os.dup2(2, 1)  # a reward function that prints does not write into the command's output
    with contextlib.suppress(ChannelClosed):
        serve(Channel(socket.socket(fileno=number)))


if __name__ == "__main__":
    main()
