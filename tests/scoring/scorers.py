"""Reward functions for the tests of the scoring pool: they run in its workers, so they live in a file of their own."""

import os
import signal
import sys
import time
from collections.abc import Mapping

from offbeat.types import Json, Score

LEAKED: list[bytearray] = []


class SandboxError(RuntimeError):
    """As a sandbox raises that cannot be trusted."""


def one(text: str, columns: Mapping[str, Json]) -> float:
    return 1.0


def length(text: str, columns: Mapping[str, Json]) -> float:
    return len(text) / 10


def act(text: str, columns: Mapping[str, Json]) -> float | Score | None:  # noqa: C901 - one branch per deed
    """Do what the text says."""
    match text.split():
        case ["return", value]:
            return float(value)
        case ["string"]:
            return "1.0"  # type: ignore[return-value]
        case ["none"]:
            return None
        case ["raise"]:
            raise KeyError("answer")
        case ["unsafe"]:
            raise SandboxError("no namespaces here")
        case ["slow"]:
            raise TimeoutError("the grader's own limit")
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["spin"]:
            while True:
                pass
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["stop"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["exit"]:
            os._exit(3)
        case ["eat"]:
            hoard = []
            while True:
                hoard.append(bytearray(1 << 24))
        case ["forge", reply]:
            os.write(int(sys.argv[1]), f"{reply}\n".encode())  # as a worker that was taken over might
        case ["leak"]:
            LEAKED.append(bytearray(1 << 24))
        case ["child", seconds]:
            if os.fork() == 0:
                time.sleep(float(seconds))
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        case ["print"]:
            print("a reward function may print")
    return Score(1.0, {"a": 0.75, "b": 0.25})
