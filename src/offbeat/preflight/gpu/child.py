"""A process that calls a function by its name and reports in JSON lines: nothing that fails in it reaches this one.

    with DoctorChild("offbeat.preflight.gpu.ranks:step", rank=0, device="cuda") as child:
        message = child.receive(within=60)       # what the generator `step` yields; None when it has ended

A CUDA error cannot be recovered from within a process, a kernel may crash it, and a collective may never return. What
the process prints goes to a file; `log` returns its end.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

from offbeat.errors import DeadlinePassed, OffbeatError
from offbeat.imports import resolve
from offbeat.types import Json

LOG_BYTES: Final = 6000
KILL_SECONDS: Final = 5.0
SKIP: Final = "OFFBEAT_SKIP_DOCTOR"
"""Set in the environment, runs do not check the machine before they start."""


class ChildFailed(OffbeatError, RuntimeError):
    """The function raised, or its process died."""


class DoctorChild:
    """A running process. As a context manager, it kills the process with its descendants on exit."""

    def __init__(self, target: str, **arguments: Json) -> None:
        self.target = target
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed on exit
        self._reading, writing = os.pipe()
        command = [sys.executable, "-m", "offbeat.preflight.gpu.child", str(writing), target, json.dumps(arguments)]
        environment = {**os.environ, SKIP: "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, pass_fds=[writing], env=environment
        )
        os.close(writing)
        self._rest = b""

    def __enter__(self) -> "DoctorChild":
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        os.close(self._reading)
        self._log.close()

    def fileno(self) -> int:
        """For `select`: readable when a message has arrived or the process has ended."""
        return self._reading

    @property
    def pid(self) -> int:
        return self._process.pid

    def receive(self, within: float) -> dict[str, Any] | None:
        """Return the next message, or None if the function returned. Raises `ChildFailed` or `DeadlinePassed`."""
        deadline = time.monotonic() + within
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self._reading], [], [], left)[0]:
                raise DeadlinePassed(f"waited {within:g} s for {self.target} in a process of its own")
            received = os.read(self._reading, 1 << 16)
            if not received:
                self._check_end(max(1.0, deadline - time.monotonic()))
                return None
            self._rest += received
        line, self._rest = self._rest.split(b"\n", 1)
        message = cast("dict[str, Any]", json.loads(line))
        if "raised" in message:
            raise ChildFailed(str(message["raised"]))
        return message

    def _check_end(self, within: float) -> None:
        code = self._process.wait(within)
        if code:
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            raise ChildFailed(f"the process of {self.target} {how}")

    def log(self) -> str:
        """Return the end of what the process printed."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), LOG_BYTES, max(0, size - LOG_BYTES)).decode(errors="replace").strip()

    def kill(self) -> None:
        """Kill the process and its descendants; do nothing if it has ended."""
        family = [self.pid, *descendants(self.pid)]
        for pid in family:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + KILL_SECONDS  # the kernel ends a process some time after the signal
        while any(is_running(pid) for pid in family) and time.monotonic() < deadline:
            time.sleep(0.01)

    def kill_alone(self) -> None:
        """Kill the process as the kernel does when memory runs out: its descendants are left to themselves."""
        self._process.kill()
        self._process.wait()


def descendants(pid: int) -> list[int]:
    """Return the child processes of `pid`, at any depth."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            stat = (entry / "stat").read_text(encoding="utf-8", errors="replace")
            parents.setdefault(int(stat.rsplit(")", 1)[1].split()[1]), []).append(int(entry.name))
    found, left = [], [pid]
    while left:
        children = parents.get(left.pop(), [])
        found += children
        left += children
    return found


def is_running(pid: int) -> bool:
    """True if the process exists and is not a zombie."""
    with suppress(OSError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return stat.rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


def main(descriptor: int, target: str, arguments: Mapping[str, Json]) -> int:
    """Be the process: call the function, and write what it yields."""
    os.set_inheritable(descriptor, False)

    def report(message: Mapping[str, Json]) -> None:
        os.write(descriptor, json.dumps(message).encode() + b"\n")

    try:
        messages = cast("Iterator[Mapping[str, Json]]", resolve(target)(**arguments))
        for message in messages:
            report(message)
    except Exception as error:  # the boundary of the process: report everything to the parent
        traceback.print_exc()
        report({"raised": f"{type(error).__name__}: {error}"})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3])))
