"""Model-written Python, run where it can do no harm: the protocol, what comes out, and how a backend is chosen.

Two rules hold for every backend. It fails closed: where it cannot isolate, it raises `SandboxMissing` before anything
runs. And it tells two failures apart: what a program did (wrong, crashed, too slow, too large) is a
`ProgramOutcome`; what went wrong with the sandbox itself is a `SandboxError`, so that no completion is scored 0
for a fault that is not its own.

Expected results never enter a sandbox. A program sees the arguments of a call when it is called, and whatever it sends
back, by whatever trick, is its answer; the comparison happens outside (`code_tests.py`). It may patch the driver, write
to every descriptor and read all memory within reach: to have its answers accepted it must know them.
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
    """What one program may use. Going over them is the program's failure, and scores 0.

    >>> SandboxLimits(seconds=2.0).memory_mb
    256
    """

    seconds: float = 8.0
    """Wall clock from the moment the interpreter is up. All calls of a program share it."""
    memory_mb: int = 256
    """Of all its processes together, files in /tmp included."""
    processes: int = 64
    """Processes and threads."""
    output_bytes: int = 1 << 20
    """Of answers or of standard output; a program that sends more is stopped."""
    files_mb: int = 32
    """Room in its /tmp, the only place it can write to."""


@dataclass(frozen=True)
class ProgramOutcome:
    """What a program did.

    >>> ProgramOutcome("crashed", detail="ZeroDivisionError: division by zero").answers
    ()
    """

    ending: Ending
    answers: tuple[Json, ...] = ()
    """One per call that returned, in order, in wire form (`inside.py`)."""
    stdout: bytes = b""
    """What it printed; empty for calls."""
    detail: str = ""
    """For people: the end of its standard error, or which limit it hit."""
    seconds: float = 0.0
    """How much of its time it used; starting the sandbox is not its doing."""


class Sandbox(Protocol):
    """A place to run programs in. A hosted one implements these two methods and is chosen as `module:factory`."""

    def call(self, program: str, function: str, calls: Sequence[Arguments], limits: SandboxLimits) -> ProgramOutcome:
        """Define what the program defines, then call a function of it with each of the arguments in turn."""
        ...

    def run(self, program: str, stdin: bytes, limits: SandboxLimits) -> ProgramOutcome:
        """Run the program as a script with that standard input. `finished` means that it exited with status 0."""
        ...


BACKENDS: Final[Mapping[str, str]] = {
    "bubblewrap": "offbeat.sandbox.bubblewrap:Bubblewrap",
    "bubblewrap-without-cgroups": "offbeat.sandbox.bubblewrap:without_cgroups",
}
"""Short names; anything else is `module:factory`, a function without arguments that returns a `Sandbox`."""


@cache
def open_sandbox(backend: str = "bubblewrap") -> Sandbox:
    """The backend of that name, proved to work on this machine; one per process.

    >>> open_sandbox("docker")
    Traceback (most recent call last):
    ...
    offbeat.errors.SandboxMissing: no sandbox is called 'docker'; there are 'bubblewrap', ...
    """
    target = BACKENDS.get(backend, backend)
    if ":" not in target:
        known = ", ".join(map(repr, BACKENDS))
        raise SandboxMissing(f"no sandbox is called {backend!r}; there are {known}, and 'module:factory' for your own")
    return cast("Sandbox", resolve(target)())
