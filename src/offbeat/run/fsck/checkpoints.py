"""The checkpoints of a run: every byte, by sha256."""

import secrets
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from offbeat.errors import CheckpointError
from offbeat.run.directory import RunDirectory
from offbeat.run.fsck.findings import PartFinding, Remedy
from offbeat.trainer.checkpoint import Checkpoint, saved_folders


def whole_checkpoints(directory: RunDirectory) -> dict[Path, Checkpoint | str]:
    """Return each finished checkpoint in order of steps, or what is wrong with it."""
    found: dict[Path, Checkpoint | str] = {}
    for folder in saved_folders(directory.checkpoints):
        try:
            found[folder] = Checkpoint.open(folder)
        except (CheckpointError, OSError) as error:
            found[folder] = str(error)
    return found


def newest_whole(found: dict[Path, Checkpoint | str]) -> Checkpoint | None:
    """Return the checkpoint that a resume would continue from."""
    return next((one for one in reversed(found.values()) if isinstance(one, Checkpoint)), None)


def check_checkpoints(
    directory: RunDirectory, found: dict[Path, Checkpoint | str], *, was_saved: bool
) -> Iterator[PartFinding]:
    """Say what is wrong with each checkpoint. `was_saved` is True if the record says that there were some."""
    newest = newest_whole(found)
    for folder, one in found.items():
        name = f"checkpoints/{folder.name}"
        if isinstance(one, Checkpoint):
            yield PartFinding(name, f"{len(one.manifest.parts)} files match their sha256")
        elif newest is None:
            yield PartFinding(name, f"{one}. Restore it from a copy, or start a new run", Remedy.PERSON)
        else:
            says = f"{one}; the checkpoint of step {newest.step} is whole"
            yield PartFinding(name, says, Remedy.FSCK, partial(_set_aside, folder))
    for folder in saved_folders(directory.checkpoints, finished=False):
        says = "it has no manifest: its save was interrupted, or the manifest is lost"
        if newest is None and was_saved and not found:
            yield PartFinding(f"checkpoints/{folder.name}", f"{says}. Restore it, or start a new run", Remedy.PERSON)
        else:
            yield PartFinding(f"checkpoints/{folder.name}", says, Remedy.RESUME)
    if was_saved and not any(directory.checkpoints.glob("step-*")):
        says = "there are none, although the record says that some were saved. Restore them from a copy"
        yield PartFinding("checkpoints", f"{says}, or start a new run", Remedy.PERSON)


def _set_aside(folder: Path) -> str:
    to = folder.with_name(f"damaged-{secrets.token_hex(4)}-{folder.name}")
    folder.rename(to)
    return f"set aside as {to.name}; a resume continues from an older one"
