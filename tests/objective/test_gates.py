"""Gates: those over the whole batch, and the band around the proximal policy."""

import math
from dataclasses import replace

import pytest
import torch
from batches import Batch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import Case

from offbeat.objective.gates import TIE, gate_batch, group_ess, second_moment_limit
from offbeat.objective.losses import Streams, counts, policy_loss
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import Against, CentredBand, GroupESS, Level, Objective, OneSide, SecondMoment
from offbeat.types import UNKNOWN

UP, DOWN = torch.tensor([1.0, 1.0]), torch.tensor([-1.0, -1.0])
MASK = torch.ones(2, 2, dtype=torch.bool)


@pytest.mark.parametrize("level", list(Level))
@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), spread=st.sampled_from([0.01, 0.4, 2.0]), width=st.sampled_from([0.0, 0.2]))
def test_at_the_proximal_policy_a_centered_band_stops_nothing_at_any_level(
    level: Level, seed: int, spread: float, width: float
) -> None:
    objective = replace(PRESETS["grpo-off-policy"].objective, ratio=level, gate=CentredBand(width))
    batch = Batch.of(objective, Case.random(seed, groups=3, size=4, spread=spread))
    batch.proximal = batch.policy.detach().clone()
    assert torch.equal(batch.full_loss(objective).passed_NT, batch.trained)


@pytest.mark.parametrize("level", list(Level))
def test_away_from_the_proximal_policy_the_band_binds_at_every_level(level: Level) -> None:
    objective = replace(PRESETS["grpo-off-policy"].objective, ratio=level)
    batch = Batch.of(objective, Case.random(5, groups=4, size=8))
    batch.proximal = batch.policy.detach().clone()
    batch.policy = (batch.policy.detach() + 0.5).requires_grad_()
    passed = batch.full_loss(objective).passed_NT
    assert 0 < passed.sum() < batch.trained.sum()


def test_a_centered_band_of_sequence_ratios_by_hand() -> None:
    """log π_k/α of the completion is 0.3 + 0.2, so π/α passes up to e^0.5 + 0.2; its tokens alone would be stopped."""
    objective = Objective(ratio=Level.SEQUENCE, gate=CentredBand(0.2))
    behavior, proximal = torch.tensor([[-1.0, -1.0]]), torch.tensor([[-0.7, -0.8]])
    for beyond, passes in ((0.19, True), (0.21, False)):
        policy = proximal + (math.log(math.exp(0.5) + beyond) - 0.5) / 2
        mask = torch.ones(1, 2, dtype=torch.bool)
        streams = Streams(policy, behavior, proximal, UNKNOWN, torch.ones(1), torch.ones(1), mask)
        assert policy_loss(objective, streams, counts(mask)).passed_NT.tolist() == [[passes, passes]]


def test_a_centered_band_against_the_proximal_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"use Against\.BEHAVIOR"):
        Objective(gate=CentredBand(), against=Against.PROXIMAL)


def test_the_second_moment_leaves_out_the_furthest_tokens_until_the_mean_square_is_small_enough() -> None:
    # Squares 0.01, 0.04, 0.09, 0.36: means of the smallest are 0.01, 0.025, 0.0467, 0.125.
    distances = torch.tensor([0.3, 0.1, 0.6, 0.2])
    assert second_moment_limit(distances, 0.125 + 1e-6) == math.inf
    assert second_moment_limit(distances, 0.05) == pytest.approx(0.6, abs=2 * TIE)
    assert second_moment_limit(distances, 0.04) == pytest.approx(0.3, abs=2 * TIE)
    assert second_moment_limit(distances, 0.001) == pytest.approx(0.1, abs=2 * TIE)
    assert second_moment_limit(torch.tensor([]), 0.04) == math.inf


def test_the_second_moment_stops_only_tokens_that_the_update_pushes_further_out() -> None:
    objective, ratios = Objective(gate=SecondMoment(0.04)), torch.tensor([[0.9, -0.9], [0.1, -0.1]])
    assert gate_batch(objective, ratios, UP, MASK, group_size=2).tolist() == [[False, True], [True, True]]
    assert gate_batch(objective, ratios, DOWN, MASK, group_size=2).tolist() == [[True, False], [True, True]]
    assert gate_batch(objective, ratios, 0 * UP, MASK, group_size=2).all(), "advantage 0 pushes nothing"
    untrained = torch.tensor([[False, False], [True, True]])
    assert gate_batch(objective, ratios, UP, untrained, group_size=2)[1].all(), "masked tokens are not compared"


def test_equal_answers_are_stopped_together_even_if_rounding_sets_them_apart() -> None:
    objective, noise = Objective(gate=SecondMoment(0.04)), 1e-6 * torch.arange(4.0)
    ratios = torch.tensor([[0.1], [0.1], [0.1], [0.1], [0.3], [0.3], [0.3], [0.3]])
    # One of four tokens at 0.3 would fit under the limit: (4·0.01 + 0.09)/5 < 0.04 < (4·0.01 + 2·0.09)/6 ... /8.
    ratios[4:, 0] += noise
    gates = [
        gate_batch(objective, ratios[order], torch.ones(8), torch.ones(8, 1, dtype=torch.bool), group_size=8)
        for order in (torch.arange(8), torch.arange(8).flip(0))
    ]
    assert [int(gate.sum()) for gate in gates] == [4, 4]


def test_a_group_whose_completions_count_unequally_is_stopped_whole() -> None:
    # ρ = (1, 1) and (3, 1): ESS 1 and 16/(2·10) = 0.8.
    ratios = torch.tensor([[0.0, 0.0], [0.0, 0.0], [math.log(3) / 2] * 2, [0.0, 0.0]])
    mask = torch.ones(4, 2, dtype=torch.bool)
    assert group_ess(ratios, mask, 2).tolist() == pytest.approx([1.0, 0.8])
    for least, passes in ((0.79, True), (0.81, False)):
        gate = gate_batch(Objective(reject=GroupESS(least)), ratios, torch.ones(4), mask, group_size=2)
        assert gate[:2].all() and bool(gate[2:].all()) == bool(gate[2:].any()) == passes


def test_a_completion_that_is_not_trained_on_does_not_count_for_the_effective_sample_size() -> None:
    ratios, mask = torch.tensor([[0.0], [9.0], [0.0]]), torch.tensor([[True], [False], [True]])
    assert float(group_ess(ratios, mask, 3)) == 1.0


def test_a_gate_over_the_whole_batch_must_be_given_and_only_then() -> None:
    logprobs, mask = torch.zeros(2, 2), MASK
    streams = Streams(logprobs, logprobs, UNKNOWN, UNKNOWN, UP, UP, mask)
    with pytest.raises(ValueError, match=r"pass gate_NT, which offbeat\.objective\.gates\.gate_batch"):
        policy_loss(PRESETS["m2po"].objective, streams, counts(mask))
    with pytest.raises(ValueError, match="leave gate_NT out"):
        policy_loss(Objective(gate=OneSide()), streams, counts(mask), gate_NT=mask)
    with pytest.raises(ValueError, match="gate_NT must be bool"):
        policy_loss(PRESETS["m2po"].objective, streams, counts(mask), gate_NT=mask[:1])
    with pytest.raises(ValueError, match=r"must both be \[B · 3, T\]"):
        gate_batch(PRESETS["m2po"].objective, logprobs, UP, mask, group_size=3)
