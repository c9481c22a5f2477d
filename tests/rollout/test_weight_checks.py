"""An engine gets the whole tensors of a version, or an error that says what is wrong."""

import re

import pytest
import torch

from offbeat.errors import AdapterMismatch
from offbeat.rollout.parity import adapter_shapes, check_adapter
from offbeat.weights.adapter import AdapterSpec

SPEC = AdapterSpec(rank=2, alpha=4.0, targets=("q_proj", "down_proj"), base="")
BASE = {
    "model.embed_tokens.weight": [9, 4],
    "model.layers.0.self_attn.q_proj.weight": [6, 4],
    "model.layers.0.self_attn.q_proj.bias": [6],
    "model.layers.0.mlp.down_proj.weight": [4, 8],
}
Q = "base_model.model.model.layers.0.self_attn.q_proj"


def adapter() -> dict[str, torch.Tensor]:
    return {name: torch.ones(shape) for name, shape in adapter_shapes(BASE, SPEC).items()}


def test_an_adapter_has_two_tensors_for_every_layer_that_it_changes() -> None:
    down = "base_model.model.model.layers.0.mlp.down_proj"
    assert adapter_shapes(BASE, SPEC) == {
        f"{Q}.lora_A.weight": [2, 4],
        f"{Q}.lora_B.weight": [6, 2],
        f"{down}.lora_A.weight": [2, 8],
        f"{down}.lora_B.weight": [4, 2],
    }


def test_a_target_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(AdapterMismatch, match="no linear layer called up_proj"):
        adapter_shapes(BASE, AdapterSpec(2, 4.0, ("q_proj", "up_proj"), ""))


def test_a_whole_adapter_passes_unchanged() -> None:
    given = adapter()
    assert dict(check_adapter(given.items(), adapter_shapes(BASE, SPEC))) == given


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_adapter_with_a_value_that_is_not_finite_is_refused(value: float) -> None:
    given = adapter()
    given[f"{Q}.lora_B.weight"][3, 1] = value
    with pytest.raises(ValueError, match=re.escape(f"{Q}.lora_B.weight has values that are not finite")):
        list(check_adapter(given.items(), adapter_shapes(BASE, SPEC)))


def test_an_adapter_that_lacks_a_layer_has_another_rank_or_an_unknown_layer_is_refused() -> None:
    shapes = adapter_shapes(BASE, SPEC)
    lacking = adapter()
    del lacking[f"{Q}.lora_A.weight"], lacking[f"{Q}.lora_B.weight"]
    with pytest.raises(ValueError, match="missing: " + re.escape(f"{Q}.lora_A.weight, {Q}.lora_B.weight")):
        list(check_adapter(lacking.items(), shapes))
    other_rank = adapter() | {f"{Q}.lora_A.weight": torch.ones(3, 4)}
    with pytest.raises(ValueError, match=r"has shape \[2, 4\], but \[3, 4\] was given"):
        list(check_adapter(other_rank.items(), shapes))
    unknown = adapter() | {f"{Q.replace('q_proj', 'k_proj')}.lora_A.weight": torch.ones(2, 4)}
    with pytest.raises(ValueError, match="no weights called"):
        list(check_adapter(unknown.items(), shapes))
