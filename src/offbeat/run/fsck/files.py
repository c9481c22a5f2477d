"""The small files of a run: configuration, environment, record, index and tokenizer."""

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from offbeat.config import parse
from offbeat.config.parsing import translate
from offbeat.errors import ConfigError
from offbeat.events import EventKind
from offbeat.experience.index_files import damaged_files
from offbeat.run.directory import RunDirectory, environment
from offbeat.run.fsck.findings import PartFinding, Remedy
from offbeat.run.journal import read
from offbeat.run.learner import fixed_settings, recorded_settings
from offbeat.storage.files import write_atomically
from offbeat.trainer.checkpoint import Checkpoint, differences
from offbeat.types import Json


def check_config(directory: RunDirectory, newest: Checkpoint | None) -> PartFinding:
    """Check `config.json` by itself and against the newest whole checkpoint, from which it can be written again."""
    name = "config.json"
    problem = ""
    try:
        config = parse(translate(_object(directory.path / name)))
        if newest is not None:
            problem = "; ".join(differences(fixed_settings(config), recorded_settings(newest.manifest.config)))
            problem = problem and f"it differs from the checkpoint of step {newest.step}: {problem}"
    except (OSError, ValueError, ConfigError) as error:
        problem = _reason(error)
    if not problem:
        return PartFinding(name, "every setting is valid")
    if newest is None:
        return PartFinding(
            name, f"{problem}. Restore it from a copy: without a checkpoint nothing else holds it", Remedy.PERSON
        )

    def repair() -> str:
        settings = translate(cast(dict[str, Any], newest.manifest.config))
        asked = [event["steps"] for event in _events(directory) if event.get("kind") == EventKind.ESTIMATED]
        settings["steps"] = max([newest.step, *(steps for steps in asked[-1:] if isinstance(steps, int))])
        _set_aside(directory.path / name)
        _write(directory.path / name, parse(settings).model_dump(mode="json"))
        return "written again from the checkpoint; settings of where the run runs (workers, cluster) are the defaults"

    return PartFinding(name, problem, Remedy.FSCK, repair)


def check_environment(directory: RunDirectory, *, shared: bool) -> PartFinding:
    """Check `environment.json`. `shared` is True if the run's name is in the group ids of a log of several runs."""
    name = "environment.json"
    try:
        if not isinstance(_object(directory.path / name).get("run"), str):
            raise ValueError("it does not name the run")
    except (OSError, ValueError) as error:
        if shared:
            says = f"{_reason(error)}. Restore it from a copy: the run's groups in the shared log carry its name"
            return PartFinding(name, says, Remedy.PERSON)

        def repair() -> str:
            _set_aside(directory.path / name)
            _write(directory.path / name, {"run": secrets.token_hex(4), **environment()})
            return "written again, with a new name and what this machine is"

        return PartFinding(name, _reason(error), Remedy.FSCK, repair)
    return PartFinding(name, "names the run")


def check_record(directory: RunDirectory, newest: Checkpoint | None) -> PartFinding:
    """Check that every line of `events.jsonl` is an event, and that every step of the checkpoint is recorded."""
    name = "events.jsonl"
    try:
        lines = directory.events.read_bytes().splitlines(keepends=True)
    except OSError as error:
        says = f"{_reason(error)}. Restore it from a copy, or move it away: a resume begins a new record"
        return PartFinding(name, says, Remedy.PERSON)
    whole = [line for line in lines if _is_event(line)]
    if len(whole) < len(lines):

        def remove_lines() -> str:
            kept = _set_aside(directory.events)
            write_atomically(directory.events, b"".join(line.rstrip(b"\r\n") + b"\n" for line in whole), durable=True)
            return f"{len(lines) - len(whole)} lines were removed; the file as it was is {kept}"

        return PartFinding(
            name, f"{len(lines) - len(whole)} of {len(lines)} lines are no events", Remedy.FSCK, remove_lines
        )
    steps = {event["step"] for event in map(json.loads, whole) if event["kind"] == EventKind.STEP}
    missing = [step for step in range(1, newest.step + 1) if step not in steps] if newest else []
    if missing:
        some = ", ".join(map(str, missing[:5]))
        says = f"{len(missing)} of {newest.step if newest else 0} steps are not recorded ({some} …)"
        return PartFinding(name, f"{says}. Restore it from a copy; the run can be resumed without them", Remedy.PERSON)
    return PartFinding(name, f"{len(whole)} events, {len(steps)} steps")


def check_leftovers(directory: RunDirectory) -> Iterator[PartFinding]:
    """Check what a resume makes again by itself: the index and the tokenizer."""
    if damaged := damaged_files(directory.index):

        def repair() -> str:
            for path in damaged:
                path.unlink()
            return f"{len(damaged)} files were removed; the next resume reads the log instead"

        yield PartFinding("index", f"{len(damaged)} files do not match their hash", Remedy.FSCK, repair)
    elif directory.index.exists():
        yield PartFinding("index", "every file matches its hash")
    try:
        _object(directory.tokenizer / "tokenizer_config.json")
        for path in sorted(directory.tokenizer.glob("*.json")):
            json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        yield PartFinding("tokenizer", _reason(error), Remedy.RESUME)
    else:
        yield PartFinding("tokenizer", "every file can be read")


def _object(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return content


def _events(directory: RunDirectory) -> list[dict[str, Json]]:
    try:
        return list(read(directory.events))
    except OSError:
        return []


def _is_event(line: bytes) -> bool:
    try:
        event = json.loads(line)
        return isinstance(event, dict) and isinstance(event["step"], int) and isinstance(event["kind"], str)
    except (ValueError, KeyError):
        return False


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(str(error.filename)).name} is missing"
    return f"it cannot be read: {error}"


def _set_aside(path: Path) -> str:
    """Rename a file, if it is there, and return its new name."""
    to = path.with_name(f"damaged-{secrets.token_hex(4)}-{path.name}")
    if path.exists():
        path.rename(to)
    return to.name


def _write(path: Path, content: Json) -> None:
    write_atomically(path, (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode(), durable=True)
