"""Shrunk advantages and truncated completions, by hand and against loops."""

import math
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import naive_shrunk

from offbeat.objective.credit import EPSILON, advantages, assign_credit
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import Advantage, CutOff, Objective

SHRUNK = Objective(Advantage.SHRUNK)


def shrunk(rewards: list[list[float]], prior: list[list[float]], epsilon: float = EPSILON) -> torch.Tensor:
    rewards_BG = torch.tensor(rewards, dtype=torch.float64)
    prior_B2 = torch.tensor(prior, dtype=torch.float64)
    everyone = torch.ones_like(rewards_BG, dtype=torch.bool)
    return advantages(Advantage.SHRUNK, rewards_BG, everyone, prior_B2=prior_B2, epsilon=epsilon)


def test_shrunk_advantages_by_hand() -> None:
    found = shrunk([[1.0, 0.0, 0.0, 0.0]], [[1.0, 3.0]], epsilon=0.0)[0]
    # The right one sees Beta(1, 3 + 3): mean 1/7, E[p(1-p)] = 6/56. The others see Beta(1 + 1, 3 + 2): 2/7 and 10/56.
    assert float(found[0]) == pytest.approx((6 / 7) / math.sqrt(6 / 56))
    assert float(found[1]) == pytest.approx((-2 / 7) / math.sqrt(10 / 56))


def test_groups_of_equal_rewards_have_shrunk_advantages_from_the_prompts_history() -> None:
    right, wrong = shrunk([[1.0] * 4, [0.0] * 4], [[2.0, 8.0], [2.0, 8.0]])
    assert (right > 0).all() and (wrong < 0).all()
    assert right[0] > -2 * wrong[0], "on a hard prompt a success says more than a failure"
    credit = assign_credit(SHRUNK, torch.ones(1, 4), torch.ones(1, 4, dtype=torch.bool), torch.ones(1, 4),
                           prior_B2=torch.ones(1, 2))  # fmt: skip
    assert credit.trained_BG.all() and (credit.advantages_BG > 0).all()
    assert credit.zero_variance_B.tolist() == [True], "the statistic is still that of the rewards"


unit = st.one_of(st.sampled_from([0.0, 1.0, 0.5]), st.floats(0, 1, allow_subnormal=False))


@settings(max_examples=300, deadline=None)
@given(
    rewards=st.lists(unit, min_size=2, max_size=8),
    scored=st.lists(st.booleans(), min_size=8, max_size=8),
    prior=st.tuples(st.floats(0.1, 50), st.floats(0.1, 50)),
    epsilon=st.sampled_from([EPSILON, 1e-2]),
)
def test_shrunk_advantages_equal_the_loops(
    rewards: list[float], scored: list[bool], prior: tuple[float, float], epsilon: float
) -> None:
    scored = scored[: len(rewards)]
    rewards_BG = torch.tensor([rewards], dtype=torch.float64)
    found = advantages(
        Advantage.SHRUNK,
        rewards_BG,
        torch.tensor([scored]),
        prior_B2=torch.tensor([prior], dtype=torch.float64),
        epsilon=epsilon,
    )[0]
    expected = torch.tensor(naive_shrunk(rewards, scored, prior, epsilon), dtype=torch.float64)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_the_expected_gradient_of_shrunk_advantages_has_exactly_the_direction_of_the_true_one() -> None:
    """Over all groups that a policy over four answers can sample. A scale from the whole group would turn it."""
    logits = torch.tensor([0.3, -0.4, 0.9, 0.0], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([0.0, 0.35, 0.6, 1.0], dtype=torch.float64)
    logprobs = logits.log_softmax(0)
    true = torch.autograd.grad((logprobs.exp() * rewards).sum(), logits, retain_graph=True)[0]
    groups = torch.tensor([*product(range(4), repeat=3)])
    chances = logprobs[groups].sum(-1).exp().detach()
    everyone, prior = torch.ones(groups.shape, dtype=torch.bool), torch.tensor([[1.5, 4.0]]).repeat(len(groups), 1)

    def direction(kind: Advantage) -> torch.Tensor:
        credit = advantages(kind, rewards[groups], everyone, prior_B2=prior)
        gradient = torch.autograd.grad((chances[:, None] * credit * logprobs[groups]).sum(), logits, retain_graph=True)
        return gradient[0] / gradient[0].norm()

    aim = true / true.norm()
    assert torch.allclose(direction(Advantage.SHRUNK), aim, rtol=0, atol=1e-14)
    assert not torch.allclose(direction(Advantage.STD_SAMPLE), aim, rtol=0, atol=1e-4)


def test_shrunk_advantages_refuse_rewards_outside_the_unit_interval_and_broken_priors() -> None:
    with pytest.raises(ValueError, match=r"rewards in \[0, 1\], not -1 to 1"):
        shrunk([[1.0, -1.0]], [[1.0, 1.0]])
    for prior in ([[1.0, -1.0]], [[1.0, 1.0]] * 2, [[math.nan, 1.0]]):
        with pytest.raises(ValueError, match="prior_B2 must be"):
            shrunk([[1.0, 0.0]], prior)
    rewards, scored = torch.tensor([[1.0, 0.0, 7.0]]), torch.tensor([[True, True, False]])
    found = advantages(Advantage.SHRUNK, rewards, scored, prior_B2=torch.ones(1, 2))
    assert found[0, 2] == 0, "a completion without a score may hold any number"
    with pytest.raises(ValueError, match="need prior_B2"):
        assign_credit(SHRUNK, rewards, scored, torch.ones(1, 3))


REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 0.0, 1.0, 1.0]], dtype=torch.float64)
CUT = torch.tensor([[False, False, True, False], [False, True, True, True]])
ALL = torch.ones(2, 4, dtype=torch.bool)


def test_a_masked_truncated_completion_enters_neither_baseline_nor_loss_nor_counts() -> None:
    score, mask = Objective(), Objective(truncated=CutOff.MASK)
    counted, masked = (assign_credit(o, REWARDS, ALL, torch.ones(2, 4), truncated_BG=CUT) for o in (score, mask))
    assert counted.advantages_BG[0].tolist() == [0.5, -0.5, -0.5, 0.5] and counted.trained_BG.all()
    assert masked.advantages_BG[0].tolist() == pytest.approx([1 / 3, -2 / 3, 0.0, 1 / 3])
    assert masked.trained_BG.tolist() == [[True, True, False, True], [False] * 4]
    assert masked.too_small_B.tolist() == [False, True], "one completion is left of the second group"


def test_a_group_whose_contrast_came_from_truncated_completions_has_none_without_them() -> None:
    cut = torch.tensor([[False, True, True, False], [False, True, False, False]])
    credit = assign_credit(Objective(truncated=CutOff.MASK), REWARDS, ALL, torch.ones(2, 4), truncated_BG=cut)
    assert credit.zero_variance_B.tolist() == [True, True] and (credit.advantages_BG == 0).all()


def test_an_objective_that_masks_truncated_completions_must_be_told_which_they_are() -> None:
    with pytest.raises(ValueError, match="needs truncated_BG"):
        assign_credit(Objective(truncated=CutOff.MASK), REWARDS, ALL, torch.ones(2, 4))


def test_epsilon_and_the_range_of_temperatures_reach_the_credit() -> None:
    wide = assign_credit(Objective(Advantage.WHITENED, epsilon=0.75), REWARDS, ALL, torch.ones(2, 4))
    assert wide.advantages_BG[0].tolist() == pytest.approx([0.5, -0.5, -0.5, 0.5])  # √(0.25 + 0.75) = 1
    adaptive = PRESETS["red-weight-adaptive"].objective.exp_weight
    assert adaptive is not None and (adaptive.lowest, adaptive.highest) == (0.8, 100.0)


def test_imitation_is_supervised_training_on_right_answers_also_on_a_single_one() -> None:
    rewards = torch.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    scored = torch.tensor([[True, True, True], [True, True, True], [True, False, False]])
    credit = assign_credit(Objective(Advantage.REWARD), rewards, scored, torch.ones(3, 3))
    assert torch.equal(credit.advantages_BG, rewards) and torch.equal(credit.trained_BG, scored)
    assert not credit.too_small_B.any()
