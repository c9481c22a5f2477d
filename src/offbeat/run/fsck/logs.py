"""The two logs of a run: every row of the experience log and its books, every version of the weight log."""

import secrets
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import cast

from offbeat.config import Config
from offbeat.errors import AnotherPublisher, ConservationError, OffbeatError, WeightLogError
from offbeat.events import EventKind
from offbeat.experience.lance_table import count_rows, find_unreadable_rows, set_aside, unreadable_versions
from offbeat.experience.ledger import LedgerScope
from offbeat.experience.reader import LogReader
from offbeat.experience.schema import SCHEMAS, Snapshot, lost_tables
from offbeat.run.directory import RunDirectory
from offbeat.run.fsck.findings import PartFinding, Remedy
from offbeat.run.journal import read
from offbeat.run.learner import PUBLISHED_STATE
from offbeat.storage.files import local_path
from offbeat.storage.local import LocalStore
from offbeat.trainer.checkpoint import Checkpoint
from offbeat.weights.inspection import find_problem, read_calibration, read_manifests
from offbeat.weights.publisher import WeightLog

_COPY = "Restore it from a copy, or start a new run"


def check_experience(directory: RunDirectory, config: Config, newest: Checkpoint | None) -> Iterator[PartFinding]:
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
    part, needed = _named(table, directory), _rows_of(newest, table.stem)
    rows = count_rows(table)
    if rows is None:
        return PartFinding(part, f"none of its versions can be read. {_COPY}", Remedy.PERSON)
    if rows < needed:
        says = f"it has {rows} rows, and the checkpoint needs {needed}: the newest were lost"
        return PartFinding(part, f"{says}. {_COPY}", Remedy.PERSON)
    if unreadable := unreadable_versions(table):

        def repair() -> str:
            set_aside(unreadable)
            return f"set aside; the version before has {rows} rows, and the checkpoint needs {needed}"

        says = f"{len(unreadable)} of its newest manifests cannot be read"
        return PartFinding(part, says, Remedy.FSCK, repair)
    if problem := find_unreadable_rows(table, SCHEMAS[table.stem]):
        return PartFinding(part, f"its rows cannot be read: {problem}. {_COPY}", Remedy.PERSON)
    return PartFinding(part, f"{rows} rows")


def _check_books(directory: RunDirectory, config: Config, newest: Checkpoint | None) -> Iterator[PartFinding]:
    """Check the content of groups against their digests, and that every group has exactly one fate."""
    uri = config.run.experience or str(directory.experience)
    try:
        reader = LogReader.open(uri)
        if damaged := reader.damaged():
            some = ", ".join(damaged[:5])
            says = f"{len(damaged)} groups differ from their digests ({some} …). {_COPY}"
            yield PartFinding("the groups", says, Remedy.PERSON)
        else:
            yield PartFinding("the groups", "all match their digests")
        scope = None
        if config.run.experience:
            mark = f"{directory.name}-"
            scope = LedgerScope(f"trainer {directory.name}", lambda one: one.startswith(f"g {mark}"))
        ledger = reader.ledger(scope=scope)
        ledger.check()
    except (OffbeatError, OSError, ValueError, KeyError) as error:
        kind = "the ledger" if isinstance(error, ConservationError) else "the experience log"
        yield PartFinding(kind, f"{error} {_COPY}", Remedy.PERSON)
        return
    if ledger.conflicts:
        says = f"{ledger.conflicts} rows repeat an id with other content; the first one of each counts"
        yield PartFinding("the ledger", f"{says}. Find out which writer uses ids twice", Remedy.PERSON)
        return
    trained = Counter(step for entry in ledger.fates.values() for step in entry.steps)
    if wrong := _false_steps(directory, trained, newest):
        says = f"the record and the ledger differ in {len(wrong)} steps: {'; '.join(wrong[:3])}"
        yield PartFinding("the ledger", f"{says}. {_COPY}", Remedy.PERSON)
    else:
        yield PartFinding("the ledger", str(ledger))


def _false_steps(directory: RunDirectory, trained: Counter[int], newest: Checkpoint | None) -> list[str]:
    """Return the steps for which the record counts other groups than the ledger."""
    if newest is None or not directory.events.exists():
        return []
    recorded = {
        int(str(event["step"])): int(str(event["groups"]))
        for event in read(directory.events)
        if event.get("kind") == EventKind.STEP
    }
    return [
        f"step {step} trained {groups} groups in events.jsonl, {trained[step]} in the ledger"
        for step, groups in sorted(recorded.items())
        if step <= newest.step and groups != trained[step]
    ]


def _rows_of(newest: Checkpoint | None, table: str) -> int:
    if newest is None or "snapshot" not in newest.manifest.extras:
        return 0
    snapshot = Snapshot.from_json(cast(dict[str, int], newest.manifest.extras["snapshot"]))
    return int(asdict(snapshot)[table])


def check_weights(directory: RunDirectory, newest: Checkpoint | None) -> Iterator[PartFinding]:
    """Check every version that readers may load, the version that the checkpoint serves, and the probe of version 0."""
    if not directory.weights.exists():
        if newest is not None:
            yield PartFinding("weights", "the weight log is lost", Remedy.RESUME)
        return
    store = LocalStore(directory.weights)
    try:
        manifests, damaged = read_manifests(store)
    except OSError as error:
        yield PartFinding("weights", f"it cannot be read: {error}", Remedy.FSCK, lambda: _move_away(directory.weights))
        return
    problems = {version: find_problem(store, manifests, version) for version in manifests} | damaged
    broken = {version: problem for version, problem in sorted(problems.items()) if problem}
    for version, problem in broken.items():
        problem = problem.removeprefix(f"version {version}: ")
        yield PartFinding(
            f"weights, version {version}", problem, Remedy.FSCK, lambda: _remove_broken(directory.weights)
        )
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


def _remove_broken(weights: Path) -> str:
    try:
        with WeightLog.open(weights) as log:
            removed = log.remove_damaged()
    except AnotherPublisher:
        raise
    except WeightLogError:
        return _move_away(weights)
    return f"removed with {len(removed)} versions that need it; the next resume publishes what the checkpoint serves"


def _move_away(weights: Path) -> str:
    to = weights.with_name(f"damaged-{secrets.token_hex(4)}-{weights.name}")
    weights.rename(to)
    return f"moved to {to.name}; the next resume publishes the policy of the checkpoint"


def _named(path: Path, directory: RunDirectory) -> str:
    return str(path.relative_to(directory.path)) if path.is_relative_to(directory.path) else str(path)
