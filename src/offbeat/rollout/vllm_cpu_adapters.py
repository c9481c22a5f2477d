"""Adapters on CPU: one pair of matrix products for each version in a batch.

vLLM's own code for CPU copies A and B once for every token of a batch. It also computes tokens of the base with the
adapter in the last slot if another token of the batch has an adapter. The class below does neither.
"""

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from vllm.lora.model_manager import LoRAModelManager


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
