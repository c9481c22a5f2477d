"""The twin of a model: loading beside it, and the exchange."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from offbeat.rollout.vllm_twin import Twin, can_have_twin


class Packed(nn.Linear):
    """A layer like vLLM's on CPU: a reload packs its weight into a function on the layer."""

    packed: Callable[[torch.Tensor], torch.Tensor]

    def pack(self) -> None:
        weight = self.weight.detach().clone()
        self.packed = lambda x: x @ weight.T

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.packed(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Packed(2, 2, bias=False)
        self.head = nn.Linear(2, 2, bias=False)
        self.head.weight = self.body.weight
        self.register_buffer("scale", torch.ones(1))
        self.body.pack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)) * self.scale  # type: ignore[no-any-return]


def filled(value: float) -> Callable[[nn.Module], None]:
    def reload(model: nn.Module) -> None:
        assert isinstance(model, Tied)
        model.body.weight.fill_(value)
        model.body.pack()

    return reload


def result(model: nn.Module) -> float:
    return float(model(torch.ones(1, 2))[0, 0].detach())


def test_the_model_serves_the_old_version_until_the_twin_takes_over() -> None:
    model = Tied()
    old, twin = result(model), Twin(model)
    for value in (1.0, 2.0, 3.0):
        twin.load(filled(value))
        assert twin.join()
        assert result(model) == old
        twin.take_over()
        old = result(model)
        assert old == 4 * value**2
        assert model.head.weight is model.body.weight, "a tied head stays tied"


def test_the_memory_of_the_previous_version_is_used_again() -> None:
    model = Tied()
    twin, places = Twin(model), set()
    for value in range(6):
        twin.load(filled(value))
        twin.join()
        twin.take_over()
        places.add(model.body.weight.data_ptr())
    assert len(places) == 2


def test_what_the_model_learns_about_itself_while_it_runs_is_kept() -> None:
    model = Tied()
    twin = Twin(model)
    model.cache = "bound after the twin was made"
    twin.load(filled(1.0))
    twin.join()
    twin.take_over()
    assert model.cache == "bound after the twin was made"


def test_the_error_of_a_load_reaches_the_one_who_asks() -> None:
    def fail(_: nn.Module) -> None:
        raise ValueError("half a version")

    twin = Twin(Tied())
    twin.load(fail)
    with pytest.raises(ValueError, match="half a version"):
        twin.join()


def test_a_model_with_a_view_of_its_own_weights_has_no_twin() -> None:
    model = Tied()
    assert can_have_twin(model)
    model.register_buffer("first_row", model.body.weight.detach()[0])
    assert not can_have_twin(model)
