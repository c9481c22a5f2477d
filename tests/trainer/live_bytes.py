"""What a trainer holds, and what tensors take while a step runs, counted as torch allocates them."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offbeat.trainer.checkpoint_files import trainer_tensors
from offbeat.trainer.forward import to_model_inputs
from offbeat.trainer.trainer import Trainer
from offbeat.trainer.worst_case import StepShape, worst_micro_batch


def held_bytes(trainer: Trainer) -> dict[str, int]:
    """Return what this rank holds throughout training, by the names of the memory model."""
    terms = {"policy": "master weights", "reference": "reference policy"}
    found: dict[str, int] = {}
    for name, tensor in trainer_tensors(trainer).items():
        term = terms.get(name.split("/")[0], "AdamW")
        found[term] = found.get(term, 0) + _local(tensor).nbytes
    parameters = [*trainer.policy_model.parameters()]
    state = trainer.optimizer.tensors()
    own = {name: p for name, p in trainer.policy_model.named_parameters() if f"master/{name}" in state}
    found["parameters"] = sum(p.nbytes for name, p in own.items() if state[f"master/{name}"].data_ptr() != p.data_ptr())
    found["frozen weights"] = sum(_local(p).nbytes for p in parameters if not p.requires_grad)
    found["gradients"] = sum(4 * _local(p).numel() for p in parameters if p.requires_grad)
    return {name: size for name, size in found.items() if size}


def activation_bytes(trainer: Trainer, shape: StepShape) -> int:
    """Return what the largest micro-batch keeps for its backward pass."""
    inputs = to_model_inputs(
        worst_micro_batch(trainer, shape), shared_prefix=trainer.check.shared_prefix, device=trainer.policy_model.device
    )
    with LiveBytes() as live:
        stats = trainer.policy_model(inputs)
        kept = live.now
    del stats
    return kept


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class LiveBytes(TorchDispatchMode):
    """Count the bytes of every storage that operations allocate, for as long as it lives.

    >>> with LiveBytes() as live:
    ...     a = torch.zeros(1000)
    ...     b = a + 1
    ...     del a
    >>> live.now, live.peak
    (4000, 8000)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _is_plain_tensor(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if _is_plain_tensor(tensor) and tensor.untyped_storage()._cdata not in given:
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._watched:
            return

        def freed(_: object) -> None:
            self.now -= size
            del self._watched[key]

        self._watched[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def _is_plain_tensor(value: object) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter)
