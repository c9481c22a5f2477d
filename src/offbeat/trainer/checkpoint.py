"""Checkpoints: everything a run needs to go on as if nothing had happened.

    checkpoints = Checkpoints("run/checkpoints", config=config, ranks=ranks)
    if (newest := checkpoints.newest()) is not None:
        newest.restore(trainer)                               # parameters, moments, generators, step
        sampler.restore(newest.extra("sampler"))
    …
    checkpoints.save(trainer, {"sampler": sampler.state(), "snapshot": …, "published": 8})
    checkpoints.check()                                       # each step: did the last one reach the disk?

    save    copies to the host, then returns ── in a thread: each rank's file, read back ─ rank 0: manifest ─ prune

Ranks agree by files in the one directory they share, so no exchange between them runs beside training. A killed run
leaves a directory without a manifest, which the next one removes. Nothing is ever overwritten.
"""

import fcntl
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

import torch
from torch import Tensor

from offbeat.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from offbeat.storage.store import LocalStore, force
from offbeat.trainer.checkpoint_files import (
    MANIFEST,
    CheckpointManifest,
    CheckpointPart,
    Slice,
    announcement,
    differing,
    local_slices,
    problem_of,
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
    """A whole checkpoint, every byte of which was read and found as written."""

    folder: Path
    manifest: CheckpointManifest

    @classmethod
    def open(cls, folder: Path, *, verify: bool = True) -> "Checkpoint":
        """The checkpoint in a directory; raises `CheckpointDamaged` with everything that is wrong."""
        try:
            content = (folder / MANIFEST).read_bytes()
        except FileNotFoundError:
            raise CheckpointDamaged(f"{folder} has no {MANIFEST}: it is no checkpoint, or was not finished") from None
        manifest = CheckpointManifest.parse(content, str(folder / MANIFEST))
        for name, entry in manifest.tensors.items():
            manifest.find(name, 0, entry.shape[0] if entry.shape else 1)
        found = [problem_of(folder, part) for part in manifest.parts] if verify else []
        if problems := [problem for problem in found if problem]:
            raise CheckpointDamaged(f"the checkpoint of step {manifest.step} is damaged: {'; '.join(problems)}")
        return cls(folder, manifest)

    @property
    def step(self) -> int:
        """k: steps taken when it was made."""
        return self.manifest.step

    def extra(self, name: str) -> Json:
        """One of the pieces given to `save`."""
        if name not in self.manifest.extras:
            held = ", ".join(sorted(self.manifest.extras)) or "nothing"
            raise CheckpointMismatch(
                f"the checkpoint of step {self.step} has no {name!r}; beside the trainer it has {held}"
            )
        return self.manifest.extras[name]

    def policy(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's weights, whole, by their names in a Hugging Face state dict."""
        for name, entry in self.manifest.tensors.items():
            if name.startswith("policy/"):
                rows = entry.shape[0] if entry.shape else 1
                yield name.removeprefix("policy/"), read_rows(self.folder, self.manifest, name, 0, rows)

    def restore(self, trainer: Trainer) -> None:
        """Bring the trainer to where it was; with any number of ranks, whatever their number was then."""

        def read(name: str, start: int, end: int) -> Tensor:
            return read_rows(self.folder, self.manifest, name, start, end)

        restore(trainer, self.step, self.manifest.tensors, read)


class Checkpoints(AbstractContextManager["Checkpoints"]):
    """The checkpoints of one run, in a directory that every rank sees. Ranks call the same methods in the same order.

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
    >>> with tempfile.TemporaryDirectory() as place, Checkpoints(place, config={"seed": 7}) as checkpoints:
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
        keep: int = 2,
        ranks: Ranks | None = None,
        patience: float = 600.0,
    ) -> None:
        """`config` is the run's, resolved; the newest `keep` stay; a rank's part is waited for `patience` seconds."""
        if keep < 2:
            raise ValueError(f"keep = {keep}: keep at least 2, so that one may turn out to be damaged")
        self._directory = Path(directory)
        self._config = config
        self._keep = keep
        self._ranks = ranks or Ranks()
        self._patience = patience
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[None] | None = None
        if self._ranks.rank == 0:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._lock = _locked(self._directory)
            for step in self._found(finished=False):
                shutil.rmtree(self._folder(step))
            force(self._directory)
        self._meet()
        self._saved = set(self._found(finished=True))

    def save(self, trainer: Trainer, extras: Mapping[str, Json]) -> None:
        """Keep the trainer as it is now, and JSON pieces beside it, of which rank 0's count.

        Returns once all is copied to the host. Waits for the save before it; raises if that failed. A step that is
        there already is not written again: a state of a step is always the same.
        """
        self.wait()
        if trainer.step in self._saved:
            return
        model = json.loads(trainer.policy_model.model.config.to_json_string(use_diff=False))
        manifest = CheckpointManifest(
            trainer.step, self._config, model, json.loads(json.dumps(extras, allow_nan=False)), ()
        )
        self._saved.add(trainer.step)
        self._writing = self._writer.submit(self._write, manifest, local_slices(trainer))

    def check(self) -> None:
        """Raise if the last save failed; to be called at every step."""
        if self._writing is not None and self._writing.done():
            self.wait()

    def wait(self) -> None:
        """Until the last save is on disk; raises if it failed."""
        writing, self._writing = self._writing, None
        try:
            if writing is not None:
                writing.result()
        except OSError as error:
            raise CheckpointError(
                f"a checkpoint could not be written to {self._directory}: {error}. The ones before it are untouched; "
                "make room or mend the disk, and resume"
            ) from error

    def newest(self) -> Checkpoint | None:
        """The newest one that is whole and of this run; None if there is none. One that is damaged is set aside.

        Ranks read a share of the files each.
        """
        self.wait()
        self._meet()
        damaged: list[str] = []
        for step in reversed(self._found(finished=True)):
            checkpoint, problem = self._verified(step)
            if checkpoint is not None:
                if changes := list(differing(self._config, checkpoint.manifest.config)):
                    raise CheckpointMismatch(
                        f"the checkpoint of step {step} was made with another configuration: {'; '.join(changes)}. "
                        "Undo the change, or begin a new run"
                    )
                return checkpoint
            damaged.append(problem)
            logger.error("%s; it is set aside, and an older one is taken", problem)
            self._set_aside(step)
        if damaged:
            raise CheckpointDamaged(f"none of the checkpoints in {self._directory} is whole: {'; '.join(damaged)}")
        return None

    def close(self) -> None:
        """Finish what is being written."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            if self._ranks.rank == 0:
                self._lock.close()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, manifest: CheckpointManifest, slices: Mapping[str, Slice]) -> None:
        """In the thread: this rank's part; rank 0 also completes the checkpoint and lets go of older ones."""
        folder = self._folder(manifest.step)
        folder.mkdir(exist_ok=True)
        force(self._directory)
        store = LocalStore(self._directory)
        write_part(store, folder.name, self._ranks.rank, slices)
        if self._ranks.rank == 0:
            parts = tuple(self._awaited(folder, rank) for rank in range(self._ranks.size))
            complete = CheckpointManifest(manifest.step, manifest.config, manifest.model, manifest.extras, parts)
            store.put(f"{folder.name}/{MANIFEST}", complete.serialise())
            Checkpoint.open(folder, verify=False)
            for step in self._found(finished=True)[: -self._keep]:
                store.remove([f"{self._folder(step).name}/{MANIFEST}"])
                shutil.rmtree(self._folder(step))

    def _awaited(self, folder: Path, rank: int) -> CheckpointPart:
        deadline = time.monotonic() + self._patience
        while not (folder / announcement(rank)).exists():
            if time.monotonic() > deadline:
                raise CheckpointError(
                    f"waited {self._patience:.0f} s for rank {rank} to write its part of {folder}; does every rank see "
                    "this directory?"
                )
            time.sleep(_POLL)
        return CheckpointPart.from_json(json.loads((folder / announcement(rank)).read_bytes()))

    def _verified(self, step: int) -> tuple[Checkpoint | None, str]:
        """The checkpoint, or what some rank found wrong with it."""
        problem, checkpoint = "", None
        try:
            checkpoint = Checkpoint.open(self._folder(step), verify=False)
            share = checkpoint.manifest.parts[self._ranks.rank :: self._ranks.size]
            found = [wrong for part in share if (wrong := problem_of(self._folder(step), part))]
            problem = "; ".join(found)
        except CheckpointDamaged as error:
            problem = str(error)
        if float(self._ranks.sum(torch.tensor([float(bool(problem))]))):
            return None, problem or f"another rank found the checkpoint of step {step} damaged"
        return checkpoint, ""

    def _set_aside(self, step: int) -> None:
        self._saved.discard(step)
        if self._ranks.rank == 0:
            self._folder(step).rename(self._directory / f"damaged-{time.time_ns()}-{self._folder(step).name}")
            force(self._directory)
        self._meet()

    def _found(self, *, finished: bool) -> list[int]:
        """Steps that have a directory, with a manifest or without, in order."""
        folders = [path for path in self._directory.glob(f"{_STEP}*") if (path / MANIFEST).exists() == finished]
        return sorted(int(path.name.removeprefix(_STEP)) for path in folders)

    def _folder(self, step: int) -> Path:
        return self._directory / f"{_STEP}{step:010}"

    def _meet(self) -> None:
        """Wait for all ranks."""
        self._ranks.sum(torch.zeros(1))


def _locked(directory: Path) -> IO[bytes]:
    """A lock that the kernel releases when the process ends, however it ends."""
    lock = (directory / ".lock").open("ab")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise CheckpointError(f"another run is writing to {directory}; end it first, or use another place") from error
    return lock
