"""The format of a checkpoint: its files, and the trainer state in them.

    step-0000000012/
      rank-0000.safetensors    rank 0's slice of every tensor
      rank-0000.json           the content of that file and its sha256; written when rank 0 is done
      rank-0001.safetensors …
      manifest.json            the content of all files, the extras, and a sha256 of itself; written last

A directory without a manifest is not a checkpoint. A slice is rows [start, end) of a tensor's first axis, so any number
of ranks can read what any other number wrote.

    policy/<parameter>                          master weights and buffers, by their Hugging Face names, or those of an
                                                adapter, by peft's names; the manifest has the digest of its base
    exp_avg/…, exp_avg_sq/…, step/<parameter>   the state of AdamW
    reference/<parameter>                       the reference policy, if there is one
    rng/<rank>/cpu, rng/<rank>/cuda             the states of torch's random generators
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, cast

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from offbeat.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from offbeat.storage.store import LocalStore
from offbeat.trainer.adapter import is_adapter, stored_name
from offbeat.trainer.fsdp import in_first_replica, named_tensors, own_rows
from offbeat.trainer.trainer import Trainer
from offbeat.types import Json
from offbeat.weights.anchor import write_anchor
from offbeat.weights.delta import DTYPES, Bits

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
_BLOCK: Final = 1 << 22


@dataclass(frozen=True)
class Slice:
    """Rows of a tensor, from row `start` on. A scalar counts as one row."""

    values: Tensor
    start: int
    shape: tuple[int, ...]
    """The shape of the whole tensor."""

    @property
    def end(self) -> int:
        return self.start + (len(self.values) if self.values.ndim else 1)


@dataclass(frozen=True)
class SliceEntry:
    """A slice as the manifest lists it."""

    dtype: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    start: int
    end: int


@dataclass(frozen=True)
class CheckpointPart:
    """One rank's file and the slices in it."""

    name: str
    bytes: int
    sha256: str
    entries: Mapping[str, SliceEntry]

    @classmethod
    def from_json(cls, data: Json) -> "CheckpointPart":
        """Parse the result of `asdict`."""
        fields = cast("dict[str, dict[str, dict[str, list[int]]]]", data)
        entries = {n: SliceEntry(**{**e, "shape": tuple(e["shape"])}) for n, e in fields["entries"].items()}  # type: ignore[arg-type]
        return cls(**{**fields, "entries": entries})  # type: ignore[arg-type]


@dataclass(frozen=True)
class CheckpointManifest:
    """The content of a checkpoint."""

    step: int
    config: Json
    """The resolved configuration of the run. Only a run with the same configuration can resume."""
    model: Json
    """The Hugging Face configuration of the model."""
    extras: Mapping[str, Json]
    """JSON values that the caller of `Checkpoints.save` adds, for example the sampler's state."""
    parts: tuple[CheckpointPart, ...]
    adapter: Json = None
    """What `AdapterSpec.to_json` returned, if the policy is an adapter: the weights of its base are not in here."""

    def serialize(self) -> bytes:
        """Return the JSON to write, with a sha256 of its other fields."""
        body: dict[str, Json] = {"format": FORMAT, **asdict(self)}
        return json.dumps({**body, "sha256": digest(body)}, indent=1).encode()

    @classmethod
    def parse(cls, content: bytes, where: str) -> "CheckpointManifest":
        """Parse the result of `serialize`. Raises `CheckpointDamaged` if its sha256 does not match."""
        try:
            body = json.loads(content)
            claimed = body.pop("sha256")
            if body.pop("format") != FORMAT:
                raise CheckpointError(f"{where} does not have format {FORMAT}: another version of offbeat wrote it")
            if claimed != digest({"format": FORMAT, **body}):
                raise ValueError("its content does not match its sha256")
            return cls(**{**body, "parts": tuple(CheckpointPart.from_json(part) for part in body["parts"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            why = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise CheckpointDamaged(
                f"{where} is damaged: {why}; remove the directory of this checkpoint to use the one before"
            ) from None

    def find(self, name: str, start: int, end: int) -> list[tuple[CheckpointPart, SliceEntry]]:
        """Return the slices that hold rows [start, end) of a tensor, in order. Raises if a row is missing."""
        found = [(part, part.entries[name]) for part in self.parts if name in part.entries]
        found = sorted(((p, e) for p, e in found if e.start < end and e.end > start), key=lambda pair: pair[1].start)
        covered = start
        for _, entry in found:
            if entry.start > covered:
                break
            covered = entry.end
        if covered < end:
            raise CheckpointDamaged(
                f"rows {covered} to {end} of {name} are in no file of the checkpoint of step {self.step}"
            )
        return found

    @property
    def tensors(self) -> dict[str, SliceEntry]:
        """One entry of each tensor, for its dtype and whole shape."""
        return {name: entry for part in self.parts for name, entry in part.entries.items()}


def digest(data: Json) -> str:
    """Return the sha256 of a JSON value. The order of keys does not matter.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_part(store: LocalStore, folder: str, rank: int, slices: Mapping[str, Slice]) -> None:
    """Write a rank's file with fsync, read it back and compare; then write its `rank-….json`."""
    name = f"rank-{rank:04}.safetensors"
    bits = {key: Bits.of(one.values) for key, one in slices.items()}
    with store.create(f"{folder}/{name}") as writer:
        write_anchor(bits, writer)
        size, sha256 = writer.finished()
    entries = {key: SliceEntry(bits[key].dtype, one.shape, one.start, one.end) for key, one in slices.items()}
    part = CheckpointPart(name, size, sha256, entries)
    if problem := find_problem(Path(store.uri) / folder, part):
        raise CheckpointError(f"the file on disk differs from what was written: {problem}; check the disk")
    store.put(f"{folder}/{done_file(rank)}", json.dumps(asdict(part)).encode())


def done_file(rank: int) -> str:
    """Return the name of the file that says that a rank's part is complete."""
    return f"rank-{rank:04}.json"


def find_problem(folder: Path, part: CheckpointPart) -> str | None:
    """Read every byte of a part's file; return what is wrong with it, or None."""
    path = folder / part.name
    sha256 = hashlib.sha256()
    try:
        with path.open("rb", buffering=0) as file:
            while block := file.read(_BLOCK):
                sha256.update(block)
            size = file.tell()
    except OSError as error:
        return f"{path} cannot be read ({error.strerror})"
    if size != part.bytes:
        return f"{path} has {size} bytes, the manifest says {part.bytes}"
    if sha256.hexdigest() != part.sha256:
        return f"{path} has sha256 {sha256.hexdigest()[:12]}…, the manifest says {part.sha256[:12]}…"
    return None


def read_rows(folder: Path, manifest: CheckpointManifest, name: str, start: int, end: int) -> Tensor:
    """Read rows [start, end) of a tensor from the files that hold them."""
    slices = []
    for part, entry in manifest.find(name, start, end):
        with safe_open(folder / part.name, framework="pt") as file:
            if not entry.shape:
                scalar: Tensor = file.get_tensor(name)
                return scalar
            low, high = max(start, entry.start) - entry.start, min(end, entry.end) - entry.start
            slices.append(file.get_slice(name)[low:high])
    if not slices:
        entry = manifest.tensors[name]
        return torch.empty((0, *entry.shape[1:]), dtype=DTYPES[entry.dtype])
    return slices[0] if len(slices) == 1 else torch.cat(slices)


def trainer_tensors(trainer: Trainer) -> dict[str, Tensor]:
    """Return the trainer's own tensors, not copies, by their names in a checkpoint."""
    found = {f"policy/{name}": tensor for name, tensor in named_tensors(trainer.policy_model)}
    for key, tensor in trainer.optimizer.tensors().items():
        kind, name = key.split("/", 1)
        name = name.removeprefix("model.")  # the optimizer uses the names of the policy model, which wraps the model
        name = stored_name(name) if is_adapter(name) else name
        if f"policy/{name}" not in found:
            raise CheckpointError(
                f"the optimizer holds {key}, which the policy model does not have: make the optimizer from the policy "
                "model"
            )
        found[f"{'policy' if kind == 'master' else kind}/{name}"] = tensor
    if trainer.reference is not None:
        found |= {f"reference/{name}": tensor for name, tensor in named_tensors(trainer.reference)}
    return found


def local_slices(trainer: Trainer) -> dict[str, Slice]:
    """Copy what this rank writes to the host: its rows of sharded tensors; on rank 0 also the unsharded tensors.

    If several nodes hold the same rows, the ranks of the first one write them.
    """
    found = {}
    for name, tensor in trainer_tensors(trainer).items():
        start, local = own_rows(name, tensor)
        whole = not isinstance(tensor, DTensor)
        if local.numel() and (trainer.ranks.rank == 0 if whole else in_first_replica(tensor)):
            found[name] = Slice(local.detach().to("cpu", copy=True), start, tuple(tensor.shape))
    for kind, state in _generator_states().items():
        found[f"rng/{trainer.ranks.rank}/{kind}"] = Slice(state, 0, tuple(state.shape))
    return found


@torch.no_grad()
def restore(trainer: Trainer, folder: Path, manifest: CheckpointManifest) -> None:
    """Fill the trainer from a checkpoint. Missing, unknown or misshapen tensors raise before anything changes."""
    tensors, stored = trainer_tensors(trainer), manifest.tensors
    generators = {kind: _generator_name(trainer.ranks.rank, kind, stored) for kind in _generator_states()}
    problems = _mismatches(tensors, stored)
    problems += [f"it lacks rng/{kind}" for kind, name in generators.items() if not name]
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointMismatch(
            f"the checkpoint of step {manifest.step} does not fit: {'; '.join(problems[:3])}{more}"
        )
    for name, tensor in tensors.items():
        start, local = own_rows(name, tensor)
        values = read_rows(folder, manifest, name, start, start + (len(local) if local.ndim else 1))
        if values.dtype != local.dtype and not torch.equal(values.to(local.dtype).to(values.dtype), values):
            raise CheckpointMismatch(
                f"{name} was saved as {values.dtype} and would be rounded to {local.dtype}; load it in {values.dtype}"
            )
        local.copy_(values)
    trainer.optimizer.round_parameters()
    for kind, name in generators.items():
        _SET_GENERATOR[kind](read_rows(folder, manifest, name, 0, stored[name].shape[0]))
    trainer.step = manifest.step


def _mismatches(tensors: dict[str, Tensor], stored: dict[str, SliceEntry]) -> list[str]:
    saved = {name: entry for name, entry in stored.items() if not name.startswith("rng/")}
    found = [f"it lacks {name}" for name in sorted(tensors.keys() - saved.keys())]
    found += [f"it has {name}, which this trainer does not have" for name in sorted(saved.keys() - tensors.keys())]
    for name in sorted(tensors.keys() & saved.keys()):
        if tuple(tensors[name].shape) != saved[name].shape:
            found.append(f"{name} is {list(tensors[name].shape)} here and {list(saved[name].shape)} there")
    return found


def _generator_states() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _generator_name(rank: int, kind: str, stored: dict[str, SliceEntry]) -> str:
    """Return the name of this rank's generator state, or of rank 0's if there were fewer ranks; "" if it is missing."""
    return next((name for name in (f"rng/{rank}/{kind}", f"rng/0/{kind}") if name in stored), "")


_SET_GENERATOR: Final = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}
