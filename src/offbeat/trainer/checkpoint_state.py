"""What of a trainer a checkpoint holds: names for it, this rank's slices of it, and the way back.

    policy/…      float32 master weights where there are any, else the parameter itself
    exp_avg/…     AdamW's moments, and exp_avg_sq/…, step/…
    reference/…   the reference policy, if there is one
    rng/0/cpu     torch's generators, by rank: nothing of ours draws from them, somebody's model may

The learning rate is a function of the step; randomness is derived from the seed by name. There is nothing else.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from offbeat.trainer.checkpoint_files import CheckpointError, Entry, Slice
from offbeat.trainer.fsdp import named_tensors
from offbeat.trainer.trainer import Trainer


class CheckpointMismatch(CheckpointError):
    """It is whole, and belongs to another run or model."""


def pieces(trainer: Trainer) -> dict[str, Tensor]:
    """The trainer's own tensors, not copies, by the names above."""
    found = {f"policy/{name}": tensor for name, tensor in named_tensors(trainer.scorer)}
    for key, tensor in trainer.optimizer.tensors().items():
        kind, name = key.split("/", 1)
        name = name.removeprefix("model.")  # the optimiser calls a parameter as the scorer does, which holds the model
        if f"policy/{name}" not in found:
            raise CheckpointError(f"the optimiser moves {key}, which the scorer does not have: make it from the scorer")
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
