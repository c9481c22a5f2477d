"""How a version reaches vLLM's workers: through shared memory, and a layerwise reload inside each worker.

Before it pauses generation, the engine writes the weights once to an anonymous file in memory (memfd). The workers map
the same pages, so nothing is sent or pickled. The kernel frees the memory when the last process closes it, even after a
crash.

Adapters reach the workers in the same way. On CPU they are computed by `GroupedAdapters`, one pair of matrix products
for each version in a batch: vLLM's own code copies A and B once for every token of a batch, and computes tokens of the
base with the adapter in the last slot if another token of the batch has an adapter.
"""

import json
import mmap
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
from torch import Tensor

from offbeat.rollout.engine import Weights
from offbeat.types import Json

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.worker_manager import LRUCacheWorkerLoRAManager
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

_ALIGNMENT: Final = 64
GRACE: Final = 15.0
"""Seconds that an engine core has to end by itself before it is killed."""


class SharedWeights:
    """Tensors in memory that other processes of the same user on this machine can map.

    >>> with SharedWeights() as shared:
    ...     shared.write([("a", torch.arange(3)), ("b", torch.ones(2, 2, dtype=torch.bfloat16))])
    ...     {name: tuple(tensor.shape) for name, tensor in read(shared.path, shared.table)}
    {'a': (3,), 'b': (2, 2)}
    """

    def __init__(self) -> None:
        self._file = open(os.memfd_create("offbeat-weights", os.MFD_CLOEXEC), "wb")  # noqa: SIM115 - closed on exit
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        self._entries: list[tuple[str, str, list[int], int]] = []

    def __enter__(self) -> "SharedWeights":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    @property
    def table(self) -> str:
        """The content as JSON: name, dtype, shape and offset of each tensor."""
        return json.dumps(self._entries)

    def write(self, weights: Weights) -> None:
        """Write one tensor after another, so that a generator need not hold them all."""
        for name, tensor in weights:
            host = tensor.detach().to("cpu").contiguous()
            offset = -(-self._file.tell() // _ALIGNMENT) * _ALIGNMENT
            self._file.seek(offset)
            self._file.write(host.view(-1).view(torch.uint8).numpy().data)
            self._entries.append((name, str(host.dtype).removeprefix("torch."), list(host.shape), offset))
        self._file.flush()


def read(path: str, table: str) -> Iterator[tuple[str, Tensor]]:
    """Yield what `SharedWeights.write` wrote, as views of the mapped memory."""
    with open(path, "rb") as file:
        pages = mmap.mmap(
            file.fileno(), 0, access=mmap.ACCESS_COPY
        )  # torch wants writable memory, so these pages are private copies
    for name, dtype, shape, offset in json.loads(table):
        kind = getattr(torch, dtype)
        count = int(np.prod(shape, dtype=np.int64))
        yield name, torch.frombuffer(pages, dtype=kind, count=count, offset=offset).view(shape)


class WorkerPart:
    """A mixin for vLLM's worker class. The engine calls its methods by name inside every worker process."""

    model_runner: "GPUModelRunner"

    def offbeat_reload(self, path: str, table: str) -> None:
        """Replace all weights of the model, which must not be generating.

        With tensor parallel, each worker reads everything and keeps its part.

        On CPU, vLLM prepacks linear layers and drops their plain weights, so it cannot load into them as they are. A
        layerwise reload restores the loadable form of each layer, fills it and packs it again. On GPU it fills one
        layer at a time beside the live one and copies it into the tensors that were there before, so captured CUDA
        graphs and compiled code, which hold their addresses, read the new version.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model, config = self.model_runner.get_model(), self.model_runner.vllm_config
        # The device is where layers are made anew. `torch.frombuffer` does not follow it: weights arrive on the host.
        with set_current_vllm_config(config), torch.device(self.model_runner.device):
            initialize_layerwise_reload(model)
            model.load_weights(self.offbeat_weights(path, table))
            finalize_layerwise_reload(model, config.model_config)
            self.offbeat_repair_heads(model)

    def offbeat_weights(self, path: str, table: str) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and whole tensors of the version."""
        return read(path, table)

    def offbeat_repair_heads(self, model: torch.nn.Module) -> None:
        """Pack output heads again.

        A tied head owns no weights, so the reload skips it. On CPU, its packed copy would silently keep serving the
        previous version. On GPU there is no packed copy: the head's weight is the embedding's, which the reload fills
        in place, and the call below does nothing.
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

        for module in model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def offbeat_add_adapter(
        self, number: int, config: Mapping[str, Json], path: str, table: str, removed: Sequence[int]
    ) -> None:
        """Add an adapter from shared memory under a new number, after removing others. The model may be generating.

        vLLM's own `add_lora` reads a directory. It serves modules for which the directory has no tensors as the base,
        without a word; here that is an error.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager: LRUCacheWorkerLoRAManager = self.model_runner.lora_manager
        adapters = manager._adapter_manager
        self.offbeat_group_adapters()
        for other in removed:
            adapters.remove_adapter(other)
        helper = PEFTHelper.from_dict(dict(config))
        helper.validate_legal(manager.lora_config)
        lora = LoRAModel.from_lora_tensors(
            number,
            dict(self.offbeat_weights(path, table)),
            helper,
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
        )
        if not adapters.add_adapter(lora):
            raise RuntimeError(f"vLLM already has an adapter number {number}, and would serve that one")
        if without := [name for name in adapters.modules if lora.get_lora(name) is None]:
            raise RuntimeError(f"vLLM would serve {without[0]} and {len(without) - 1} more modules without the adapter")
        adapters.activate_adapter(number)

    def offbeat_group_adapters(self) -> None:
        """On CPU, replace vLLM's computation of adapters by one that is faster and leaves the base alone."""
        if self.model_runner.device.type == "cpu":
            from offbeat.rollout.vllm_worker import group_adapters

            group_adapters(self.model_runner.lora_manager._adapter_manager)


class GroupedAdapters:
    """A mixin for vLLM's `PunicaWrapperCPU`: computes the tokens of each slot together, and leaves the base alone."""

    token_lora_indices: Tensor
    """By token of the batch: its slot, or −1 for the base."""
    offbeat_rows: tuple[tuple[int, Tensor | None], ...] = ()
    """By slot: its tokens in the batch; None for all of them."""

    def update_metadata(self, *mapping: object, **options: object) -> None:
        """Note which tokens belong to which slot. vLLM calls it when a batch differs from the one before."""
        super().update_metadata(*mapping, **options)  # type: ignore[misc]
        slots_T = self.token_lora_indices
        found = slots_T.unique().tolist()
        self.offbeat_rows = tuple(
            (slot, (slots_T == slot).nonzero()[:, 0] if len(found) > 1 else None) for slot in found if slot >= 0
        )

    def add_lora_linear(
        self,
        y: Tensor,
        x: Tensor,
        lora_a_stacked: tuple[Tensor, ...],
        lora_b_stacked: tuple[Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **_: object,
    ) -> None:
        """Add scale · B A x to y, whose columns are the outputs of one or more layers, one after another."""
        parts = y.split(output_slices, -1)
        for slot, rows in self.offbeat_rows:
            own = x if rows is None else x[rows]
            for a, b, part in zip(lora_a_stacked, lora_b_stacked, parts, strict=True):
                inner = own @ a[slot, 0].T
                if rows is None:
                    part.addmm_(inner, b[slot, 0].T, alpha=scale)
                else:
                    part.index_add_(0, rows, inner @ b[slot, 0].T, alpha=scale)


def group_adapters(manager: "LoRAModelManager") -> None:
    """Let the layers of a worker compute adapters with `GroupedAdapters`. A second call does nothing."""
    for name, wrapper in [*manager.punica_wrapper_mapping.items()]:
        if isinstance(wrapper, GroupedAdapters):
            continue
        kind: type[GroupedAdapters] = type("GroupedAdaptersCPU", (GroupedAdapters, type(wrapper)), {})
        grouped = object.__new__(kind)
        grouped.__dict__.update(wrapper.__dict__)
        manager.punica_wrapper_mapping[name] = grouped
        for layer in manager.modules.values():
            if layer.punica_wrapper is wrapper:
                layer.set_mapping(grouped)
