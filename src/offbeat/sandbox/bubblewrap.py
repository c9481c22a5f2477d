"""The local sandbox: bubblewrap, a system call filter, control groups, and a user id for each slot.

A program finds an interpreter with its standard library, the system's libraries, /dev/null and an empty /tmp: no
network, no /proc, no environment, no other programs, nothing else to read or write. Process 1 of its namespace belongs
to bwrap, out of the program's reach. When the program, bwrap, or the process that started bwrap ends, process 1 ends,
and with it every process of the program.

    sh (enters the control group) → bwrap (namespaces, mounts, filter) → setpriv (the slot's user) → python -I -S

Root gets all of this. Other users get it through a user namespace, with two differences: programs run as that user, not
as one user per slot, and the control groups must be delegated (`cgroups.py`).

Programs pay for CPU, not for waiting (`meter.py`):

- Each test has its own limit, `SandboxLimits.seconds`: CPU of all processes of the program. All tests together have
  another, `total_seconds`. What sandbox and interpreter need to start and to end does not count.
- A program that neither computes nor ends, because it sleeps or waits for itself, is stopped after `idle_seconds` in
  all tests. Time in which it is ready to run and has no CPU does not count.
- Where it had to wait for a CPU (`Usage.price`), all this counts by two thirds: beside others, a CPU is slower.
- The clock on the wall says nothing about a program. It only ends attempts on a machine that is too busy.

What may be the machine's fault is asked again, one program at a time: the sandbox failed, the program was starved, ran
out of memory or crashed for lack of resources. Then the program has failed, or a `SandboxError` says that it has not.
"""

import fcntl
import json
import os
import re
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

from offbeat.errors import SandboxError, SandboxMissing, SandboxStarved
from offbeat.sandbox import Arguments, Ending, ProgramOutcome, SandboxLimits, driver
from offbeat.sandbox.cgroups import Cgroup, Slots, find_groups
from offbeat.sandbox.jail import assemble, find_jail
from offbeat.sandbox.meter import SAMPLE_SECONDS, TreeMeter, Usage
from offbeat.types import Json

_CHUNK: Final = 1 << 16
_ERRORS_KEPT: Final = 2000
"""Bytes at the end of standard error to keep for messages."""

ReadEnd = Literal["done", "closed", "timeout", "overflow"]


class ProcessPipes:
    """Sends to a process without blocking, and reads at most `max_bytes` from each of its outputs.

    >>> pipe = subprocess.PIPE
    >>> process = subprocess.Popen(["head", "-c5"], stdin=pipe, stdout=pipe, stderr=pipe)
    >>> with process, ProcessPipes(process, max_bytes=100) as head:
    ...     head.send(b"hello, you")
    ...     head.read_until(lambda: False, time.monotonic() + 9), bytes(head.received)
    ('closed', b'hello')
    """

    def __init__(self, process: "subprocess.Popen[bytes]", max_bytes: int) -> None:
        if process.stdin is None or process.stdout is None or process.stderr is None:
            raise ValueError("the process needs all three pipes: start it with stdin, stdout and stderr = PIPE")
        self._stdin, self._stdout, self._stderr = process.stdin, process.stdout, process.stderr
        self._max_bytes = max_bytes
        self._outgoing = bytearray()
        self._bytes_read = {self._stdout.fileno(): 0, self._stderr.fileno(): 0}
        self.received = bytearray()
        self.errors = bytearray()
        self._selector = selectors.DefaultSelector()
        for pipe in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(pipe.fileno(), False)
        for descriptor in self._bytes_read:
            self._selector.register(descriptor, selectors.EVENT_READ)

    def __enter__(self) -> "ProcessPipes":
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        for pipe in (self._stdin, self._stdout, self._stderr):
            pipe.close()

    def send(self, data: bytes) -> None:
        self._outgoing += data
        self._flush()

    def read_until(self, done: Callable[[], bool], until: float) -> ReadEnd:
        """Read and write until `done()`, both outputs are closed, the time is up, or an output is too long."""
        while not done():
            if max(self._bytes_read.values()) > self._max_bytes:
                return "overflow"
            if not self._bytes_read.keys() & self._selector.get_map().keys():
                return "closed"
            left = until - time.monotonic()
            for key, _ in self._selector.select(max(left, 0.0)):
                if key.fd in self._bytes_read:
                    self._read(key.fd)
                else:
                    self._flush()
            if left <= 0 and not done():  # what has arrived counts, however late this process looks
                return "timeout"
        return "done"

    def _flush(self) -> None:
        """Write what fits, and watch standard input only while something is left to write."""
        watched = self._stdin.fileno() in self._selector.get_map()
        try:
            if self._outgoing:
                del self._outgoing[: os.write(self._stdin.fileno(), self._outgoing[:_CHUNK])]
        except BlockingIOError:
            pass
        except BrokenPipeError:  # it reads no more, but its output still counts
            self._outgoing.clear()
        if self._outgoing and not watched:
            self._selector.register(self._stdin, selectors.EVENT_WRITE)
        elif not self._outgoing and watched:
            self._selector.unregister(self._stdin)

    def _read(self, descriptor: int) -> None:
        data = os.read(descriptor, _CHUNK)
        self._bytes_read[descriptor] += len(data)
        if not data:
            self._selector.unregister(descriptor)
        elif descriptor == self._stdout.fileno():
            self.received += data
        else:
            self.errors = (self.errors + data)[-_ERRORS_KEPT:]


_START_SECONDS: Final = 30.0
"""Time for the interpreter to start; a slower machine could not test programs fairly."""
_PATIENCE: Final = (2.0, 4.0, 6.0)
"""How many times all its limits a program may take by the clock, in each attempt."""
_END_CPU: Final = 0.02
"""Seconds that an interpreter and bwrap may need to end."""
_NO_RESOURCES: Final = re.compile("temporarily unavailable|Cannot alloc|MemoryError|new thread|No space|status 137")
_EXIT_SECONDS: Final = 5.0
_STARTER_PROCESSES: Final = 3
"""bwrap twice and the interpreter; they do not count against the program's limit."""
_OPEN_FILES: Final = 256
_NO_CORE_DUMP: Final = 1
"""Bytes. Not 0, because 0 stops core files but not the pipe to a crash handler of the host."""
_ENTER_GROUP: Final = 'while [ "$1" != -- ]; do echo 0 > "$1/cgroup.procs" || exit 1; shift; done; shift; exec "$@"'

_SELF_TEST: Final = """
import os, socket
def look():
    try:
        network = bool(socket.socket())
    except OSError:
        network = False
    inherited = set(os.environ) - {"PWD", "LC_CTYPE"}  # set by bwrap and the interpreter
    return [os.getuid(), list(inherited), network, os.path.exists("/proc/1"), os.listdir("/tmp")]
"""


class Bubblewrap:
    """Runs programs under bubblewrap. The constructor tests that it works here, or raises `SandboxMissing`.

    Threads and forked processes can share one object. After a run, no process and no file of it is left.
    """

    def __init__(self, *, cgroups: bool = True) -> None:
        """
        Args:
            cgroups: Cap memory and processes of a program as a whole; otherwise each process is capped on its own.
        """
        self._root = os.getuid() == 0
        self._jail = find_jail(root=self._root)
        self._filter = assemble()
        self._driver = driver.compiled()
        self._groups = find_groups() if cgroups else None
        self._slots = Slots()
        self._test()

    def call(self, program: str, function: str, calls: Sequence[Arguments], limits: SandboxLimits) -> ProgramOutcome:
        """Implement `Sandbox.call`. After its last answer the program is killed."""
        return self._judged(lambda patience: self._call(program, function, calls, limits, patience))

    def run(self, program: str, stdin: bytes, limits: SandboxLimits) -> ProgramOutcome:
        """Implement `Sandbox.run`."""
        return self._judged(lambda patience: self._run(program, stdin, limits, patience))

    def _judged(self, attempt: Callable[[float], ProgramOutcome]) -> ProgramOutcome:
        """Run a program, and again, one at a time on this machine, if that may be why it failed."""
        first, second, third = _PATIENCE
        with suppress(SandboxError):
            outcome = attempt(first)
            if outcome.ending == "memory":  # frequent, and its second attempt needs no turn
                return attempt(second)
            if not _NO_RESOURCES.search(outcome.detail):
                return outcome
        with self._slots.one_at_a_time():
            with suppress(SandboxError):
                return attempt(second)
            return attempt(third)

    def _call(
        self, program: str, function: str, calls: Sequence[Arguments], limits: SandboxLimits, patience: float
    ) -> ProgramOutcome:
        answers: list[Json] = []
        with self._started(program, function, b"", limits, patience) as running:
            for arguments in calls:
                running.pipes.send(driver.frame(arguments))
                read_end, line = running.read_line()
                if read_end != "done":
                    return running.outcome(read_end, tuple(answers))
                try:
                    answers.append(json.loads(line))
                except (ValueError, RecursionError):  # the program itself wrote to the pipe
                    return running.ended("crashed", tuple(answers), detail=f"not an answer: {line[:80]!r}")
            return running.ended("finished", tuple(answers))

    def _run(self, program: str, stdin: bytes, limits: SandboxLimits, patience: float) -> ProgramOutcome:
        with self._started(program, None, stdin, limits, patience) as running:
            return running.outcome(running.read_until(lambda: False))

    @contextmanager
    def _started(
        self, program: str, function: str | None, stdin: bytes, limits: SandboxLimits, patience: float
    ) -> Iterator["_Running"]:
        """Start a program in its own slot, and kill all of it afterwards."""
        with self._slots.one() as slot, _file_of(stdin) as file:
            group = self._capped_group(slot.number, limits)
            process = self._spawn(slot.uid, group, file, limits)
            with process, ProcessPipes(process, limits.output_bytes) as pipes:
                running = _Running(process, pipes, group, script=function is None)
                try:
                    pipes.send(self._driver + driver.frame((program, function, file, self._process_limits(limits))))
                    running.start(limits, patience)
                    yield running
                finally:
                    running.end()

    def _capped_group(self, slot: int, limits: SandboxLimits) -> Cgroup | None:
        """Return the control group of a slot, empty, with the limits set."""
        if self._groups is None:
            return None
        try:
            group = self._groups.group(f"slot-{slot}")
            group.kill()  # left over from a holder that died
            group.cap(limits.memory_mb << 20, limits.processes + _STARTER_PROCESSES)
            group.share_cpu()
        except OSError as error:
            raise SandboxError(f"the control group of slot {slot} could not be set up: {error}") from error
        return group

    def _spawn(self, uid: int, group: Cgroup | None, file: int, limits: SandboxLimits) -> "subprocess.Popen[bytes]":
        # The filter gets a new pipe each time: runs that share a descriptor would share its position.
        read, write = os.pipe()
        try:
            with open(write, "wb") as filter_pipe:
                filter_pipe.write(self._filter)
            command = self._jail.command(uid, read, limits.files_mb << 20)
            if group:
                command = ["/bin/sh", "-c", _ENTER_GROUP, "sandbox", *map(str, group.places), "--", *command]
            pipe = subprocess.PIPE
            # The environment of bwrap is empty too: process 1, which the program may look at, keeps it.
            return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env={}, pass_fds=[read, file])
        except OSError as error:
            raise SandboxError(f"the sandbox could not be started: {error}") from error
        finally:
            os.close(read)

    def _process_limits(self, limits: SandboxLimits) -> dict[str, int]:
        rlimits = {"RLIMIT_CORE": _NO_CORE_DUMP, "RLIMIT_NOFILE": _OPEN_FILES}
        if self._groups is None:
            rlimits |= {"RLIMIT_AS": limits.memory_mb << 20, "RLIMIT_NPROC": limits.processes + _STARTER_PROCESSES}
        return rlimits

    def _test(self) -> None:
        """Run a trusted program that checks the isolation from inside, before anything untrusted runs."""
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
            raise SandboxMissing(f"the sandbox does not isolate: a test program inside it saw {seen}")


@contextmanager
def _file_of(data: bytes) -> Iterator[int]:
    """Open a file in memory for the standard input of a script: scripts seek in it, map it, and ask for its size.

    A program cannot make one. It can change this one but not enlarge it, which no limit of a process would count.
    """
    with open(os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "wb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_SEAL)
        yield file.fileno()


def without_cgroups() -> Bubblewrap:
    """Make a sandbox for a machine without control groups.

    There a program can use `SandboxLimits.memory_mb` in each of its processes.
    """
    return Bubblewrap(cgroups=False)


class _Running:
    """A program in its slot."""

    def __init__(
        self, process: "subprocess.Popen[bytes]", pipes: ProcessPipes, group: Cgroup | None, *, script: bool
    ) -> None:
        self.pipes = pipes
        self._process = process
        self._group = group
        self._script = script
        self._oom_before = group.out_of_memory() if group else None
        self._searched = 0
        self._meter: TreeMeter
        self._usage = Usage(0.0, 0.0, 0.0)
        self._cpu_before: float | None = 0.0

    def start(self, limits: SandboxLimits, patience: float) -> None:
        """Wait for the driver, then start to count what the program uses."""
        read_end = self.pipes.read_until(self._has_line, time.monotonic() + _START_SECONDS)
        line = self._take_line()
        if line + b"\n" != driver.READY:
            self.end()
            if read_end == "timeout":
                raise SandboxStarved(f"the sandbox was not ready after {_START_SECONDS:.0f} s: {self._errors()}")
            raise SandboxError(f"the sandbox did not start (status {self._process.returncode}): {self._errors()}")
        self._meter = TreeMeter(
            self._process.pid, self._group.cpu_seconds if self._group and self._group.cpu_account else None
        )
        self._limits, self._longest = limits, patience * (limits.total_seconds + limits.idle_seconds)
        self._next_look = time.monotonic() + SAMPLE_SECONDS

    def read_line(self) -> tuple[ReadEnd, bytes]:
        """Read the next line of its standard output, which ends a test. The next one pays from the next look on."""
        read_end = self.read_until(self._has_line)
        self._cpu_before = None
        return read_end, self._take_line() if read_end == "done" else b""

    def read_until(self, done: Callable[[], bool]) -> ReadEnd:
        """Read until `done()`, its outputs are closed or too long, or the program has used up a limit."""
        while (read_end := self.pipes.read_until(done, self._next_look)) == "timeout":
            if self._used_up():
                break
        return read_end

    def _used_up(self) -> bool:
        """Look at the program: True if it has reached one of its limits."""
        self._usage = usage = self._meter.read()
        self._next_look = time.monotonic() + SAMPLE_SECONDS
        if self._cpu_before is None:
            self._cpu_before = usage.cpu
        limits, price = self._limits, usage.price
        test, total, idle = (price * used for used in (usage.cpu - self._cpu_before, usage.cpu, usage.idle))
        used_up = test >= limits.seconds or total >= limits.total_seconds or idle >= limits.idle_seconds
        if not used_up and usage.wall >= self._longest:
            raise SandboxStarved(f"the machine was too busy to judge a program: it received {usage}; run fewer at once")
        return used_up

    def _has_line(self) -> bool:
        found = self.pipes.received.find(
            b"\n", self._searched
        )  # from where the last search ended: it may be called often
        self._searched = found if found >= 0 else len(self.pipes.received)
        return found >= 0

    def _take_line(self) -> bytes:
        line, _, self.pipes.received = self.pipes.received.partition(b"\n")
        self._searched = 0
        return bytes(line)

    def outcome(self, read_end: ReadEnd, answers: tuple[Json, ...] = ()) -> ProgramOutcome:
        """Find out why the program sends no more."""
        stdout = bytes(self.pipes.received) if self._script else b""
        if read_end == "overflow":
            return self.ended("output", answers, detail="it wrote more than its limit")
        status = self._process.poll() if read_end == "timeout" else self._exit_status()
        if status is None:
            return self.ended("timeout", answers, stdout, f"its time was up: {self._usage}")
        if status == 0 and self._script:
            return self.ended("finished", (), stdout)
        if self._ran_out_of_memory():
            return self.ended("memory", answers, stdout, "it used more memory than its limit")
        if status < 0:  # bwrap itself was killed, and nothing inside can reach it
            raise SandboxError(f"the sandbox was killed from outside (status {status}): {self._errors()}")
        return self.ended("crashed", answers, stdout, self._errors() or f"it ended with status {status}")

    def ended(
        self, ending: Ending, answers: tuple[Json, ...] = (), stdout: bytes = b"", detail: str = ""
    ) -> ProgramOutcome:
        cpu = max(0.0, self._meter.cpu() - (_END_CPU if self._process.returncode is not None else 0.0))
        price = self._usage.price
        return ProgramOutcome(ending, answers, stdout, detail, price * cpu, price * self._usage.idle)

    def _exit_status(self) -> int | None:
        """Return its status, or None if a limit is used up: it may have closed its outputs and still be running."""
        while True:
            try:
                return self._process.wait(SAMPLE_SECONDS)
            except subprocess.TimeoutExpired:
                if self._used_up():
                    return None

    def end(self) -> None:
        """Kill everything in the slot, and wait until it has ended."""
        inside = self._inside_pids()
        for pid in inside:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # all other processes end with process 1
        try:
            # bwrap then reaps its child and exits. Killed first, it would leave a zombie to the machine's init.
            self._process.wait(_EXIT_SECONDS if inside else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()
        if self._group:
            self._group.kill()
        self._process.wait()

    def _inside_pids(self) -> list[int]:
        """Return the outside pid of the sandbox's process 1; empty if it has not started or has ended."""
        pid = self._process.pid
        try:
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return []

    def _ran_out_of_memory(self) -> bool:
        """True if the kernel killed a process because of the group's limit; `SandboxError` if the machine ran out."""
        if not self._group or not self._oom_before:
            return False
        now = self._group.out_of_memory()
        if now.kills == self._oom_before.kills:
            return False
        if now.limit_hits == self._oom_before.limit_hits:
            raise SandboxError("the machine ran out of memory and the kernel killed a process of the sandbox")
        return True

    def _errors(self) -> str:
        return self.pipes.errors.decode(errors="replace").strip()
