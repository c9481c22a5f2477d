"""Watch the sandbox from outside: planted secrets, listening sockets, neighbor processes and files must stay intact."""

import contextlib
import hashlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from lab.figures import ROOT
from offbeat.sandbox import Arguments, ProgramOutcome, SandboxLimits
from offbeat.sandbox.cgroups import FIRST_UID, MOST

ALLOWED_LATENESS = 5.0
"""Seconds over its limit after which a run must have returned, on a busy machine."""
HELD = "it held its slot"
"""How the evidence begins if an attack lasts longer than that."""


@dataclass
class Witness:
    """The machine around the sandbox: what attackers know of it (`facts`), and what they may not change (`state`)."""

    folder: Path
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    signals: list[int] = field(default_factory=list)
    sockets: dict[str, socket.socket] = field(default_factory=dict)
    neighbors: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    """Processes with the user id of a slot, one for each slot."""

    @property
    def facts(self) -> dict[str, object]:
        """Values for the placeholders of an attack."""
        return {
            "SECRET_FILE": self.folder / "secret.txt",
            "OPEN_FOLDER": self.folder / "open",
            "TESTS_FILE": self.folder / "tests.json",
            "REPOSITORY": ROOT,
            "SITE_PACKAGES": sysconfig.get_path("stdlib") + "/site-packages",
            "PARENT": os.getpid(),
            "NEIGHBOR": self.neighbors[0].pid,
            "PORT": self.sockets["tcp"].getsockname()[1],
            "ABSTRACT": f"offbeat-{self.token}",
            "UNIX_SOCKET": self.folder / "open" / "socket",
            "TOKEN": self.token,
        }

    def set_up(self, slots: int) -> None:
        """Plant the secrets, open the sockets, and start a neighbor process with the user id of each slot."""
        os.environ["OFFBEAT_WITNESS_SECRET"] = self.secret
        self.folder.chmod(0o755)
        (self.folder / "secret.txt").write_text(self.secret)
        (self.folder / "tests.json").write_text(f'["assert f() == {self.secret!r}"]')
        (self.folder / "tests.json").chmod(0o666)
        (self.folder / "open").mkdir()
        (self.folder / "open").chmod(0o777)
        self._listen()
        for number in range(slots):
            user = {"user": FIRST_UID + number, "group": FIRST_UID + number} if os.getuid() == 0 else {}
            self.neighbors.append(subprocess.Popen(["sleep", "100000"], env={}, start_new_session=True, **user))  # type: ignore[call-overload]

    def _listen(self) -> None:
        families = {"tcp": socket.AF_INET, "udp": socket.AF_INET, "abstract": socket.AF_UNIX, "unix": socket.AF_UNIX}
        for name, family in families.items():
            self.sockets[name] = socket.socket(family, socket.SOCK_DGRAM if name == "udp" else socket.SOCK_STREAM)
        self.sockets["tcp"].bind(("127.0.0.1", 0))
        self.sockets["udp"].bind(self.sockets["tcp"].getsockname())
        self.sockets["abstract"].bind(f"\0offbeat-{self.token}")
        self.sockets["unix"].bind(str(self.folder / "open" / "socket"))
        (self.folder / "open" / "socket").chmod(0o777)
        for name, listener in self.sockets.items():
            listener.setblocking(False)
            if name != "udp":
                listener.listen()

    def state(self) -> dict[str, object]:
        """Return everything that an attack may not change."""
        return {
            "tests": hashlib.sha256((self.folder / "tests.json").read_bytes()).hexdigest(),
            "open folder": sorted(os.listdir(self.folder / "open")),
            "files of slots' users": sorted(_belonging_to_slots(["/tmp", "/dev/shm", "/var/tmp", "/run", "/dev"])),
            "host name": socket.gethostname(),
            "shared memory": _shared_memory_of_slots(),
            "/dev/null": os.stat("/dev/null").st_mode,
            "neighbors": [self._process_state(neighbor.pid) for neighbor in self.neighbors],
            "connected sockets": [name for name in self.sockets if self._connected(name)],
            "signals": list(self.signals),
            "core files": sorted(str(path) for path in Path.cwd().glob("core*")),
        }

    def _process_state(self, pid: int) -> str:
        """Return the state, which is 'S' for a process that is alive and not stopped, and the niceness."""
        with contextlib.suppress(FileNotFoundError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return f"{fields[0]} {fields[16]}"
        return "gone"

    def _connected(self, name: str) -> bool:
        try:
            self.sockets[name].recv(100) if name == "udp" else self.sockets[name].accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def left_over(self) -> list[int]:
        """Return the processes of slot users that are not neighbors."""
        known = {neighbor.pid for neighbor in self.neighbors}
        return [pid for pid in _processes_of_slots() if pid not in known]

    def evidence(
        self, outcome: ProgramOutcome, elapsed: float, limits: SandboxLimits, before: dict[str, object]
    ) -> list[str]:
        """Return every sign that the attack succeeded."""
        output = outcome.stdout.decode(errors="replace") + outcome.detail + repr(outcome.answers)
        found = [line for line in output.splitlines() if line.startswith("ESCAPED")]
        if self.secret in output:
            found.append("the secret was read")
        if elapsed > limits.seconds + ALLOWED_LATENESS:
            found.append(f"{HELD} for {elapsed:.1f} s")
        if len(outcome.stdout) > limits.output_bytes + (1 << 17):
            found.append(f"{len(outcome.stdout)} bytes of output were kept")
        now = self.state()
        return found + [f"{what} changed: {now[what]}" for what in before if now[what] != before[what]]

    def tear_down(self) -> None:
        for neighbor in self.neighbors:
            neighbor.kill()
            neighbor.wait()
        for listener in self.sockets.values():
            listener.close()
        del os.environ["OFFBEAT_WITNESS_SECRET"]


def _belonging_to_slots(folders: Sequence[str]) -> Iterator[str]:
    for folder in folders:
        for entry in os.scandir(folder):
            with contextlib.suppress(FileNotFoundError):
                if FIRST_UID <= entry.stat(follow_symlinks=False).st_uid < FIRST_UID + MOST:
                    yield entry.path


def _shared_memory_of_slots() -> list[str]:
    _, *rows = Path("/proc/sysvipc/shm").read_text().splitlines()
    return [row for row in rows if FIRST_UID <= int(row.split()[7]) < FIRST_UID + MOST]


def _processes_of_slots() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            if entry.name.isdigit() and FIRST_UID <= entry.stat().st_uid < FIRST_UID + MOST:
                yield int(entry.name)


@contextlib.contextmanager
def witness(slots: int) -> Iterator[Witness]:
    """Provide a witness. SIGUSR1 to this process is recorded and does not end it."""
    with tempfile.TemporaryDirectory(prefix="offbeat-witness-") as name:
        observer = Witness(Path(name))

        def note(number: int, _: FrameType | None) -> None:
            observer.signals.append(number)

        previous = signal.signal(signal.SIGUSR1, note)
        try:
            observer.set_up(slots)
            time.sleep(0.1)  # until the neighbors sleep
            yield observer
        finally:
            observer.tear_down()
            signal.signal(signal.SIGUSR1, previous)


@dataclass(frozen=True)
class Unconfined:
    """A stand-in for the sandbox that confines nothing. With it, the witness must detect every harmless attack."""

    uid: int

    def call(self, program: str, function: str, calls: Sequence[Arguments], limits: SandboxLimits) -> ProgramOutcome:
        raise NotImplementedError("attacks are scripts: use run()")

    def run(self, program: str, stdin: bytes, limits: SandboxLimits) -> ProgramOutcome:
        """Run the program as the user `uid`, somewhat longer than the limit."""
        # Import before the user changes: only root can read some of the modules.
        start = f"import ctypes, os, signal, socket, sys, time; os.setuid({self.uid})\n"
        process = subprocess.Popen(
            [sys.executable, "-c", start + program], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        with process:
            try:
                printed, _ = process.communicate(timeout=limits.seconds + ALLOWED_LATENESS + 0.5)
            except subprocess.TimeoutExpired:
                process.kill()
                printed, _ = process.communicate()
        return ProgramOutcome("finished", stdout=printed)
