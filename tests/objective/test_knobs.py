"""No setting of an objective is inert: it changes the gradient, or the configuration refuses it."""

from collections import Counter

import pytest
import torch
from batches import Batch
from naive import Case, naive_loss

from offbeat.config.axes import KINDS
from offbeat.config.objective import ObjectiveConfig
from offbeat.objective.presets import PRESETS
from tests.fixtures.lagged_batches import CHANGES, Change, LaggedBatch, outcome, pairs

ONLY_SHRUNK = {"prior_halflife"}  # acts through prior_B2, which is an argument of the loss


def test_every_setting_changes_the_gradient_or_is_refused_for_every_preset() -> None:
    found = [*pairs(batches=3)]
    assert [(preset, change, updates) for preset, change, updates, what in found if what == "inert"] == []
    accepted = Counter(change.knob for _, change, _, what in found if what != "refused")
    assert accepted.keys() == {change.knob for change in CHANGES} - ONLY_SHRUNK, "each is accepted somewhere"


def test_the_sweep_knows_every_setting() -> None:
    axes = {"ratio", "against", "drop_surplus", *KINDS}  # choices and not constants: tests/config/test_axes.py
    assert {change.knob for change in CHANGES} | {"preset"} | axes == set(ObjectiveConfig.model_fields)


@pytest.mark.parametrize("knob", ["clip", "weight_cap"])
def test_a_setting_that_does_nothing_would_be_noticed(knob: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change = next(change for change in CHANGES if change.knob == knob)
    assert outcome("tis", change, updates=1, batches=2) == "refused"
    monkeypatch.setattr(ObjectiveConfig, "problems_with_one_update", lambda self: [])
    assert outcome("tis", change, updates=1, batches=2) == "inert"
    assert outcome("tis", change, updates=2, batches=2) == "changes the gradient"


def test_the_same_setting_alone_may_be_refused_and_accepted_beside_another() -> None:
    assert outcome("grpo", Change("kl_estimator", "k2"), updates=2, batches=1) == "refused"
    beside = Change("kl_estimator", "k2", (("kl_coefficient", 0.1),))
    assert outcome("grpo", beside, updates=2, batches=1) == "changes the gradient"


def test_with_one_update_the_batch_of_the_sweep_has_the_proximal_policy() -> None:
    one, two = (LaggedBatch.draw(0, updates) for updates in (1, 2))
    assert one.policy_NT.equal(one.proximal_NT) and not two.policy_NT.equal(two.proximal_NT)
    assert one.truncated_BG.any() and not one.policy_NT.equal(one.behavior_NT)


def gradient_error(preset: str, seed: int) -> float:
    """Return the relative difference of our gradient and autograd on the published formula, on a random batch."""
    objective = PRESETS[preset].objective
    case = Case.random(seed, 1 + seed % 4, 2 + seed % 5)
    reference = naive_loss(preset, case)
    if reference.requires_grad:
        reference.backward()
    batch = Batch.of(objective, case)
    batch.loss(objective).backward()
    expected = torch.zeros_like(batch.policy)
    for row, values in zip(expected, (one for group in case.policy for one in group), strict=True):
        if values.grad is not None:
            row[: len(values)] = values.grad
    difference, norm = float((batch.policy.grad - expected).norm()), float(expected.norm())
    return difference / norm if norm > 1e-12 else difference


def test_gradients_of_all_presets_are_those_of_autograd_on_the_published_formulas() -> None:
    worst = {preset: max(gradient_error(preset, seed) for seed in range(5)) for preset in PRESETS}
    assert {preset: error for preset, error in worst.items() if error >= 1e-9} == {}


@pytest.mark.parametrize("preset", ["m2po", "ess-gate"])
def test_random_batches_exercise_the_gates_over_the_whole_batch(preset: str) -> None:
    objective = PRESETS[preset].objective
    shares = []
    for seed in range(20):
        batch = Batch.of(objective, Case.random(seed, 3, 6))
        gate = batch.gate(objective)
        assert gate is not None
        shares.append(float(gate[batch.trained].double().mean()))
    assert min(shares) < 1 and 0.2 < sum(shares) / len(shares) < 0.98
