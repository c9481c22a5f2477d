"""Sandboxes for model-written Python: the protocol, the outcome of a program, and the choice of a backend.

Every backend follows two rules. It fails closed: if it cannot isolate, it raises `SandboxMissing` before anything runs.
And it separates two kinds of failure: what a program did (wrong, crashed, too slow, too large) is a `ProgramOutcome`; a
failure of the sandbox itself is a `SandboxError`, so a completion never scores 0 for it.

Expected results never enter a sandbox. A program sees the arguments of a call, and whatever it sends back is its
answer; the comparison happens outside (`tasks/code_tests.py`). It may patch the driver, write to every descriptor and
read all memory within reach: its answers are accepted only if they are right.

bubblewrap.py  the backend of this machine, and the pipes to an untrusted process
jail.py        its bwrap command and system call filter
cgroups.py     its slots, one per running program, and their control groups: caps, and a share of the CPU
meter.py       CPU that a tree of processes received and waited for
driver.py      the code inside the sandbox, and the wire form of answers
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, Literal, Protocol, cast

from offbeat.errors import SandboxMissing
from offbeat.imports import resolve
from offbeat.types import Json

Arguments = tuple[tuple[object, ...], Mapping[str, object]]
"""Positional and keyword arguments of one call: plain Python values."""

Ending = Literal["finished", "crashed", "timeout", "memory", "output"]


@dataclass(frozen=True)
class SandboxLimits:
    """The limits of one program. A program that exceeds them has failed and scores 0; `bubblewrap.py` has the rule.

    >>> SandboxLimits(seconds=2.0).memory_mb
    256
    """

    seconds: float = 8.0
    """CPU of all its processes for one test: one call, or one run as a script."""
    memory_mb: int = 256
    """For all its processes together, including files in /tmp."""
    processes: int = 64
    """Processes and threads."""
    output_bytes: int = 1 << 20
    """For standard output, which carries the answers, and for standard error; a program that writes more is stopped."""
    files_mb: int = 32
    """Size of its /tmp, the only place it can write to."""
    total_seconds: float = 80.0
    """CPU of all its processes for all tests."""
    idle_seconds: float = 20.0
    """Time in which it neither computes nor waits for a CPU, for all tests: it sleeps, or waits for itself."""


@dataclass(frozen=True)
class ProgramOutcome:
    """How a program ended, and what it produced.

    >>> ProgramOutcome("crashed", detail="ZeroDivisionError: division by zero").answers
    ()
    """

    ending: Ending
    answers: tuple[Json, ...] = ()
    """One per call that returned, in order, in wire form (`driver.py`)."""
    stdout: bytes = b""
    """Its standard output; empty for calls."""
    detail: str = ""
    """A message: the end of its standard error, or the limit it exceeded."""
    seconds: float = 0.0
    """The CPU it used, as it counts against the limits."""
    idle_seconds: float = 0.0


class Sandbox(Protocol):
    """Runs programs. A hosted sandbox implements these two methods and is chosen as `module:factory`."""

    def call(self, program: str, function: str, calls: Sequence[Arguments], limits: SandboxLimits) -> ProgramOutcome:
        """Run the program, then call one of its functions with each of the arguments in turn."""
        ...

    def run(self, program: str, stdin: bytes, limits: SandboxLimits) -> ProgramOutcome:
        """Run the program as a script with that standard input; it `finished` if it exited with status 0."""
        ...


BACKENDS: Final[Mapping[str, str]] = {
    "bubblewrap": "offbeat.sandbox.bubblewrap:Bubblewrap",
    "bubblewrap-without-cgroups": "offbeat.sandbox.bubblewrap:without_cgroups",
}
"""Backend name → factory. Any other is `module:factory`, a function without arguments that returns a `Sandbox`."""


@cache
def open_sandbox(backend: str = "bubblewrap") -> Sandbox:
    """Open a backend and test that it works on this machine. Each process opens it once.

    >>> open_sandbox("docker")
    Traceback (most recent call last):
    ...
    offbeat.errors.SandboxMissing: there is no sandbox 'docker'; use 'bubblewrap', ...
    """
    target = BACKENDS.get(backend, backend)
    if ":" not in target:
        known = ", ".join(map(repr, BACKENDS))
        raise SandboxMissing(f"there is no sandbox {backend!r}; use {known}, or 'module:factory' for your own")
    return cast("Sandbox", resolve(target)())
