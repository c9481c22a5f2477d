"""Stands outside the sandbox and sees whether anything came out: secrets planted, doors watched, bodies counted."""

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
from offbeat.sandbox.slots import FIRST_UID, MOST

ALLOWED_LATENESS = 5.0
"""Seconds over the limit until a run has returned, on a crowded machine."""


@dataclass
class Witness:
    """The house: what attackers are told of it (`facts`), and what has changed since it was set up."""

    folder: Path
    secret: str = field(default_factory=lambda: secrets.token_hex(16))
    token: str = field(default_factory=lambda: secrets.token_hex(8))
    signals: list[int] = field(default_factory=list)
    sockets: dict[str, socket.socket] = field(default_factory=dict)
    neighbours: "list[subprocess.Popen[bytes]]" = field(default_factory=list)

    @property
    def facts(self) -> dict[str, object]:
        """All that an attacker could wish to know."""
        return {
            "SECRET_FILE": self.folder / "secret.txt",
            "OPEN_FOLDER": self.folder / "open",
            "TESTS_FILE": self.folder / "tests.json",
            "REPOSITORY": ROOT,
            "SITE_PACKAGES": sysconfig.get_path("stdlib") + "/site-packages",
            "PARENT": os.getpid(),
            "NEIGHBOUR": self.neighbours[0].pid,
            "PORT": self.sockets["tcp"].getsockname()[1],
            "ABSTRACT": f"offbeat-{self.token}",
            "UNIX_SOCKET": self.folder / "open" / "socket",
            "TOKEN": self.token,
        }

    def set_up(self, slots: int) -> None:
        """Plant the secrets, open the doors, and put a neighbour beside each slot, with the slot's own user id."""
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
            self.neighbours.append(subprocess.Popen(["sleep", "100000"], env={}, start_new_session=True, **user))  # type: ignore[call-overload]

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

    def house(self) -> dict[str, object]:
        """What an attack may not change."""
        return {
            "tests": hashlib.sha256((self.folder / "tests.json").read_bytes()).hexdigest(),
            "open folder": sorted(os.listdir(self.folder / "open")),
            "files of slots' users": sorted(_belonging_to_slots(["/tmp", "/dev/shm", "/var/tmp", "/run", "/dev"])),
            "host name": socket.gethostname(),
            "shared memory": _shared_memory_of_slots(),
            "/dev/null": os.stat("/dev/null").st_mode,
            "neighbours": [self._state(neighbour.pid) for neighbour in self.neighbours],
            "doors": [name for name in self.sockets if self._visited(name)],
            "signals": list(self.signals),
            "core files": sorted(str(path) for path in Path.cwd().glob("core*")),
        }

    def _state(self, pid: int) -> str:
        """Alive and not stopped is 'S'; niceness beside it."""
        with contextlib.suppress(FileNotFoundError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            return f"{fields[0]} {fields[16]}"
        return "gone"

    def _visited(self, name: str) -> bool:
        try:
            self.sockets[name].recv(100) if name == "udp" else self.sockets[name].accept()[0].close()
        except BlockingIOError:
            return False
        return True

    def left_over(self) -> list[int]:
        """Processes of slots' users that are not neighbours."""
        known = {neighbour.pid for neighbour in self.neighbours}
        return [pid for pid in _processes_of_slots() if pid not in known]

    def evidence(
        self, outcome: ProgramOutcome, elapsed: float, limits: SandboxLimits, before: dict[str, object]
    ) -> list[str]:
        """Everything that says the attack got somewhere."""
        said = outcome.stdout.decode(errors="replace") + outcome.detail + repr(outcome.answers)
        found = [line for line in said.splitlines() if line.startswith("ESCAPED")]
        if self.secret in said:
            found.append("the secret was read")
        if elapsed > limits.seconds + ALLOWED_LATENESS:
            found.append(f"it held its slot for {elapsed:.1f} s")
        if len(outcome.stdout) > limits.output_bytes + (1 << 17):
            found.append(f"{len(outcome.stdout)} bytes of output were kept")
        now = self.house()
        return found + [f"{what} changed: {now[what]}" for what in before if now[what] != before[what]]

    def tear_down(self) -> None:
        """Take the house down."""
        for neighbour in self.neighbours:
            neighbour.kill()
            neighbour.wait()
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
    """A house for the length of the block. Signals to this process are noted, not obeyed."""
    with tempfile.TemporaryDirectory(prefix="offbeat-witness-") as name:
        house = Witness(Path(name))

        def note(number: int, _: FrameType | None) -> None:
            house.signals.append(number)

        previous = signal.signal(signal.SIGUSR1, note)
        try:
            house.set_up(slots)
            time.sleep(0.1)  # until the neighbours sleep
            yield house
        finally:
            house.tear_down()
            signal.signal(signal.SIGUSR1, previous)


@dataclass(frozen=True)
class Unconfined:
    """What the sandbox is measured against: nothing at all. For attacks that are harmless, to see the witness see."""

    uid: int

    def call(self, program: str, function: str, calls: Sequence[Arguments], limits: SandboxLimits) -> ProgramOutcome:
        """Attacks are scripts."""
        raise NotImplementedError

    def run(self, program: str, stdin: bytes, limits: SandboxLimits) -> ProgramOutcome:
        """Run it as that user, and be patient."""
        # What only root can read is imported before the user changes.
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
