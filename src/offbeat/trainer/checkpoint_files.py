"""What a checkpoint is on disk, and how it is known to be whole.

    step-0000000012/
      rank-0000.safetensors    the slices that rank 0 holds, of every tensor
      rank-0000.json           what is in that file, and its sha256: rank 0 has done its part
      rank-0001.safetensors …
      manifest.json            all parts together, the JSON pieces, and a sha256 of itself; written last

Without its manifest a directory is no checkpoint. A slice is rows [start, end) of a tensor's first axis, so that any
number of ranks reads what any other number wrote.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, cast

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from offbeat.errors import CheckpointDamaged, CheckpointError, CheckpointMismatch
from offbeat.storage.store import LocalStore
from offbeat.trainer.fsdp import named_tensors
from offbeat.trainer.trainer import Trainer
from offbeat.types import Json
from offbeat.weights.anchor import write_anchor
from offbeat.weights.delta import DTYPES, Bits

FORMAT: Final = 1
MANIFEST: Final = "manifest.json"
_BLOCK: Final = 1 << 22


@dataclass(frozen=True)
class Slice:
    """Rows of a tensor from `start` on, and what the whole tensor looks like."""

    values: Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        """A scalar counts as one row."""
        return self.start + (len(self.values) if self.values.ndim else 1)


@dataclass(frozen=True)
class Entry:
    """A tensor's slice in a part."""

    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    start: int
    end: int


@dataclass(frozen=True)
class CheckpointPart:
    """One rank's file."""

    name: str
    bytes: int
    sha256: str
    entries: Mapping[str, Entry]

    @classmethod
    def from_json(cls, data: Json) -> "CheckpointPart":
        """The inverse of `asdict`."""
        fields = cast("dict[str, dict[str, dict[str, list[int]]]]", data)
        entries = {n: Entry(**{**e, "shape": tuple(e["shape"])}) for n, e in fields["entries"].items()}  # type: ignore[arg-type]
        return cls(**{**fields, "entries": entries})  # type: ignore[arg-type]


@dataclass(frozen=True)
class CheckpointManifest:
    """What belongs to a checkpoint."""

    step: int
    config: Json
    """The run's, resolved: a run that goes on must have the same."""
    model: Json
    """The Hugging Face configuration of the model."""
    extras: Mapping[str, Json]
    parts: tuple[CheckpointPart, ...]

    def serialise(self) -> bytes:
        """As it is written, with the sha256 of all else in it."""
        body: dict[str, Json] = {"format": FORMAT, **asdict(self)}
        return json.dumps({**body, "sha256": digest(body)}, indent=1).encode()

    @classmethod
    def parse(cls, content: bytes, where: str) -> "CheckpointManifest":
        """What `serialise` made; `CheckpointDamaged` if not a byte of it may be trusted."""
        try:
            body = json.loads(content)
            claimed = body.pop("sha256")
            if body.pop("format") != FORMAT:
                raise CheckpointError(f"{where} has another format than {FORMAT}: another version of offbeat wrote it")
            if claimed != digest({"format": FORMAT, **body}):
                raise ValueError("its sha256 is not its own")
            return cls(**{**body, "parts": tuple(CheckpointPart.from_json(part) for part in body["parts"])})
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointDamaged(f"{where} is damaged: {error}") from None

    def find(self, name: str, start: int, end: int) -> list[tuple[CheckpointPart, Entry]]:
        """Where rows [start, end) of a tensor are, in order; says which are nowhere."""
        found = [(part, part.entries[name]) for part in self.parts if name in part.entries]
        found = sorted(((p, e) for p, e in found if e.start < end and e.end > start), key=lambda pair: pair[1].start)
        at = start
        for _, entry in found:
            if entry.start > at:
                break
            at = entry.end
        if at < end:
            raise CheckpointDamaged(
                f"rows {at} to {end} of {name} are in no file of the checkpoint of step {self.step}"
            )
        return found

    @property
    def tensors(self) -> dict[str, Entry]:
        """Name, dtype and whole shape of everything there is."""
        return {name: entry for part in self.parts for name, entry in part.entries.items()}


def digest(data: Json) -> str:
    """sha256 of JSON, whatever the order of its keys.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def write_part(store: LocalStore, folder: str, rank: int, slices: Mapping[str, Slice]) -> None:
    """A rank's file, forced to disk, read back and compared; then the word that it is there."""
    name = part_name(rank)
    bits = {key: Bits.of(one.values) for key, one in slices.items()}
    with store.create(f"{folder}/{name}") as writer:
        write_anchor(bits, writer)
        size, sha256 = writer.finished()
    entries = {key: Entry(bits[key].dtype, one.shape, one.start, one.end) for key, one in slices.items()}
    part = CheckpointPart(name, size, sha256, entries)
    if problem := problem_of(Path(store.uri) / folder, part):
        raise CheckpointError(f"what was written is not what is on the disk: {problem}; look at the disk")
    store.put(f"{folder}/{announcement(rank)}", json.dumps(asdict(part)).encode())


def part_name(rank: int) -> str:
    """Of a rank's file."""
    return f"rank-{rank:04}.safetensors"


def announcement(rank: int) -> str:
    """Of the file that says a rank's part is complete."""
    return f"rank-{rank:04}.json"


def problem_of(folder: Path, part: CheckpointPart) -> str | None:
    """What is wrong with a part's file, every byte of it read; None if nothing is."""
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
    """Rows [start, end) of a tensor, from whichever files have them."""
    pieces = []
    for part, entry in manifest.find(name, start, end):
        with safe_open(folder / part.name, framework="pt") as file:
            if not entry.shape:
                scalar: Tensor = file.get_tensor(name)
                return scalar
            low, high = max(start, entry.start) - entry.start, min(end, entry.end) - entry.start
            pieces.append(file.get_slice(name)[low:high])
    if not pieces:
        entry = manifest.tensors[name]
        return torch.empty((0, *entry.shape[1:]), dtype=DTYPES[entry.dtype])
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def differing(ours: Json, theirs: Json, path: str = "") -> Iterable[str]:
    """The keys in which two JSON values differ, with both values.

    >>> list(differing({"sync": {"every": 4}}, {"sync": {"every": 8}}))
    ['sync.every is 4 and was 8']
    """
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in sorted(ours.keys() | theirs.keys()):
            yield from differing(ours.get(key), theirs.get(key), f"{path}.{key}" if path else key)
    elif ours != theirs:
        yield f"{path} is {json.dumps(ours)} and was {json.dumps(theirs)}"


def pieces(trainer: Trainer) -> dict[str, Tensor]:
    """The trainer's own tensors, not copies, by the names above."""
    found = {f"policy/{name}": tensor for name, tensor in named_tensors(trainer.policy_model)}
    for key, tensor in trainer.optimizer.tensors().items():
        kind, name = key.split("/", 1)
        name = name.removeprefix("model.")  # the optimiser calls a parameter as the scorer does, which holds the model
        if f"policy/{name}" not in found:
            raise CheckpointError(
                f"the optimizer moves {key}, which the policy model does not have: make the optimizer from the policy "
                "model"
            )
        found[f"{'policy' if kind == 'master' else kind}/{name}"] = tensor
    if trainer.reference is not None:
        found |= {f"reference/{name}": tensor for name, tensor in named_tensors(trainer.reference)}
    return found


def local_slices(trainer: Trainer) -> dict[str, Slice]:
    """What this rank writes, copied to the host: its rows of what is sharded; rank 0 also what is on every rank."""
    found = {}
    for name, tensor in pieces(trainer).items():
        start, local = own_rows(name, tensor)
        if local.numel() and (isinstance(tensor, DTensor) or trainer.ranks.rank == 0):
            found[name] = Slice(local.detach().to("cpu", copy=True), start, tuple(tensor.shape))
    for kind, state in _generators().items():
        found[f"rng/{trainer.ranks.rank}/{kind}"] = Slice(state, 0, tuple(state.shape))
    return found


def own_rows(name: str, tensor: Tensor) -> tuple[int, Tensor]:
    """The first row this rank has of a tensor, and the rows; all of them if it is not sharded."""
    if not isinstance(tensor, DTensor):
        return 0, tensor
    local, size, rank = tensor.to_local(), tensor.device_mesh.size(), tensor.device_mesh.get_local_rank()
    each = -(-tensor.shape[0] // size)
    start, end = min(rank * each, tensor.shape[0]), min((rank + 1) * each, tensor.shape[0])
    if tensor.placements != (Shard(0),) or len(local) != end - start:
        raise CheckpointError(f"{name} is placed as {tensor.placements}: only slices of the first axis can be kept")
    return start, local


@torch.no_grad()
def restore(trainer: Trainer, step: int, stored: dict[str, Entry], read: Callable[[str, int, int], Tensor]) -> None:
    """Fill the trainer with what `stored` lists, by `read(name, start, end)`. Every mismatch is found first."""
    ours = pieces(trainer)
    generators = {kind: _generator_name(trainer.ranks.rank, kind, stored) for kind in _generators()}
    if problems := _mismatches(ours, stored) + [
        f"it lacks rng/{kind}" for kind, name in generators.items() if not name
    ]:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise CheckpointMismatch(f"the checkpoint of step {step} does not fit: {'; '.join(problems[:3])}{more}")
    for name, tensor in ours.items():
        start, local = own_rows(name, tensor)
        values = read(name, start, start + (len(local) if local.ndim else 1))
        if values.dtype != local.dtype and not torch.equal(values.to(local.dtype).to(values.dtype), values):
            raise CheckpointMismatch(
                f"{name} was saved as {values.dtype} and would be rounded to {local.dtype}; load it in {values.dtype}"
            )
        local.copy_(values)
    trainer.optimizer.round_parameters()
    for kind, name in generators.items():
        _SETTERS[kind](read(name, 0, stored[name].shape[0]))
    trainer.step = step


def _mismatches(ours: dict[str, Tensor], stored: dict[str, Entry]) -> list[str]:
    theirs = {name: entry for name, entry in stored.items() if not name.startswith("rng/")}
    found = [f"it lacks {name}" for name in sorted(ours.keys() - theirs.keys())]
    found += [f"it has {name}, which this trainer has not" for name in sorted(theirs.keys() - ours.keys())]
    for name in sorted(ours.keys() & theirs.keys()):
        if tuple(ours[name].shape) != theirs[name].shape:
            found.append(f"{name} is {list(ours[name].shape)} here and {list(theirs[name].shape)} there")
    return found


def _generators() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _generator_name(rank: int, kind: str, stored: dict[str, Entry]) -> str:
    """This rank's; with more ranks than there were, the first one's."""
    return next((name for name in (f"rng/{rank}/{kind}", f"rng/0/{kind}") if name in stored), "")


_SETTERS: Final = {"cpu": torch.set_rng_state, "cuda": torch.cuda.set_rng_state}
