"""Every claim on which the two papers rest, checked with numbers."""

import math

import pytest
import torch
from batches import Batch
from naive import Case
from torch import Tensor

from offbeat.objective.bound import (
    PAPER_FACTOR,
    TIGHT_FACTOR,
    improvement_bound,
    normalized_gain,
    predicted_gain,
    sigma,
)
from offbeat.objective.credit import advantages, balancing_temperature, drop_surplus, exp_weights, zero_variance
from offbeat.objective.losses import Streams, counts, passes, policy_loss
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import Advantage, CentredBand, Objective, OneSide, Ring, TwoSide
from offbeat.types import UNKNOWN

ONE_RIGHT_OF_EIGHT = torch.tensor([[1.0] + [0.0] * 7], dtype=torch.float64)
ALL = torch.ones_like(ONE_RIGHT_OF_EIGHT, dtype=torch.bool)


def logits_and_rewards(seed: int = 0, arms: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(arms, generator=generator, dtype=torch.float64).requires_grad_()
    return logits, torch.rand(arms, generator=generator, dtype=torch.float64)


def consistency_loss(logits: Tensor, rewards: Tensor, anchor: Tensor, tau: float, weights: Tensor) -> Tensor:
    """Σ_{i<j} w_i w_j (a_i - a_j)², a_i = r_i - τ(log π_i - log π_k,i): P1's disagreement."""
    a = rewards - tau * (torch.log_softmax(logits, 0) - anchor)
    pairs = weights[:, None] * weights[None, :] * (a[:, None] - a[None, :]).square()
    return pairs.triu(1).sum()


def reinforce_gradient(logits: Tensor, coefficients: Tensor) -> Tensor:
    """Σ c_i ∇log π_i."""
    return torch.autograd.grad((coefficients * torch.log_softmax(logits, 0)).sum(), logits)[0]


def test_pairwise_consistency_has_the_gradient_of_group_relative_reinforce() -> None:
    logits, rewards = logits_and_rewards()
    tau, size = 0.7, len(rewards)
    anchor = torch.log_softmax(logits, 0).detach()
    loss = consistency_loss(logits, rewards, anchor, tau, torch.full_like(rewards, 1 / size))
    descent = -torch.autograd.grad(loss, logits)[0]
    expected = 2 * tau * reinforce_gradient(logits, (rewards - rewards.mean()) / size)
    assert torch.allclose(descent, expected, rtol=1e-10, atol=1e-14)


def test_weighted_pairs_give_the_weighted_mean_as_baseline() -> None:
    logits, rewards = logits_and_rewards(1)
    weights = torch.tensor([0.5, 2.0, 1.0, 0.1, 3.0, 0.7], dtype=torch.float64)
    anchor = torch.log_softmax(logits, 0).detach()
    descent = -torch.autograd.grad(consistency_loss(logits, rewards, anchor, 0.3, weights), logits)[0]
    weighted_mean = (weights * rewards).sum() / weights.sum()
    direction = reinforce_gradient(logits, weights * (rewards - weighted_mean))
    assert torch.allclose(descent, 2 * 0.3 * weights.sum() * direction, rtol=1e-10, atol=1e-14)


def test_unregularized_reinforce_on_a_fixed_sampler_ends_on_the_second_best_arm() -> None:
    sampler = torch.tensor([0.3, 0.6, 0.1], dtype=torch.float64)
    rewards = torch.tensor([0.0, 0.8, 1.0], dtype=torch.float64)
    # 10 answers in the sampler's proportions: one group whose gradient is the expected gradient.
    arms = torch.repeat_interleave(torch.arange(3), (10 * sampler).round().long())
    credit = advantages(Advantage.CENTRED, rewards[arms][None], torch.ones(1, 10, dtype=torch.bool))[0]
    mask = torch.ones(10, 1, dtype=torch.bool)
    logits = sampler.log().requires_grad_()
    for _ in range(2000):
        policy = torch.log_softmax(logits, 0)[arms, None]
        streams = Streams(policy, UNKNOWN, UNKNOWN, UNKNOWN, credit, torch.ones(10), mask)
        loss = policy_loss(PRESETS["reinforce"].objective, streams, counts(mask)).total
        (gradient,) = torch.autograd.grad(loss, logits)
        logits = (logits - gradient).detach().requires_grad_()
    assert torch.softmax(logits, 0)[1] > 0.99


def test_one_side_gate_with_importance_weight_has_the_gradient_of_ppos_clip() -> None:
    objective = Objective(gate=OneSide(0.2, 0.3), weight=PRESETS["grpo"].objective.weight)
    case = Case.random(seed=3, groups=4, size=8)
    batch = Batch.of(objective, case)
    batch.loss(objective).backward()
    policy = batch.policy.detach().clone().requires_grad_()
    ratio, a = (policy - batch.behavior).exp(), batch.credit.advantages_BG.reshape(-1, 1)
    clipped = torch.minimum(ratio * a, ratio.clamp(0.8, 1.3) * a)
    (-torch.where(batch.mask, clipped, 0.0).sum() / batch.mask.sum()).backward()
    assert batch.policy.grad is not None and policy.grad is not None
    stopped = (batch.policy.grad == 0) & batch.mask
    assert 0.1 < stopped.sum() / batch.mask.sum() < 0.9, "the clip must bind on some tokens and not on all"
    assert torch.allclose(batch.policy.grad, policy.grad, rtol=1e-12, atol=1e-16)


def test_red_weight_is_weighted_reinforce_plus_imitation_of_good_answers() -> None:
    logits, rewards = logits_and_rewards(2)
    centred = rewards - rewards.mean()
    weights = exp_weights(centred, temperature=1.0, cap=10.0)
    weighted_mean = (weights * rewards).sum() / weights.sum()
    left = reinforce_gradient(logits, weights * centred)
    right = reinforce_gradient(logits, weights * (rewards - weighted_mean))
    right = right + (weighted_mean - rewards.mean()) * reinforce_gradient(logits, weights)
    assert weighted_mean > rewards.mean()
    assert torch.allclose(left, right, rtol=1e-10, atol=1e-14)


CASES = 20_000


def random_discrete_cases() -> dict[str, Tensor]:
    """Generate distributions over 2 to 6 answers, from nearly uniform to nearly certain, and rewards in [0, 1]."""
    generator = torch.Generator().manual_seed(0)
    answers = 6
    present = torch.arange(answers) < torch.randint(2, answers + 1, (CASES, 1), generator=generator)

    def policy() -> Tensor:
        sharpness = 4 * torch.rand(CASES, 1, generator=generator, dtype=torch.float64)
        logits = sharpness * torch.randn(CASES, answers, generator=generator, dtype=torch.float64)
        return torch.softmax(logits.masked_fill(~present, -torch.inf), -1)

    rewards = torch.rand(CASES, answers, generator=generator, dtype=torch.float64)
    binary = torch.rand(CASES, 1, generator=generator) < 0.5
    rewards = torch.where(binary, rewards.round(), rewards)
    return {"alpha": policy(), "pi": policy(), "pi_k": policy(), "rewards": rewards}


def surrogate(case: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """L_α(π) and σ, by exact expectation under α."""
    mean = (case["alpha"] * case["rewards"]).sum(-1, keepdim=True)
    scale = sigma((case["alpha"] * (case["rewards"] - mean).square()).sum(-1))
    return (case["pi"] * (case["rewards"] - mean)).sum(-1) / scale, scale


def value(case: dict[str, Tensor], policy: str) -> Tensor:
    return (case[policy] * case["rewards"]).sum(-1)


def tv(case: dict[str, Tensor], policy: str) -> Tensor:
    return (case[policy] - case["alpha"]).abs().sum(-1) / 2


def test_surrogate_times_sigma_is_exactly_the_gain_over_the_behavior_policy() -> None:
    case = random_discrete_cases()
    surrogate_value, scale = surrogate(case)
    assert torch.allclose(scale * surrogate_value, value(case, "pi") - value(case, "alpha"), rtol=0, atol=1e-14)


@pytest.mark.parametrize("factor", [PAPER_FACTOR, TIGHT_FACTOR])
def test_the_improvement_bound_holds_in_twenty_thousand_random_cases(factor: float) -> None:
    case = random_discrete_cases()
    surrogate_value, scale = surrogate(case)
    bound = improvement_bound(surrogate_value, scale, tv(case, "pi"), tv(case, "pi_k"), factor)
    gain = value(case, "pi") - value(case, "pi_k")
    assert len(gain) == CASES
    assert (gain >= bound - 1e-12).all()


def test_the_tight_bound_could_not_be_much_tighter() -> None:
    """If the bound also held with half its penalty, the test above could not fail."""
    case = random_discrete_cases()
    surrogate_value, scale = surrogate(case)
    bound = improvement_bound(surrogate_value, scale, tv(case, "pi"), tv(case, "pi_k"), TIGHT_FACTOR / 2)
    assert (value(case, "pi") - value(case, "pi_k") < bound).any()


@pytest.mark.parametrize(("p", "constant"), [(0.5, 1.0), (0.1, 2.33), (0.01, 9.0), (0.0, 99.0), (1.0, 99.0)])
def test_penalty_of_a_bernoulli_prompt(p: float, constant: float) -> None:
    scale = sigma(torch.tensor(p * (1 - p), dtype=torch.float64))
    assert float((1 - scale) / scale) == pytest.approx(constant, rel=0.01)


def test_population_and_sample_deviation_differ_as_published() -> None:
    population = advantages(Advantage.STD_POPULATION, ONE_RIGHT_OF_EIGHT, ALL, epsilon=0.0)
    sample = advantages(Advantage.STD_SAMPLE, ONE_RIGHT_OF_EIGHT, ALL, epsilon=0.0)
    assert float(population[0, 0]) == pytest.approx(2.646, abs=5e-4)
    assert float(sample[0, 0]) == pytest.approx(2.475, abs=5e-4)


def test_advantages_by_hand() -> None:
    rewards, scored = torch.tensor([[1.0, 0.0, 0.0, 0.0]], dtype=torch.float64), torch.ones(1, 4, dtype=torch.bool)
    assert advantages(Advantage.CENTRED, rewards, scored)[0].tolist() == [0.75, -0.25, -0.25, -0.25]
    assert advantages(Advantage.LEAVE_ONE_OUT, rewards, scored)[0].tolist() == pytest.approx(
        [1, -1 / 3, -1 / 3, -1 / 3]
    )
    whitened = advantages(Advantage.WHITENED, rewards, scored)
    assert float(whitened[0, 0]) == pytest.approx(0.75 / math.sqrt(0.1875 + 1e-4))


def test_zero_variance_has_a_tolerance() -> None:
    rewards = torch.tensor([[0.1 + 0.2, 0.3], [0.3, 0.31]], dtype=torch.float64)
    assert rewards[0, 0] != rewards[0, 1]
    assert zero_variance(rewards, torch.ones(2, 2, dtype=torch.bool)).tolist() == [True, False]


@pytest.mark.parametrize("kind", [k for k in Advantage if k not in (Advantage.SHRUNK, Advantage.REWARD)])
@pytest.mark.parametrize("reward", [0.99, 0.7, 1e-3, 1234.567])
def test_equal_rewards_give_no_advantage_even_if_their_mean_rounds(kind: Advantage, reward: float) -> None:
    for size in range(2, 65):
        rewards = torch.full((1, size), reward)
        assert (advantages(kind, rewards, torch.ones_like(rewards, dtype=torch.bool)) == 0).all()


def test_a_centered_band_has_no_effect_on_the_first_update_and_binds_on_the_second() -> None:
    objective = PRESETS["grpo-off-policy"].objective
    batch = Batch.of(objective, Case.random(seed=5, groups=4, size=8, spread=1.0))
    batch.proximal = batch.policy.detach().clone()
    first = policy_loss(objective, batch.streams(objective), batch.counts())
    assert torch.equal(first.passed_NT, batch.trained), "π = π_k: nothing is clipped, however far π_k is from α"
    batch.policy = (batch.policy.detach() + 0.5).requires_grad_()
    second = policy_loss(objective, batch.streams(objective), batch.counts())
    assert (second.passed_NT & batch.trained).sum() < batch.trained.sum()
    one_side = PRESETS["grpo-masked"].objective
    lagged = policy_loss(one_side, batch.streams(one_side), batch.counts())
    assert lagged.passed_NT.sum() < batch.trained.sum(), "a clip centred on 1 does bind under lag"


RATIOS = torch.tensor([[0.3, 0.4, 0.5, 0.8, 1.0, 1.2, 1.5, 3.0, 3.5]], dtype=torch.float64)
UP, DOWN = torch.tensor([[1.0]]), torch.tensor([[-1.0]])


def passing(gate: OneSide | TwoSide | Ring, advantage: Tensor) -> list[float]:
    return RATIOS[passes(gate, RATIOS, advantage)].tolist()


def test_gates_pass_the_tokens_in_their_tables_including_the_edges() -> None:
    assert passing(OneSide(), UP) == [0.3, 0.4, 0.5, 0.8, 1.0, 1.2]
    assert passing(OneSide(), DOWN) == [0.8, 1.0, 1.2, 1.5, 3.0, 3.5]
    assert passing(TwoSide(), UP) == passing(TwoSide(), DOWN) == [0.8, 1.0, 1.2]
    assert passing(Ring(), UP) == [0.3, 0.4, 0.8, 1.0, 1.2], "dead between 0.4 and 0.8, and above 1.2"
    assert passing(Ring(), DOWN) == [0.8, 1.0, 1.2, 3.0, 3.5], "dead below 0.8, and between 1.2 and 3.0"


def test_an_advantage_of_zero_passes_the_gate() -> None:
    zero = torch.tensor([[0.0]])
    assert passes(OneSide(), RATIOS, zero).all()
    assert passes(CentredBand(0.2), RATIOS, zero, torch.ones_like(RATIOS)).all()


def test_red_drop_balances_the_group_and_recomputes_the_baseline() -> None:
    kept = drop_surplus(ONE_RIGHT_OF_EIGHT, ALL, seeds=[1])
    assert kept.sum() == 2 and kept[0, 0]
    assert advantages(Advantage.CENTRED, ONE_RIGHT_OF_EIGHT, kept)[kept].tolist() == [0.5, -0.5]
    equal = torch.full((1, 8), 0.1, dtype=torch.float64)
    assert torch.equal(drop_surplus(equal, ALL, seeds=[1]), ALL), "an all-equal group drops nothing"
    mostly_right = 1 - ONE_RIGHT_OF_EIGHT
    assert torch.equal(drop_surplus(mostly_right, ALL, seeds=[1]), ALL), "more right than wrong drops nothing"


def test_red_drop_depends_only_on_the_groups_seed() -> None:
    two = torch.cat([ONE_RIGHT_OF_EIGHT] * 2)
    kept = drop_surplus(two, torch.cat([ALL] * 2), seeds=[7, 8])
    assert torch.equal(kept.flip(0), drop_surplus(two, torch.cat([ALL] * 2), seeds=[8, 7]))
    draws = {tuple(drop_surplus(ONE_RIGHT_OF_EIGHT, ALL, seeds=[s])[0].tolist()) for s in range(200)}
    assert len(draws) == 7, "each wrong answer can be the one that stays"


def test_balancing_temperature_balances_the_push() -> None:
    centred = torch.tensor([0.75, -0.25, -0.25, -0.25], dtype=torch.float64)
    lengths = torch.tensor([10, 20, 20, 20])
    temperature = balancing_temperature(centred, lengths)
    push = (centred * exp_weights(centred, temperature, 10.0) * lengths).sum()
    assert 0.8 < temperature < 100 and abs(float(push)) < 1e-9
    assert balancing_temperature(centred, torch.tensor([90, 20, 20, 20])) == 100.0, "pushed up already"
    assert balancing_temperature(centred, torch.tensor([1, 900, 900, 900])) == 0.8, "cannot be balanced"


def test_predicted_gain_is_the_true_gain_on_average_over_all_groups() -> None:
    """The mean over all groups of three, each with its probability under α, is J(π) - J(α)."""
    alpha = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
    pi = torch.tensor([0.25, 0.5, 0.25], dtype=torch.float64)
    rewards = torch.tensor([0.0, 1.0, 0.5], dtype=torch.float64)
    arms = torch.cartesian_prod(*[torch.arange(3)] * 3)
    gains = predicted_gain(rewards[arms], torch.ones_like(arms, dtype=torch.bool), (pi / alpha).log()[arms])
    assert float(alpha[arms].prod(-1) @ gains) == pytest.approx(float((pi - alpha) @ rewards))


def test_the_normalized_gain_is_a_jackknife_with_less_bias_than_a_factor() -> None:
    """By loops in float64 for one group; and on average over all groups it is closer to J(π) - J(α) than Σρr/Σρ - r̄."""
    rewards, ratios = [1.0, 0.0, 0.5, 0.0], [2.0, 0.5, 1.5, 3.0]

    def ratio_mean(chosen: list[int]) -> float:
        return sum(ratios[i] * rewards[i] for i in chosen) / sum(ratios[i] for i in chosen)

    without = [ratio_mean([j for j in range(4) if j != i]) for i in range(4)]
    expected = 4 * ratio_mean([0, 1, 2, 3]) - 3 * sum(without) / 4 - sum(rewards) / 4
    scored = torch.tensor([[True] * 4 + [False]])
    rewards_BG = torch.tensor([[*rewards, 9.0]], dtype=torch.float64)
    found = normalized_gain(rewards_BG, scored, torch.tensor([[*ratios, 7.0]], dtype=torch.float64).log())
    assert float(found) == pytest.approx(expected, abs=1e-12)

    alpha, pi, arm_rewards = (torch.tensor(x).double() for x in ([0.5, 0.3, 0.2], [0.2, 0.3, 0.5], [0.0, 1.0, 0.5]))
    arms = torch.cartesian_prod(*[torch.arange(3)] * 6)
    log_ratios, weights = (pi / alpha).log()[arms], alpha[arms].prod(-1)
    gains = normalized_gain(arm_rewards[arms], torch.ones_like(arms, dtype=torch.bool), log_ratios)
    factor = 6 / 5 * ((log_ratios.softmax(-1) * arm_rewards[arms]).sum(-1) - arm_rewards[arms].mean(-1))
    true = float((pi - alpha) @ arm_rewards)
    assert abs(float(weights @ gains) - true) < abs(float(weights @ factor) - true) / 2
