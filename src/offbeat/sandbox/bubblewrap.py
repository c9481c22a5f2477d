"""The sandbox of this machine: bubblewrap, a system call filter, control groups, and a user id for each slot.

A program finds an interpreter with its standard library, the system's libraries, /dev/null and an empty /tmp: no
network, no /proc, no environment, no other programs, nothing else to read, nothing else to write. Process 1 of its
namespace is bwrap's own, out of its reach: when the program ends, or bwrap, or whoever started bwrap, process 1 ends,
and with it every process of the program.

    sh (enters the control group) → bwrap (namespaces, mounts, filter) → setpriv (the slot's user) → python -I -S

Root gets all of it. Any other user gets the same through a user namespace, with two things lost: programs run as that
user rather than as one of their own for each slot, and control groups must have been delegated (`cgroups.py`).
"""

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from offbeat.errors import SandboxError, SandboxMissing
from offbeat.sandbox import Arguments, Ending, ProgramOutcome, SandboxLimits, inside
from offbeat.sandbox.cgroups import Cgroup, find_groups
from offbeat.sandbox.conversation import Conversation, Heard
from offbeat.sandbox.jail import assemble, find_jail
from offbeat.sandbox.slots import Slots
from offbeat.types import Json

_START_SECONDS: Final = 30.0
"""For the interpreter to come up; a machine that takes longer cannot judge anybody's program."""
_FAREWELL_SECONDS: Final = 5.0
_STARTER_PROCESSES: Final = 3
"""bwrap twice and the interpreter: not the program's doing."""
_OPEN_FILES: Final = 256
_NO_CORE_DUMP: Final = 1
"""Bytes. Not 0: that would stop core files, but not the pipe to a crash handler of the host."""
_ENTER_GROUP: Final = 'while [ "$1" != -- ]; do echo 0 > "$1/cgroup.procs" || exit 1; shift; done; shift; exec "$@"'

_SELF_TEST: Final = """
import os, socket
def look():
    try:
        network = bool(socket.socket())
    except OSError:
        network = False
    inherited = set(os.environ) - {"PWD", "LC_CTYPE"}  # of bwrap's and the interpreter's own making
    return [os.getuid(), list(inherited), network, os.path.exists("/proc/1"), os.listdir("/tmp")]
"""


class Bubblewrap:
    """Runs programs under bubblewrap; making one proves that it works here, or raises `SandboxMissing`.

    One object serves any number of threads, and processes forked from this one. When a run returns, nothing of it is
    left.
    """

    def __init__(self, *, cgroups: bool = True) -> None:
        """
        Args:
            cgroups: Cap memory and processes of a program as a whole. Without, each process is capped for itself.
        """
        self._root = os.getuid() == 0
        self._jail = find_jail(root=self._root)
        self._filter = assemble()
        self._driver = inside.compiled()
        self._groups = find_groups() if cgroups else None
        self._slots = Slots()
        self._prove()

    def call(self, program: str, function: str, calls: Sequence[Arguments], limits: SandboxLimits) -> ProgramOutcome:
        """See `Sandbox.call`. After its last answer a program is stopped, whatever it still has in mind."""
        answers: list[Json] = []
        with self._started(program, function, limits) as running:
            for arguments in calls:
                running.pipes.send(inside.frame(arguments))
                heard, line = running.line()
                if heard != "enough":
                    return running.outcome(heard, tuple(answers))
                try:
                    answers.append(json.loads(line))
                except (ValueError, RecursionError):  # the program wrote to the line itself
                    return running.ended("crashed", tuple(answers), detail=f"not an answer: {line[:80]!r}")
            return running.ended("finished", tuple(answers))

    def run(self, program: str, stdin: bytes, limits: SandboxLimits) -> ProgramOutcome:
        """See `Sandbox.run`."""
        with self._started(program, None, limits) as running:
            running.pipes.send(stdin)
            running.pipes.hang_up()
            return running.outcome(running.pipes.listen(lambda: False, running.until))

    @contextmanager
    def _started(self, program: str, function: str | None, limits: SandboxLimits) -> Iterator["_Running"]:
        """A program about to run, in a slot of its own; afterwards nothing is left of it."""
        with self._slots.one() as slot:
            group = self._capped(slot.number, limits)
            with self._spawned(slot.uid, group, limits) as process, Conversation(process, limits.output_bytes) as pipes:
                running = _Running(process, pipes, group, script=function is None)
                try:
                    pipes.send(self._driver + inside.frame((program, function, self._own_limits(limits))))
                    running.start(limits.seconds)
                    yield running
                finally:
                    running.end()

    def _capped(self, slot: int, limits: SandboxLimits) -> Cgroup | None:
        """The slot's group, empty, with the limits set."""
        if self._groups is None:
            return None
        try:
            group = self._groups.group(f"slot-{slot}")
            group.kill()  # left by somebody who died
            group.cap(limits.memory_mb << 20, limits.processes + _STARTER_PROCESSES)
        except OSError as error:
            raise SandboxError(f"the control group of slot {slot} could not be set up: {error}") from error
        return group

    def _spawned(self, uid: int, group: Cgroup | None, limits: SandboxLimits) -> "subprocess.Popen[bytes]":
        # The filter gets a pipe of its own each time: a descriptor shared between runs would share its position.
        read, write = os.pipe()
        try:
            with open(write, "wb") as pipe:
                pipe.write(self._filter)
            command = self._jail.command(uid, read, limits.files_mb << 20)
            if group:
                command = ["/bin/sh", "-c", _ENTER_GROUP, "sandbox", *map(str, group.places), "--", *command]
            every = subprocess.PIPE
            # The environment of bwrap is empty too: process 1, which the program can look for, keeps it.
            return subprocess.Popen(command, stdin=every, stdout=every, stderr=every, env={}, pass_fds=[read])
        except OSError as error:
            raise SandboxError(f"the sandbox could not be started: {error}") from error
        finally:
            os.close(read)

    def _own_limits(self, limits: SandboxLimits) -> dict[str, int]:
        own = {"RLIMIT_CORE": _NO_CORE_DUMP, "RLIMIT_NOFILE": _OPEN_FILES}
        if self._groups is None:
            own |= {"RLIMIT_AS": limits.memory_mb << 20, "RLIMIT_NPROC": limits.processes + _STARTER_PROCESSES}
        return own

    def _prove(self) -> None:
        """Look around from inside before anything untrusted does."""
        try:
            seen = self.call(_SELF_TEST, "look", [((), {})], SandboxLimits(seconds=_START_SECONDS))
        except SandboxError as error:
            raise SandboxMissing(
                f"bubblewrap is installed but does not work here: {error}. In a container it needs --privileged (or "
                "--cap-add SYS_ADMIN and --security-opt seccomp=unconfined); for users other than root the kernel must "
                "allow user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0 on Ubuntu)"
            ) from error
        uid, *rest = seen.answers[0] if seen.answers and isinstance(seen.answers[0], list) else [None]
        if uid == 0 or rest != [[], False, False, []]:
            raise SandboxMissing(f"the sandbox does not isolate: from inside it looks like {seen}")


def without_cgroups() -> Bubblewrap:
    """For machines where no control group can be made: a program that spreads over many processes can use
    `SandboxLimits.memory_mb` in each of them."""
    return Bubblewrap(cgroups=False)


class _Running:
    """One program in its slot."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", pipes: Conversation, group: Cgroup | None, *, script: bool
    ) -> None:
        self.pipes = pipes
        self.until = self._since = 0.0
        self._process = process
        self._group = group
        self._script = script
        self._before = group.out_of_memory() if group else None

    def start(self, seconds: float) -> None:
        """Wait for the driver; the program's clock starts now."""
        heard, line = self.line(time.monotonic() + _START_SECONDS)
        if line + b"\n" != inside.READY:
            self.end()
            what = {"late": f"not up after {_START_SECONDS:.0f} s"}.get(heard, f"status {self._process.returncode}")
            raise SandboxError(f"the sandbox did not start ({what}): {self._errors()}")
        self._since = time.monotonic()
        self.until = self._since + seconds

    def line(self, until: float | None = None) -> tuple[Heard, bytes]:
        """The next line it sends."""
        heard = self.pipes.listen(lambda: b"\n" in self.pipes.received, self.until if until is None else until)
        line, _, rest = self.pipes.received.partition(b"\n")
        if heard == "enough":
            self.pipes.received = rest
        return heard, bytes(line)

    def outcome(self, heard: Heard, answers: tuple[Json, ...] = ()) -> ProgramOutcome:
        """What became of a program that has stopped talking."""
        stdout = bytes(self.pipes.received) if self._script else b""
        if heard == "flood":
            return self.ended("output", answers, detail="it sent more than it may")
        try:
            # It may have closed its outputs and still be running.
            status = self._process.wait(0 if heard == "late" else max(self.until - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            return self.ended("timeout", answers, stdout, "its time was up")
        if status == 0 and self._script:
            return self.ended("finished", (), stdout)
        if self._starved():
            return self.ended("memory", answers, stdout, "it used more memory than it may")
        if status < 0:  # bwrap itself, which nothing inside can reach
            raise SandboxError(f"somebody outside killed the sandbox (status {status}): {self._errors()}")
        return self.ended("crashed", answers, stdout, self._errors() or f"it ended with status {status}")

    def ended(
        self, ending: Ending, answers: tuple[Json, ...] = (), stdout: bytes = b"", detail: str = ""
    ) -> ProgramOutcome:
        """What it did, with the time it took."""
        return ProgramOutcome(ending, answers, stdout, detail, time.monotonic() - self._since)

    def end(self) -> None:
        """Kill everything in the slot, and wait for it."""
        inner = self._inner()
        for pid in inner:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # and with process 1 all the others
        try:
            # bwrap then buries its child and leaves; killed first, it would leave a zombie to the machine's init.
            self._process.wait(_FAREWELL_SECONDS if inner else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if self._group:
            self._group.kill()
        self._process.wait()

    def _inner(self) -> list[int]:
        """Process 1 of the sandbox, as it is called outside; none where it has not come up, or is gone."""
        pid = self._process.pid
        try:
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return []

    def _starved(self) -> bool:
        """Whether its own cap made the kernel kill a process of it; where the whole machine ran out, nobody knows."""
        if not self._group or not self._before:
            return False
        now = self._group.out_of_memory()
        if now.kills == self._before.kills:
            return False
        if now.limit_hits == self._before.limit_hits:
            raise SandboxError("the machine ran out of memory and the kernel killed a process of the sandbox")
        return True

    def _errors(self) -> str:
        return self.pipes.errors.decode(errors="replace").strip()
