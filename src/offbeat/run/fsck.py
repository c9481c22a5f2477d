"""`offbeat fsck`: reads everything in a run directory, says of each part whether it is whole, and changes nothing.

    config.json, environment.json, events.jsonl, index/, tokenizer/    can they be read, and do they agree?
    checkpoints/                                                      every byte, by sha256
    experience/                                                       every row, digests, the ledger and the record
    weights/                                                          every version, by sha256

A damage is repaired by the next `offbeat resume`, from what another part of the run still holds, or by a person: then
the finding says what to do. A resume asks here first, and is refused if its checkpoints are lost.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import Any, Final, cast

from offbeat.config import Config, parse
from offbeat.config.parsing import translate
from offbeat.errors import (
    CheckpointDamaged,
    CheckpointError,
    ConfigError,
    ConservationError,
    LogReadError,
    OffbeatError,
    RunError,
)
from offbeat.events import EventKind
from offbeat.experience.index_files import damaged_files
from offbeat.experience.lance_table import Table, count_rows, is_torn, unreadable_versions
from offbeat.experience.ledger import LedgerScope
from offbeat.experience.reader import LogReader
from offbeat.experience.schema import SCHEMAS, SealCheck, Snapshot, lost_tables
from offbeat.run.directory import RunDirectory, json_digest
from offbeat.run.journal import CRC, read, read_line
from offbeat.run.learner import PUBLISHED_STATE, fixed_settings, recorded_settings
from offbeat.storage.files import local_path
from offbeat.storage.store import LocalStore
from offbeat.trainer.checkpoint import Checkpoint, differences, saved_folders
from offbeat.weights.inspection import find_problem, read_calibration, read_manifests

_COPY: Final = "Restore it from a copy, or start a new run"
Found = dict[Path, Checkpoint | str]
"""Each finished checkpoint in order of steps, or what is wrong with it."""


class Remedy(StrEnum):
    """Who repairs a damage."""

    PERSON = "only you can repair it"
    RESUME = "the next `offbeat resume` repairs it"


@dataclass(frozen=True)
class PartFinding:
    """One part of a run, whole or damaged.

    >>> print(PartFinding("config.json", "every setting is valid"))
    whole    config.json: every setting is valid
    >>> print(PartFinding("tokenizer", "it is missing", Remedy.RESUME))
    damaged  tokenizer: it is missing; the next `offbeat resume` repairs it
    """

    part: str
    """The file or directory, relative to the run."""
    says: str
    """What was found. If only a person can repair it, also what to do."""
    remedy: Remedy | None = None
    """None if the part is whole."""

    def __str__(self) -> str:
        if self.remedy is None:
            return f"whole    {self.part}: {self.says}"
        return f"damaged  {self.part}: {self.says}; {self.remedy}"


def check_run(directory: RunDirectory) -> Iterator[PartFinding]:
    """Read everything in a run directory and say of each part whether it is whole. Changes nothing."""
    directory.require_run()
    checkpoints = _checkpoints(directory)
    newest = _newest_whole(checkpoints)
    yield (config_found := _check_config(directory, newest))
    config = _settings(directory, newest, config_found)
    yield _check_environment(directory, shared=bool(config and config.run.experience))
    yield _check_record(directory, newest)
    yield from _check_checkpoints(directory, checkpoints, was_saved=newest is not None or _has_saved(directory))
    if config is None:
        yield PartFinding("experience", "not checked: there is no configuration that says where it is", Remedy.PERSON)
        return
    yield from _check_experience(directory, config, newest)
    if config.run.mode != "offline":
        yield from _check_weights(directory, newest)
    yield from _check_leftovers(directory)


def require_checkpoint(directory: RunDirectory, *, verify: bool = True) -> Checkpoint | None:
    """Return the newest whole checkpoint; with `verify`, every byte is read. None if none was saved yet.

    Raises `CheckpointDamaged` if checkpoints were saved and none can be read.
    """
    problems = []
    for folder in reversed(saved_folders(directory.checkpoints)):
        try:
            return Checkpoint.open(folder, verify=verify)
        except CheckpointDamaged as error:
            problems.append(str(error))
    if not problems and not _has_saved(directory):
        return None
    files = ("config.json", "environment.json", "events.jsonl")
    found = takewhile(lambda one: one.part in files or one.part.startswith("checkpoints"), check_run(directory))
    says = "".join(f"\n  {one}" for one in found if one.remedy is not None) or " nothing of it"
    raise CheckpointDamaged(
        f"{directory.path} has lost its policy and its optimizer: checkpoints were saved, and none can be read "
        f"({'; '.join(problems) or 'there are none'}). Nothing was changed, because training again from step 0 would "
        f"replace what is left. `offbeat fsck` says:{says}\nRestore {directory.checkpoints} from a copy, then "
        f"`offbeat resume {directory.path}`; or train a new run in another directory"
    )


def require_settings(directory: RunDirectory, newest: Checkpoint | None) -> None:
    """Raise `RunError` if `config.json` differs from the checkpoint, or from what `environment.json` says of it."""
    if (found := _check_config(directory, newest)).remedy is not None:
        raise RunError(
            f"{directory.path / found.part}: {found.says}; or continue with `--accept-changes` (in Python: "
            "accept_changes=True)"
        )


def _has_saved(directory: RunDirectory) -> bool:
    """Return True if a checkpoint was complete once, by what is outside of `checkpoints/` or was set aside there.

    A save that was killed leaves its directory without a manifest. A later save, or the end, waits for the one before.
    """
    on_request = any(directory.checkpoints.glob("superseded-*/manifest.json"))  # whole, and set aside by a person
    if on_request or directory.saved.exists() or any(directory.checkpoints.glob("damaged-*")):
        return not on_request
    begun, kinds = set[object](), set[object]()
    for event in read(directory.events) if directory.events.exists() else ():
        kind, step = event.get("kind"), event.get("step")
        kinds.add(kind)
        if kind == EventKind.RESUMED:
            begun = {step, kind} if step else set()
        elif kind in (EventKind.SAVED, EventKind.ENDED):
            begun.add(step if kind == EventKind.SAVED else kind)
    if EventKind.STEP in kinds and EventKind.SAVED not in kinds:
        return False  # inside another trainer, which has the checkpoints
    steps = [int(path.stem) for path in directory.weights.glob("versions/*.json") if path.stem.isdecimal()]
    every = 1
    with suppress(OffbeatError, OSError, ValueError, KeyError):  # what cannot be read says nothing
        config = directory.config()
        own, every = directory.own_run(config), config.trainer.save_every or 1
        scope = LedgerScope(own.trainer, lambda one: not own.is_guest(one))
        ledger = LogReader.open(config.run.experience or directory.experience).ledger(scope=scope)
        steps += [step for fate in ledger.fates.values() for step in fate.steps]
    begun |= set(range(every, max(steps, default=0), every))
    killed = {int(n) for one in directory.checkpoints.glob("*step-*") if (n := one.name.rpartition("-")[2]).isdecimal()}
    return len(begun) > 1 or not begun <= killed


def _lost_newest(directory: RunDirectory, step: int) -> str:
    """Say that the checkpoint saved last is gone, if `step` is that of the newest one; a person may have moved it."""
    saved = _saved(directory).get("step", 0)
    gone = saved > step and not any(directory.checkpoints.glob(f"*step-{saved:010}"))
    return f"the checkpoint of step {saved}, which was saved last, is gone" if gone else ""


def _saved(directory: RunDirectory) -> dict[str, int]:
    """Return what is in `saved.json`; nothing if it cannot be read."""
    try:
        return {name: int(number) for name, number in _object(directory.saved).items()}
    except (OSError, ValueError, TypeError):
        return {}


def _settings(directory: RunDirectory, newest: Checkpoint | None, found: PartFinding) -> Config | None:
    """Return the run's configuration, or that of its checkpoint if it cannot be read."""
    try:
        if found.remedy is None or newest is None:
            return directory.config()
        return parse(translate(cast(dict[str, Any], newest.manifest.config)))
    except (OSError, ValueError, OffbeatError):
        return None


def _checkpoints(directory: RunDirectory) -> Found:
    found: Found = {}
    for folder in saved_folders(directory.checkpoints):
        try:
            found[folder] = Checkpoint.open(folder)
        except (CheckpointError, OSError) as error:
            found[folder] = str(error)
    return found


def _newest_whole(found: Found) -> Checkpoint | None:
    """Return the checkpoint that a resume would continue from."""
    return next((one for one in reversed(found.values()) if isinstance(one, Checkpoint)), None)


def _check_checkpoints(directory: RunDirectory, found: Found, *, was_saved: bool) -> Iterator[PartFinding]:
    """Say what is wrong with each checkpoint. `was_saved` is True if the record says that there were some."""
    newest = _newest_whole(found)
    for folder, one in found.items():
        name = f"checkpoints/{folder.name}"
        if isinstance(one, Checkpoint):
            yield PartFinding(name, f"{len(one.manifest.parts)} files match their sha256")
        elif newest is None:
            yield PartFinding(name, f"{one}. Restore it from a copy, or start a new run", Remedy.PERSON)
        else:
            yield PartFinding(name, f"{one}; the checkpoint of step {newest.step} is whole", Remedy.RESUME)
    for folder in saved_folders(directory.checkpoints, finished=False):
        says = "it has no manifest: its save was interrupted, or the manifest is lost"
        if newest is None and was_saved and not found:
            yield PartFinding(f"checkpoints/{folder.name}", f"{says}. Restore it, or start a new run", Remedy.PERSON)
        else:
            yield PartFinding(f"checkpoints/{folder.name}", says, Remedy.RESUME)
    if newest is not None and (lost := _lost_newest(directory, newest.step)):
        yield PartFinding("checkpoints", f"{lost}; the one of step {newest.step} is whole", Remedy.RESUME)
    if was_saved and not any(directory.checkpoints.glob("step-*")):
        says = "there are none, although the record says that some were saved. Restore them from a copy"
        yield PartFinding("checkpoints", f"{says}, or start a new run", Remedy.PERSON)


def _check_config(directory: RunDirectory, newest: Checkpoint | None) -> PartFinding:
    """Check `config.json` by itself and against the newest whole checkpoint, which holds the settings too."""
    name = "config.json"
    problem = ""
    try:
        config = parse(translate(_object(directory.path / name)))
        if newest is not None:
            now, recorded = fixed_settings(config), recorded_settings(newest.manifest.config)
            problem = "; ".join(differences(now, recorded | {"optimizer": now["optimizer"]}))
            problem = problem and f"it differs from the checkpoint of step {newest.step}: {problem}"
        digest = directory.environment.get("config")
        if not problem and digest not in (None, json_digest(_object(directory.path / name))):
            problem = 'it differs from its sha256. If you changed it, remove "config" and "sha256" of environment.json'
    except (OSError, ValueError, ConfigError) as error:
        problem = _reason(error)
    if not problem:
        return PartFinding(name, "every setting is valid")
    advice = "Restore it from a copy: without a checkpoint nothing else holds it"
    if newest is not None:
        manifest = (newest.folder / "manifest.json").relative_to(directory.path)
        advice = f'Restore it from a copy, or write into it what {manifest} holds as "config"'
    return PartFinding(name, f"{problem}. {advice}", Remedy.PERSON)


def _check_environment(directory: RunDirectory, *, shared: bool) -> PartFinding:
    """Check `environment.json`. `shared` is True if the run's name is in the group ids of a log of several runs."""
    name = "environment.json"
    try:
        _object(directory.path / name)
        _ = directory.name
    except (OSError, ValueError, RunError) as error:
        advice = "Restore it from a copy: the run's groups in the shared log carry its name"
        if not shared:
            advice = 'Restore it from a copy, or write {"run": "a new name"} into it'
        return PartFinding(name, f"{_reason(error)}. {advice}", Remedy.PERSON)
    return PartFinding(name, "names the run")


def _check_record(directory: RunDirectory, newest: Checkpoint | None) -> PartFinding:
    """Check that every line of `events.jsonl` is an event, and that every step of the checkpoint is recorded."""
    name = "events.jsonl"
    try:
        content = directory.events.read_bytes()
    except OSError as error:
        if isinstance(error, FileNotFoundError) and newest is None and not _has_saved(directory):
            return PartFinding(name, "there is none yet: the run has not begun to train")
        says = f"{_reason(error)}. Restore it from a copy, or move it away: a resume begins a new record"
        return PartFinding(name, says, Remedy.PERSON)
    events, checked, lines = [], False, content.splitlines()
    for line in lines:
        checked = checked or CRC in line  # earlier versions wrote no checks
        events.append(_event(line) if CRC in line or not checked else None)
    if broken := [number for number, event in enumerate(events, 1) if event is None]:
        says = f"{len(broken)} of {len(lines)} lines are no events ({_some(broken)})"
        return PartFinding(name, f'{says}. Delete them, and "events" in saved.json', Remedy.PERSON)
    if (end := _saved(directory).get("events", 0)) and content[end - 1 : end] != b"\n":
        says = f"lines are lost: none ends at byte {end}, where the last one ended at the newest save, or the run's end"
        return PartFinding(name, f"{says}. Restore it from a copy; the run can be resumed without them", Remedy.PERSON)
    steps = {event["step"] for event in events if event and event["kind"] == EventKind.STEP}
    last = newest.step if newest else 0
    if missing := [step for step in range(1, last + 1) if step not in steps]:
        says = f"{len(missing)} of {last} steps are not recorded ({_some(missing)})"
        return PartFinding(name, f"{says}. Restore it from a copy; the run can be resumed without them", Remedy.PERSON)
    return PartFinding(name, f"{len(events)} events, {len(steps)} steps")


def _some(numbers: Sequence[object]) -> str:
    return ", ".join(map(str, numbers[:5])) + (" …" if len(numbers) > 5 else "")


def _event(line: bytes) -> dict[str, Any] | None:
    """Return the event in a line of the record; None if it is none."""
    event = read_line(line)
    known = event is not None and isinstance(event.get("step"), int) and isinstance(event.get("kind"), str)
    return event if known else None


def _check_leftovers(directory: RunDirectory) -> Iterator[PartFinding]:
    """Check what a resume makes again by itself: the index and the tokenizer."""
    if damaged := damaged_files(directory.index):
        says = f"{len(damaged)} files do not match their hash; the log is read instead"
        yield PartFinding("index", says, Remedy.RESUME)
    elif directory.index.exists():
        yield PartFinding("index", "every file matches its hash")
    try:
        _object(directory.tokenizer / "tokenizer_config.json")
        for path in sorted(directory.tokenizer.glob("*.json")):
            json.loads(path.read_bytes())
        if not any(one for kind in ("tokenizer.json", "vocab*", "*.model") for one in directory.tokenizer.glob(kind)):
            raise FileNotFoundError(None, "", "tokenizer.json")
    except (OSError, ValueError) as error:
        yield PartFinding("tokenizer", _reason(error), Remedy.RESUME)
    else:
        yield PartFinding("tokenizer", "every file can be read")


def _object(path: Path) -> dict[str, Any]:
    content = json.loads(path.read_bytes())
    if not isinstance(content, dict):
        raise ValueError(f"{path.name} holds no JSON object")
    return content


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return f"{Path(str(error.filename)).name} is missing"
    return f"it cannot be read: {error}"


def _check_experience(directory: RunDirectory, config: Config, newest: Checkpoint | None) -> Iterator[PartFinding]:
    """Check every table by itself; if all can be read, also digests, the ledger and the record of the run."""
    place = local_path(config.run.experience or str(directory.experience))
    if place is None:
        yield PartFinding(config.run.experience, "an object store keeps it, so only its books were checked")
        yield from _check_books(directory, config, newest)
        return
    if not place.exists() and newest is None:
        yield PartFinding(_named(place, directory), "not created yet")
        return
    lost = lost_tables(str(place)) if any(place.glob("*.lance")) else [f"{name}.lance" for name in SCHEMAS]
    whole = True
    for name in SCHEMAS:
        table = place / f"{name}.lance"
        found = _lost(table, directory) if table.name in lost else _check_table(table, directory, newest)
        whole &= found.remedy is None
        yield found
    if whole:
        yield from _check_books(directory, config, newest)


def _lost(table: Path, directory: RunDirectory) -> PartFinding:
    return PartFinding(_named(table, directory), f"the table is lost. {_COPY}", Remedy.PERSON)


def _check_table(table: Path, directory: RunDirectory, newest: Checkpoint | None) -> PartFinding:
    part, needed = _named(table, directory), _rows_of(directory, newest, table.stem)
    rows = count_rows(table)
    if rows is None:
        return PartFinding(part, f"none of its versions can be read. {_COPY}", Remedy.PERSON)
    if rows < needed:
        says = f"it has {rows} rows, and it had {needed}: the newest were lost"
        return PartFinding(part, f"{says}. {_COPY}", Remedy.PERSON)
    if unreadable := unreadable_versions(table):
        says = f"{len(unreadable)} of its newest manifests cannot be read; the version before has {rows} rows"
        if all(is_torn(manifest) for manifest in unreadable):  # cut off by a crash: opening the table renames it
            return PartFinding(part, says, Remedy.RESUME)
        names = ", ".join(str(manifest.relative_to(table)) for manifest in unreadable)
        return PartFinding(part, f"{says}. Move them away, with latest_version_hint.json: {names}", Remedy.PERSON)
    try:
        check = SealCheck.of(Table(str(table), SCHEMAS[table.stem], create=False), table.stem)
    except LogReadError as error:
        return PartFinding(part, f"its rows cannot be read: {error}. {_COPY}", Remedy.PERSON)
    if check.unsealed and "sealed" in directory.environment and table.is_relative_to(directory.experience):
        check.wrong.append(f"{check.unsealed} rows have lost their seals")
    if check.wrong:
        says = f"{len(check.wrong)} rows are damaged or lost: {'; '.join(check.wrong[:3])}. {_COPY}"
        return PartFinding(part, says, Remedy.PERSON)
    return PartFinding(part, f"{rows} rows")


def _check_books(directory: RunDirectory, config: Config, newest: Checkpoint | None) -> Iterator[PartFinding]:
    """Check the content of groups against their digests, and that every group has exactly one fate."""
    uri = config.run.experience or str(directory.experience)
    try:
        own = directory.own_run(config) if config.run.experience else None
        reader = LogReader.open(uri, own_run=own)
        if damaged := reader.damaged():
            some = ", ".join(damaged[:5])
            says = f"{len(damaged)} groups differ from their digests ({some} …). {_COPY}"
            yield PartFinding("the groups", says, Remedy.PERSON)
        else:
            yield PartFinding("the groups", "all match their digests")
        ledger = reader.ledger(scope=own.scope if own else None)
        ledger.check()
    except (OffbeatError, OSError, ValueError, KeyError) as error:
        kind = "the ledger" if isinstance(error, ConservationError) else "the experience log"
        yield PartFinding(kind, f"{error} {_COPY}", Remedy.PERSON)
        return
    if ledger.conflicts:
        says = f"{ledger.conflicts} rows repeat an id with other content; the first one of each counts"
        yield PartFinding("the ledger", f"{says}. Find out which writer uses ids twice", Remedy.PERSON)
        return
    if wrong := ledger.false_steps(_recorded_steps(directory, newest)):
        says = f"the record and the ledger differ in {len(wrong)} steps: {'; '.join(wrong[:3])}"
        yield PartFinding("the ledger", f"{says}. {_COPY}", Remedy.PERSON)
    else:
        yield PartFinding("the ledger", str(ledger))


def _recorded_steps(directory: RunDirectory, newest: Checkpoint | None) -> dict[int, tuple[int, float | None]]:
    """Return what the record says of each step up to the checkpoint: groups and updates."""
    if newest is None or not directory.events.exists():
        return {}
    steps = (cast(dict[str, Any], one) for one in read(directory.events) if one.get("kind") == EventKind.STEP)
    return {one["step"]: (one["groups"], one["metrics"].get("updates")) for one in steps if one["step"] <= newest.step}


def _rows_of(directory: RunDirectory, newest: Checkpoint | None, table: str) -> int:
    """Return how many rows a table had at the checkpoint, or when the run last ended."""
    ends = [one.get("rows") for one in read(directory.events)] if directory.events.exists() else []
    counts = [*ends, newest.manifest.extras.get("snapshot") if newest else None]
    return max((Snapshot(**one).to_json()[table] for one in counts if isinstance(one, dict)), default=0)  # type: ignore[arg-type]


def _check_weights(directory: RunDirectory, newest: Checkpoint | None) -> Iterator[PartFinding]:
    """Check every version that readers may load, the version that the checkpoint serves, and the probe of version 0."""
    if not directory.weights.exists():
        if newest is not None:
            yield PartFinding("weights", "the weight log is lost", Remedy.RESUME)
        return
    store = LocalStore(directory.weights)
    try:
        manifests, damaged = read_manifests(store)
    except OSError as error:
        says = f"it cannot be read: {error}. Move it away; the next resume publishes the policy of the checkpoint"
        yield PartFinding("weights", says, Remedy.PERSON)
        return
    problems = {version: find_problem(store, manifests, version) for version in manifests} | damaged
    broken = {version: problem for version, problem in sorted(problems.items()) if problem}
    for version, problem in broken.items():
        yield PartFinding(f"weights, version {version}", problem.removeprefix(f"version {version}: "), Remedy.RESUME)
    if whole := [version for version in manifests if version not in broken]:
        yield PartFinding("weights", f"{len(whole)} versions can be loaded, the newest is {whole[-1]}")
    if newest is None:
        return
    served, state = int(cast(int, newest.manifest.extras["published"])), newest.manifest.extras.get(PUBLISHED_STATE)
    if served not in manifests:
        yield PartFinding("weights", f"version {served} is missing, which the checkpoint serves", Remedy.RESUME)
    elif state is not None and manifests[served].state != state:
        yield PartFinding("weights", f"version {served} holds the weights of another run", Remedy.RESUME)
    if read_calibration(store) is None:
        yield PartFinding("weights/calibration.json", "the probe of version 0 is missing or damaged", Remedy.RESUME)


def _named(path: Path, directory: RunDirectory) -> str:
    return str(path.relative_to(directory.path)) if path.is_relative_to(directory.path) else str(path)
