"""Checkpoints: everything a run needs to resume with the same bits.

    checkpoints = Checkpoints("run/checkpoints", config=config, ranks=ranks)
    if (newest := checkpoints.newest()) is not None:
        newest.restore(trainer)                               # parameters, moments, random generators, step
        sampler.restore(newest.extra("sampler"))
    …
    checkpoints.save(trainer, {"sampler": sampler.state(), "snapshot": …, "published": 8})
    checkpoints.check()                                       # each step: raises if the last save failed

    save    copies to the host, then returns ── in a thread: each rank's file, read back ─ rank 0: manifest ─ prune

Ranks coordinate through files in a directory that they share, so saving runs no collective beside training. A killed
run leaves a directory without a manifest; the next run sets it aside until its own first checkpoint is on disk.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from offbeat.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from offbeat.storage.files import FileLock, LockHeld, fsync_paths
from offbeat.storage.store import LocalStore
from offbeat.trainer.allocator import return_freed_memory
from offbeat.trainer.checkpoint_files import (
    MANIFEST,
    CheckpointManifest,
    CheckpointPart,
    Slice,
    done_file,
    find_problem,
    local_slices,
    read_rows,
    restore,
    write_part,
)
from offbeat.trainer.fsdp import Ranks
from offbeat.trainer.trainer import Trainer
from offbeat.types import Json

logger = logging.getLogger(__name__)

_STEP: Final = "step-"
_POLL: Final = 0.02


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint."""

    folder: Path
    manifest: CheckpointManifest

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True) -> "Checkpoint":
        """Open the checkpoint in a directory. Raises `CheckpointDamaged` with every problem found.

        With `verify`, every byte is read and compared with its sha256.
        """
        try:
            content = (folder / MANIFEST).read_bytes()
        except FileNotFoundError:
            raise CheckpointDamaged(f"{folder} has no {MANIFEST}: not a checkpoint, or not finished") from None
        except OSError as error:
            raise CheckpointDamaged(f"{folder / MANIFEST} cannot be read ({error.strerror})") from None
        manifest = CheckpointManifest.parse(content, str(folder / MANIFEST))
        for name, entry in manifest.tensors.items():
            manifest.find(name, 0, entry.shape[0] if entry.shape else 1)
        found = [find_problem(folder, part) for part in manifest.parts] if verify else []
        if problems := [problem for problem in found if problem]:
            raise CheckpointDamaged(f"the checkpoint of step {manifest.step} is damaged: {'; '.join(problems)}")
        return cls(folder, manifest)

    @property
    def step(self) -> int:
        """k: the steps taken when it was saved."""
        return self.manifest.step

    def extra(self, name: str) -> Json:
        """Return one of the extras given to `save`."""
        if name not in self.manifest.extras:
            saved = ", ".join(sorted(self.manifest.extras)) or "nothing"
            raise CheckpointMismatch(
                f"the checkpoint of step {self.step} has no {name!r}; beside the trainer it has {saved}"
            )
        return self.manifest.extras[name]

    def policy(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole master weights, by their names in a Hugging Face state dict; `served_state` rounds them."""
        for name, entry in self.manifest.tensors.items():
            if name.startswith("policy/"):
                rows = entry.shape[0] if entry.shape else 1
                yield name.removeprefix("policy/"), read_rows(self.folder, self.manifest, name, 0, rows)

    def restore(self, trainer: Trainer) -> None:
        """Set the trainer to the saved state. The number of ranks may differ from when it was saved."""
        if changes := list(differences(adapter_json(trainer), self.manifest.adapter, "adapter")):
            raise CheckpointMismatch(
                f"the checkpoint of step {self.step} is of another adapter, or of one of another base: "
                f"{'; '.join(changes)}. Restore the model and the settings that the run started with"
            )
        restore(trainer, self.folder, self.manifest)


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """The checkpoints of one run, in a directory that all ranks see. They call the same methods in the same order.

    >>> import tempfile
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from offbeat.objective.spec import Objective
    >>> from offbeat.trainer.forward import PolicyModel
    >>> from offbeat.trainer.optimizer import MasterAdamW, OptimizerSettings
    >>> from offbeat.trainer.trainer import StepSettings
    >>> sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    >>> policy_model = PolicyModel(LlamaForCausalLM(LlamaConfig(**sizes)))
    >>> optimizer = MasterAdamW(policy_model, OptimizerSettings())
    >>> trainer = Trainer(policy_model, optimizer, StepSettings(Objective()), step=12)
    >>> with tempfile.TemporaryDirectory() as folder, Checkpoints(folder, config={"seed": 7}) as checkpoints:
    ...     checkpoints.save(trainer, {"prompts": 96})
    ...     checkpoints.wait()
    ...     newest = checkpoints.newest()
    ...     newest.restore(trainer)
    >>> newest.step, newest.extra("prompts")
    (12, 96)
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        config: Json,
        translate: Callable[[Json], Json] = lambda recorded: recorded,
        keep: int = 2,
        ranks: Ranks | None = None,
        patience: float = 600.0,
        record: Callable[[int], None] = lambda step: None,
    ) -> None:
        """Lock the directory and set aside what a killed run left unfinished.

        `config` is the resolved configuration of the run; `translate` returns that of a checkpoint in today's settings,
        because an earlier version may have saved it. The newest `keep` checkpoints stay, and the newest from before a
        health rule broke. Rank 0 waits up to `patience` seconds for another rank's file. `record` is called with the
        step of each complete save.
        """
        if keep < 2:
            raise ValueError(f"keep = {keep}: keep at least 2, in case one is damaged")
        self._directory = Path(directory)
        self._config, self._translate = config, translate
        self._keep = keep
        self._ranks = ranks or Ranks()
        self._patience = patience
        self._record = record
        self.on_disk: int | None = None  # on rank 0, the last step that was saved here and is durable
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        self._saved = set(self._steps(finished=True))
        if self._ranks.rank == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self._directory)
            for step in self._steps(finished=False):
                self._set_aside(step, "unfinished")
        self._barrier()

    def save(self, trainer: Trainer, extras: Mapping[str, Json]) -> None:
        """Save the trainer's current state and JSON extras; those of rank 0 are written.

        Returns when everything is copied to the host. It waits for the previous save first, and raises if that failed.
        A step that is already saved is not saved again, because its state is the same.
        """
        self.wait()
        if trainer.step in self._saved:
            return
        model = json.loads(trainer.policy_model.model.config.to_json_string(use_diff=False))
        copied = json.loads(json.dumps(extras, allow_nan=False))
        adapter = adapter_json(trainer)
        manifest = CheckpointManifest(trainer.step, self._config, model, copied, parts=(), adapter=adapter)
        self._saved.add(trainer.step)
        with suppress(OSError):  # the thread reports it
            self._folder(trainer.step).mkdir(exist_ok=True)  # now: a save that was begun leaves a trace, even if killed
        self._writing = self._writer.submit(self._write, manifest, local_slices(trainer))

    def check(self) -> None:
        """Raise if the last save failed. Call it at every step."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Wait until the last save is on disk; raise if it failed."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except OSError as error:
            raise CheckpointError(
                f"a checkpoint could not be written to {self._directory}: {error}. Earlier checkpoints are intact; "
                "free disk space or fix the disk, then resume the run"
            ) from error
        if writing is not None:
            return_freed_memory()

    def newest(self) -> Checkpoint | None:
        """Return the newest complete checkpoint of this run, or None. Damaged ones are renamed to `damaged-…`.

        Each rank verifies a share of the files.
        """
        self.wait()
        self._barrier()
        damaged: dict[int, str] = {}
        for step in reversed(self._steps(finished=True)):
            checkpoint, problem = self._verify(step)
            if checkpoint is not None:
                if changes := list(differences(self._config, self._translate(checkpoint.manifest.config))):
                    raise CheckpointMismatch(
                        f"the checkpoint of step {step} was saved with another configuration: {'; '.join(changes)}. "
                        "Undo the change, or start a new run"
                    )
                for later in damaged:
                    self._set_aside(later, "damaged")
                self._barrier()
                return checkpoint
            damaged[step] = problem
            logger.error("%s; an older checkpoint is tried", problem)
        if damaged:
            raise CheckpointDamaged(f"no checkpoint in {self._directory} is intact: {'; '.join(damaged.values())}")
        return None

    def close(self) -> None:
        """Wait for the last save and release the directory."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            if self._ranks.rank == 0:
                self._lock.release()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, manifest: CheckpointManifest, slices: Mapping[str, Slice]) -> None:
        """Write this rank's part, in the thread. Rank 0 also writes the manifest and removes old checkpoints."""
        folder = self._folder(manifest.step)
        folder.mkdir(exist_ok=True)
        fsync_paths(self._directory)
        store = LocalStore(self._directory)
        write_part(store, folder.name, self._ranks.rank, slices)
        if self._ranks.rank == 0:
            parts = tuple(self._wait_for_part(folder, rank) for rank in range(self._ranks.size))
            store.put(f"{folder.name}/{MANIFEST}", replace(manifest, parts=parts).serialize())
            Checkpoint.open(folder, verify=False)
            self._record(manifest.step)
            self.on_disk = manifest.step
            saved = self._steps(finished=True)
            for step in set(saved) - kept(saved, self._keep, manifest.extras.get("healthy")):
                store.remove([f"{self._folder(step).name}/{MANIFEST}"])
                shutil.rmtree(self._folder(step))
            for aside in (*self._directory.glob("unfinished-*"), *self._directory.glob("superseded-*")):
                shutil.rmtree(aside)

    def _wait_for_part(self, folder: Path, rank: int) -> CheckpointPart:
        deadline = time.monotonic() + self._patience
        while not (folder / done_file(rank)).exists():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"waited {self._patience:.0f} s for rank {rank} to write its part of {folder}; check that every "
                    "rank sees this directory"
                )
            time.sleep(_POLL)
        return CheckpointPart.from_json(json.loads((folder / done_file(rank)).read_bytes()))

    def _verify(self, step: int) -> tuple[Checkpoint | None, str]:
        """Return the checkpoint, or None and what a rank found wrong with it."""
        problem, checkpoint = "", None
        try:
            checkpoint = Checkpoint.open(self._folder(step), verify=False)
            share = checkpoint.manifest.parts[self._ranks.rank :: self._ranks.size]
            problem = "; ".join(wrong for part in share if (wrong := find_problem(self._folder(step), part)))
        except CheckpointDamaged as error:
            problem = str(error)
        if float(self._ranks.sum(torch.tensor([float(bool(problem))]))):
            return None, problem or f"another rank found the checkpoint of step {step} damaged"
        return checkpoint, ""

    def _set_aside(self, step: int, why: str) -> None:
        self._saved.discard(step)
        if self._ranks.rank == 0:
            self._folder(step).rename(self._directory / f"{why}-{time.time_ns()}-{self._folder(step).name}")
            fsync_paths(self._directory)

    def _steps(self, *, finished: bool) -> list[int]:
        """Return the steps whose directory has a manifest (or has none), in order."""
        folders = saved_folders(self._directory, finished=finished)
        return [int(path.name.removeprefix(_STEP)) for path in folders]

    def _folder(self, step: int) -> Path:
        return self._directory / f"{_STEP}{step:010}"

    def _barrier(self) -> None:
        self._ranks.sum(torch.zeros(1))


def kept(steps: Sequence[int], keep: int, healthy: Json) -> set[int]:
    """Return the checkpoints to keep: the newest `keep`, and the newest up to the last step that was healthy."""
    before = [step for step in steps if isinstance(healthy, int) and step <= healthy]
    return {*steps[-keep:], *before[-1:]}


def adapter_json(trainer: Trainer) -> Json:
    """Return the adapter that a trainer trains, base included; None if it trains all weights."""
    spec = trainer.policy_model.adapter
    return None if spec is None else spec.to_json()


def saved_folders(directory: Path, *, finished: bool = True) -> list[Path]:
    """Return the checkpoints in a directory in order of steps: those with a manifest, or those without one."""
    found = [path for path in directory.glob(f"{_STEP}*") if path.name.removeprefix(_STEP).isdecimal()]
    return sorted(path for path in found if path.is_dir() and (path / MANIFEST).exists() == finished)


def return_to(directory: Path, step: int) -> None:
    """Move the checkpoints after `step` aside, all if it is 0. They are removed when a new one is complete."""
    folders = {int(folder.name.removeprefix(_STEP)): folder for folder in saved_folders(directory)}
    if step not in {0, *folders}:
        raise CheckpointError(f"there is no checkpoint of step {step}; give one of {[0, *folders]}, 0 for the model")
    for later in [folder for saved, folder in folders.items() if saved > step]:
        later.rename(directory / f"superseded-{time.time_ns()}-{later.name}")


def _locked(directory: Path) -> FileLock:
    try:
        return FileLock(directory / ".lock", per_process=True)
    except LockHeld:
        raise CheckpointError(f"another run is writing to {directory}; stop it, or use another directory") from None


def differences(ours: Json, theirs: Json, path: str = "") -> Iterator[str]:
    """Yield the keys in which two JSON values differ, with both values.

    >>> list(differences({"sync": {"every": 4}}, {"sync": {"every": 8}}))
    ['sync.every is 4 and was 8']
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            yield from differences(ours.get(key), theirs.get(key), f"{path}.{key}" if path else key)
    elif ours != theirs:
        yield f"{path} is {json.dumps(ours)} and was {json.dumps(theirs)}"
