"""Child processes for torture: forked cheaply, heard through a pipe, ended at will.

Whoever forks must not have used Lance yet: its threads would not be in the child.
"""

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

Say = Callable[[str], None]
Work = Callable[[Say], None]


def child(work: Work) -> tuple[int, int]:
    """Fork a process that does `work` and can say lines; returns its pid and the descriptor to hear them from."""
    hear, say = os.pipe()
    pid = os.fork()
    if pid:
        os.close(say)
        return pid, hear
    os.close(hear)
    _run_and_exit(work, say)


def _run_and_exit(work: Work, to: int) -> NoReturn:
    def say(line: str) -> None:
        os.write(to, (line.replace("\n", " ") + "\n").encode())  # one write of a short line is atomic on a pipe

    code = 1
    try:
        work(say)
        code = 0
    except BaseException as error:  # the boundary of the process: its parent must hear of it
        with suppress(OSError):
            say(f"FAILED {type(error).__name__}: {error!s:.300}")
    finally:
        os._exit(code)


def heard(hear: int) -> list[str]:
    """All lines that a process said until it ended."""
    with os.fdopen(hear, "rb") as stream:
        return [line for line in stream.read().decode().split("\n") if line]


def outcome(work: Work) -> list[str]:
    """What a process says that is left to finish."""
    pid, hear = child(work)
    lines = heard(hear)
    os.waitpid(pid, 0)
    return lines


def end(pid: int) -> None:
    """SIGKILL, which no process can prepare for."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
