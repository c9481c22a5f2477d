"""Reward functions for the tests of the scoring pool. Workers import them, so they are in a separate file."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

from offbeat.types import Json, Score

LEAKED: list[bytearray] = []


class SandboxError(RuntimeError):
    """The error of a sandbox that does not work."""


def one(text: str, columns: Mapping[str, Json]) -> float:
    return 1.0


def columns_seen(text: str, columns: Mapping[str, Json]) -> float:
    return float(len(columns))


def length(text: str, columns: Mapping[str, Json]) -> float:
    return len(text) / 10


def act(text: str, columns: Mapping[str, Json]) -> float | Score | None:  # noqa: C901, PLR0915 - one branch per action
    """Do what the text says."""
    if columns.get("broken"):
        raise ValueError("the reference cannot be read")
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
        case ["offline"]:
            raise ConnectionError("the service did not answer")
        case ["late", seconds]:
            time.sleep(float(seconds))
            raise ValueError("the service sent an empty answer")
        case ["huge"]:
            return 10**5_000
        case ["once", path]:
            if not os.path.exists(path):
                open(path, "x").close()
                raise ValueError("only the first time")
        case ["slow"]:
            raise TimeoutError("the grader's own limit")
        case ["sleep", seconds]:
            time.sleep(float(seconds))
        case ["spin"]:
            while True:
                pass
        case ["kill"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["abort"]:
            os.kill(os.getpid(), signal.SIGSEGV)
        case ["stop"]:
            os.kill(os.getpid(), signal.SIGSTOP)
        case ["exit"]:
            os._exit(3)
        case ["eat"]:
            held = []
            while True:
                held.append(bytearray(1 << 24))
        case ["forge", reply]:
            os.write(int(sys.argv[1]), f"{reply}\n".encode())  # as a reward function that took over its worker could
        case ["leak"]:
            LEAKED.append(bytearray(1 << 24))
        case ["child", seconds]:
            subprocess.Popen(["sleep", seconds])
        case ["daemon", seconds]:
            if os.fork() == 0:
                os.setsid()
                subprocess.Popen(["sleep", seconds], start_new_session=True)
                os._exit(0)
            os.wait()
        case ["print"]:
            print("a reward function may print")
    return Score(1.0, {"a": 0.75, "b": 0.25})
