"""Each preset has the gradient of its published formula, computed in plain float64."""

import pytest
import torch
from batches import Batch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import Case, naive_loss

from offbeat.objective.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), groups=st.integers(1, 3), size=st.integers(2, 6))
def test_gradient_equals_autograd_on_the_published_formula(name: str, seed: int, groups: int, size: int) -> None:
    objective, case = PRESETS[name].objective, Case.random(seed, groups, size)
    reference = naive_loss(name, case)
    if reference.requires_grad:
        reference.backward()
    batch = Batch.of(objective, case)
    batch.loss(objective).backward()
    rows = [c for group in case.policy for c in group]
    expected = torch.zeros_like(batch.policy)
    for row, values in zip(expected, rows, strict=True):
        if values.grad is not None:
            row[: len(values)] = values.grad
    assert batch.policy.grad is not None
    difference = (batch.policy.grad - expected).norm()
    assert difference <= 1e-6 * expected.norm() + 1e-15


def test_every_preset_has_a_source_and_advice() -> None:
    for preset in PRESETS.values():
        assert preset.source and preset.use and preset.equation and preset.lag_evidence
        assert preset.reported_lag >= 0
