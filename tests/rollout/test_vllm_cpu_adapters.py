"""Tokens of a batch are computed with the adapters of their own slots, and tokens of the base with none."""

import torch
from torch import Tensor

from offbeat.rollout.vllm_worker import GroupedAdapters, group_adapters


class Wrapper:
    """What vLLM keeps about a batch."""

    token_lora_indices: Tensor

    def update_metadata(self, slots: list[int]) -> None:
        self.token_lora_indices = torch.tensor(slots)


class Layer:
    punica_wrapper: Wrapper

    def set_mapping(self, wrapper: Wrapper) -> None:
        self.punica_wrapper = wrapper


class Manager:
    """The layers of a model, and the wrapper that they share."""

    def __init__(self) -> None:
        wrapper, layer = Wrapper(), Layer()
        layer.set_mapping(wrapper)
        self.punica_wrapper_mapping, self.modules = {"language_model": wrapper}, {"q_proj": layer}


def computed(slots: list[int]) -> tuple[Tensor, Tensor]:
    """Return what is added to two layers of 5 and 3 outputs, and the same token by token."""
    torch.manual_seed(0)
    a = tuple(torch.randn(2, 1, 4, 6) for _ in range(2))
    b = (torch.randn(2, 1, 5, 4), torch.randn(2, 1, 3, 4))
    x, before = torch.randn(len(slots), 6), torch.randn(len(slots), 8)
    manager = Manager()
    group_adapters(manager)  # type: ignore[arg-type]
    group_adapters(manager)  # type: ignore[arg-type]
    wrapper = manager.punica_wrapper_mapping["language_model"]
    assert isinstance(wrapper, GroupedAdapters) and manager.modules["q_proj"].punica_wrapper is wrapper
    wrapper.update_metadata(slots)
    y = before.clone()
    wrapper.add_lora_linear(y, x, a, b, 0.5, (5, 3))
    expected = before.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[token] += 0.5 * torch.cat([b[i][slot, 0] @ a[i][slot, 0] @ x[token] for i in range(2)])
    return y, expected


def test_each_token_is_computed_with_its_own_slot_and_the_base_with_none() -> None:
    for slots in ([0, 0, 0], [1], [-1, -1], [0, 1, 0], [-1, 1, -1, 0], [1, -1]):
        torch.testing.assert_close(*computed(slots))
