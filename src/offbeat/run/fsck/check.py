"""Check a whole run, and repair it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

from offbeat.config import Config, parse
from offbeat.config.parsing import translate
from offbeat.errors import OffbeatError
from offbeat.events import EventKind
from offbeat.run.directory import RunDirectory, RunLock
from offbeat.run.fsck.checkpoints import check_checkpoints, newest_whole, whole_checkpoints
from offbeat.run.fsck.files import check_config, check_environment, check_leftovers, check_record
from offbeat.run.fsck.findings import PartFinding, Remedy
from offbeat.run.fsck.logs import check_experience, check_weights
from offbeat.run.journal import read
from offbeat.trainer.checkpoint import Checkpoint


def check_run(directory: RunDirectory) -> Iterator[PartFinding]:
    """Read everything in a run directory and say of each part whether it is whole. Changes nothing."""
    directory.require_run()
    checkpoints = whole_checkpoints(directory)
    newest = newest_whole(checkpoints)
    yield (config_found := check_config(directory, newest))
    config = _config(directory, newest, config_found)
    yield check_environment(directory, shared=bool(config and config.run.experience))
    yield check_record(directory, newest)
    yield from check_checkpoints(directory, checkpoints, was_saved=_was_saved(directory))
    if config is None:
        yield PartFinding("experience", "not checked: there is no configuration that says where it is", Remedy.PERSON)
        return
    yield from check_experience(directory, config, newest)
    if config.run.mode != "offline":
        yield from check_weights(directory, newest)
    yield from check_leftovers(directory)


def repair_run(directory: RunDirectory) -> Iterator[PartFinding]:
    """Repair what can be repaired, then check again: yields each repair as a whole part, then every finding."""
    with RunLock(directory):  # not beside a run
        for _ in range(_ROUNDS):
            damages = [one for one in check_run(directory) if one.remedy is Remedy.FSCK]
            for one in damages:
                yield _repaired(one)
            if not damages:
                break
        yield from check_run(directory)


_ROUNDS = 3
"""A repair may reveal another damage, for instance behind a configuration that could not be read."""


def _repaired(damage: PartFinding) -> PartFinding:
    assert damage.repair is not None
    try:
        return replace(damage, says=f"{damage.says}; repaired: {damage.repair()}", remedy=None, repair=None)
    except (OSError, OffbeatError) as error:
        return replace(damage, says=f"{damage.says}; the repair failed: {error}", remedy=Remedy.PERSON, repair=None)


def _config(directory: RunDirectory, newest: Checkpoint | None, found: PartFinding) -> Config | None:
    """Return the run's configuration, or that of its checkpoint if it cannot be read."""
    try:
        if found.remedy is None or newest is None:
            return directory.config()
        return parse(translate(cast(dict[str, Any], newest.manifest.config)))
    except (OSError, ValueError, OffbeatError):
        return None


def _was_saved(directory: RunDirectory) -> bool:
    try:
        return any(one.get("kind") == EventKind.SAVED for one in read(directory.events))
    except OSError:
        return False
