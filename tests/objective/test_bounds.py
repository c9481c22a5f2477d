"""Statistics stay finite for every reward and log-prob that an entrance lets in."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.experience.index import Columns
from offbeat.experience.priors import PromptPriors
from offbeat.experience.schema import reward_figures
from offbeat.objective.bound import shortfall
from offbeat.objective.credit import assign_credit
from offbeat.objective.gates import gate_batch
from offbeat.objective.losses import Streams, counts, log_ratios, policy_loss
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import Advantage, ExpWeight, GroupESS, Level, Objective, SecondMoment
from offbeat.types import LARGEST_REWARD, LOWEST_LOGPROB, Score, invalid_logprobs, is_reward

REWARDS = st.one_of(
    st.sampled_from([LARGEST_REWARD, -LARGEST_REWARD, 0.0, 5e-324, -5e-324, 1.0]),
    st.floats(-LARGEST_REWARD, LARGEST_REWARD),
)
LOGPROBS = st.one_of(st.sampled_from([LOWEST_LOGPROB, 0.0, -1e-30]), st.floats(LOWEST_LOGPROB, 0.0))
COMPARED = [one for one in Advantage if one is not Advantage.SHRUNK]


@given(rewards=st.lists(REWARDS, min_size=2, max_size=9), dtype=st.sampled_from([torch.float32, torch.float64]))
@settings(max_examples=150, deadline=None)
def test_credit_is_finite_at_the_bound(rewards: list[float], dtype: torch.dtype) -> None:
    rewards_BG = torch.tensor([rewards], dtype=dtype)
    scored_BG, lengths_BG = torch.ones_like(rewards_BG, dtype=torch.bool), torch.full(rewards_BG.shape, 131_072)
    for advantage in COMPARED:
        for weight in (None, ExpWeight()):
            objective = Objective(advantage=advantage, exp_weight=weight)
            credit = assign_credit(objective, rewards_BG, scored_BG, lengths_BG)
            assert credit.advantages_BG.float().isfinite().all() and credit.weights_BG.float().isfinite().all()


@given(rewards=st.lists(REWARDS, min_size=1, max_size=64))
def test_means_and_deviations_are_finite_at_the_bound(rewards: list[float]) -> None:
    scored, mean, std = reward_figures(map(Score, rewards))
    assert scored == len(rewards) and mean is not None and std is not None
    assert np.isfinite(np.float32([mean, std])).all()
    assert (
        abs(mean) + std * math.sqrt(scored) >= max(map(abs, rewards)) * (1 - 1e-9) - 1e-100
    )  # how a reader finds suspects
    rows = Columns([0], [0], [0], [1], [True], [scored], [scored], [mean], [std], [9])
    [prior] = PromptPriors(halflife=10).draw(0, rows, np.array([0]), np.array([True]))
    assert np.isfinite(prior).all()


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, -1e200, 2e9])
def test_a_reward_out_of_bounds_counts_as_no_score(reward: float) -> None:
    rewards_BG, scored_BG = torch.tensor([[1.0, 0.0, reward]]).double(), torch.ones(1, 3, dtype=torch.bool)
    credit = assign_credit(Objective(), rewards_BG, scored_BG, torch.ones(1, 3))
    assert credit.trained_BG.tolist() == [[True, True, False]]
    assert credit.advantages_BG[0].tolist() == [0.5, -0.5, 0.0]


@given(st.lists(st.tuples(LOGPROBS, LOGPROBS), min_size=2, max_size=40), REWARDS)
@settings(max_examples=60, deadline=None)
def test_ratios_losses_and_gradients_are_finite_at_the_bound(pairs: list[tuple[float, float]], reward: float) -> None:
    policy_NT = torch.tensor([[new for new, _ in pairs]] * 2, requires_grad=True)
    behavior_NT = torch.tensor([[old for _, old in pairs]] * 2)
    mask_NT, advantages_N = torch.ones_like(behavior_NT, dtype=torch.bool), torch.tensor([reward, -reward])
    for level in Level:
        ratios_NT = log_ratios(policy_NT, behavior_NT, mask_NT, level)
        assert ratios_NT.isfinite().all() and shortfall(ratios_NT).isfinite().all()
    for preset in PRESETS.values():
        policy_NT.grad = None
        streams = Streams(policy_NT, behavior_NT, policy_NT.detach(), behavior_NT, advantages_N, torch.ones(2), mask_NT)
        ratios_NT = (policy_NT - behavior_NT).detach()
        one, gate_NT = preset.objective, None
        if isinstance(one.gate, SecondMoment) or isinstance(one.reject, GroupESS):
            gate_NT = gate_batch(one, ratios_NT, advantages_N, mask_NT, group_size=2)
        found = policy_loss(preset.objective, streams, counts(mask_NT), gate_NT=gate_NT, length_limit=64)
        found.total.backward()
        assert found.total.isfinite() and policy_NT.grad is not None and policy_NT.grad.isfinite().all(), preset.name


@pytest.mark.parametrize(
    ("value", "valid"),
    [
        (1, True), (True, True), (np.float32(-1e9), True), (np.int64(4), True), (5e-324, True),
        (math.nan, False), (math.inf, False), (-math.inf, False), (1.0000001e9, False), (1 << 20_000, False),
        (np.float16("inf"), False), (np.float64("nan"), False), ("1", False), (b"1", False), (None, False), (1j, False),
    ],
    ids=lambda one: type(one).__name__,
)  # fmt: skip
def test_the_rule_for_rewards(value: object, valid: bool) -> None:
    assert is_reward(value) is valid


def test_the_rule_for_log_probs() -> None:
    found = np.array([-9999.0, 0.0, 1e-5, -1e4, 1e-3, -10001.0, -math.inf, math.inf, math.nan, 1e30], np.float32)
    assert invalid_logprobs(found).tolist() == [False] * 4 + [True] * 6
