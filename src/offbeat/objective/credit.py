"""From the rewards of whole groups to the credit of each completion: once per batch, before any forward pass.

advantages         centered, whitened, divided by a standard deviation, leave-one-out, shrunk to a prior, or the reward
drop_surplus       RED-Drop: leave out answers below the mean that outnumber the others
exp_weights        RED-Weight: count good answers more, with a fixed or a balancing temperature
assign_credit      all of these as an `Objective` says, and which completions are trained on
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.errors import OwnPartError
from offbeat.objective.spec import Advantage, CutOff, Objective, TensorFunction
from offbeat.types import LARGEST_REWARD

EPSILON = Objective().epsilon

VARIANCE_TOLERANCE = 1e-12
"""Relative to the squared rewards: a difference of a millionth is none. With ==, 0.1 + 0.2 would differ from 0.3."""


def advantages(
    kind: Advantage | TensorFunction,
    rewards_BG: Tensor,
    scored_BG: Tensor,
    *,
    prior_B2: Tensor | None = None,
    epsilon: float = EPSILON,
) -> Tensor:
    """Return advantages [B, G] of the given kind; 0 for completions without a score and in groups of equal rewards.

    A function of your own gets the rewards, 0 where there is no score; what it returns for equal rewards counts.

    Only `SHRUNK` uses `prior_B2`, the pseudo-counts (right, wrong) of each prompt from earlier data, without this
    group. It compares a completion with that history too, so groups of equal rewards have advantages. `REWARD` compares
    nothing, so they have them as well.

    >>> rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    >>> advantages(Advantage.CENTRED, rewards, torch.ones_like(rewards, dtype=torch.bool))
    tensor([[ 0.7500, -0.2500, -0.2500, -0.2500]])
    """
    _check(rewards_BG, scored_BG)
    count_B1 = scored_BG.sum(-1, keepdim=True).clamp(min=1)
    rewards_BG = torch.where(scored_BG, rewards_BG, 0.0)
    if not isinstance(kind, Advantage):
        return torch.where(scored_BG, call_own("advantage", kind, rewards_BG, scored_BG), 0.0)
    if kind is Advantage.SHRUNK:
        return _shrunk(rewards_BG, scored_BG, prior_B2, epsilon)
    if kind is Advantage.REWARD:
        return rewards_BG
    # Rounding leaves centered equal rewards slightly off zero, and dividing by a tiny deviation would amplify that.
    contrast_BG = scored_BG & ~zero_variance(rewards_BG, scored_BG)[:, None]
    centred_BG = torch.where(contrast_BG, rewards_BG - rewards_BG.sum(-1, keepdim=True) / count_B1, 0.0)
    sum_squares_B1 = centred_BG.square().sum(-1, keepdim=True)
    variance_B1 = sum_squares_B1 / count_B1
    match kind:
        case Advantage.CENTRED:
            return centred_BG
        case Advantage.WHITENED:
            return centred_BG / (variance_B1 + epsilon).sqrt()
        case Advantage.STD_POPULATION:
            return centred_BG / (variance_B1.sqrt() + epsilon)
        case Advantage.STD_SAMPLE:
            return centred_BG / ((sum_squares_B1 / (count_B1 - 1).clamp(min=1)).sqrt() + epsilon)
        case Advantage.LEAVE_ONE_OUT:
            return centred_BG * count_B1 / (count_B1 - 1).clamp(min=1)


def call_own(
    what: str, function: TensorFunction, first: Tensor, second: Tensor, dtype: torch.dtype | None = None
) -> Tensor:
    """Call a function of your own, and check that its result has the shape of its first argument and this dtype."""
    found: object = function(first, second)
    name = getattr(function, "target", None) or getattr(function, "__qualname__", type(function).__qualname__)
    if not isinstance(found, Tensor) or found.shape != first.shape:
        given = f"shape {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise OwnPartError(f"the {what} {name} returned {given}; it must return a tensor of shape {list(first.shape)}")
    if dtype is torch.bool and found.dtype is not dtype:
        raise OwnPartError(
            f"the {what} {name} returned {found.dtype}; it must return torch.bool: True where a token passes"
        )
    if dtype is None and not bool(found.isfinite().all()):
        raise OwnPartError(f"the {what} {name} returned NaN or infinity; check for a division by zero")
    return found.detach().to(first.device, dtype or first.dtype)


def _shrunk(rewards_BG: Tensor, scored_BG: Tensor, prior_B2: Tensor | None, epsilon: float) -> Tensor:
    """(r_i - m_i)/√(E[p(1-p)] + ε), with the success rate p ~ Beta(a_i, b_i) and its mean m_i = a_i/(a_i + b_i).

    a_i and b_i are the prior's counts and those of the group's other completions. Neither baseline nor scale depends on
    r_i, so the expected gradient keeps its direction.
    """
    if prior_B2 is None:
        raise ValueError("shrunk advantages need prior_B2: the (right, wrong) pseudo-counts of each prompt")
    if prior_B2.shape != (len(rewards_BG), 2) or not bool((prior_B2.isfinite() & (prior_B2 >= 0)).all()):
        raise ValueError(
            f"prior_B2 must be [B, 2] = {(len(rewards_BG), 2)} with counts of at least 0, not {tuple(prior_B2.shape)}"
        )
    if not bool(((rewards_BG >= 0) & (rewards_BG <= 1)).all()):
        low, high = float(rewards_BG.min()), float(rewards_BG.max())
        raise ValueError(f"shrunk advantages need rewards in [0, 1], not {low:g} to {high:g}: rescale the rewards")
    prior_B2 = prior_B2.to(rewards_BG)
    others_BG = scored_BG.sum(-1, keepdim=True) - scored_BG.to(rewards_BG.dtype)
    others_right_BG = rewards_BG.sum(-1, keepdim=True) - rewards_BG
    a_BG = (prior_B2[:, :1] + others_right_BG).clamp(min=0)  # rounding may leave a difference just below 0
    b_BG = (prior_B2[:, 1:] + others_BG - others_right_BG).clamp(min=0)
    total_BG = (a_BG + b_BG).clamp(min=torch.finfo(rewards_BG.dtype).tiny)
    scale_BG = (a_BG * b_BG / (total_BG * (total_BG + 1)) + epsilon).sqrt()
    return torch.where(scored_BG, (rewards_BG - a_BG / total_BG) / scale_BG, 0.0)


def zero_variance(rewards_BG: Tensor, scored_BG: Tensor) -> Tensor:
    """Return [B]: True if all scored rewards of the group are equal, up to `VARIANCE_TOLERANCE`.

    >>> zero_variance(torch.tensor([[0.3, 0.1 + 0.2], [0.0, 1.0]]), torch.ones(2, 2, dtype=torch.bool))
    tensor([ True, False])
    """
    _check(rewards_BG, scored_BG)
    count_B = scored_BG.sum(-1).clamp(min=1)
    rewards_BG = torch.where(scored_BG, rewards_BG, 0.0)
    deviations_BG = torch.where(scored_BG, rewards_BG - (rewards_BG.sum(-1) / count_B)[:, None], 0.0)
    squares_B, variance_B = (x.square().sum(-1) / count_B for x in (rewards_BG, deviations_BG))
    return variance_B <= VARIANCE_TOLERANCE * (1 + squares_B)


def _check(rewards_BG: Tensor, scored_BG: Tensor) -> None:
    if rewards_BG.ndim != 2 or rewards_BG.shape != scored_BG.shape:
        raise ValueError(f"rewards {tuple(rewards_BG.shape)} and scored {tuple(scored_BG.shape)} must both be [B, G]")
    if not rewards_BG.is_floating_point() or scored_BG.dtype != torch.bool:
        raise ValueError(f"rewards must be floating point and scored bool, not {rewards_BG.dtype}, {scored_BG.dtype}")


def drop_surplus(rewards_BG: Tensor, scored_BG: Tensor, seeds: Sequence[int]) -> Tensor:
    """RED-Drop: return which completions to keep, [B, G], so that those below the mean do not outnumber the others.

    The ones to drop are drawn uniformly with the group's own seed. A group of equal rewards loses none.

    >>> rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    >>> drop_surplus(rewards, torch.ones_like(rewards, dtype=torch.bool), seeds=[7]).sum()
    tensor(2)
    """
    if len(seeds) != len(rewards_BG):
        raise ValueError(f"{len(seeds)} seeds for {len(rewards_BG)} groups: give one per group")
    kept_BG = scored_BG.clone()
    rewards_BG = torch.where(scored_BG, rewards_BG, 0.0)
    means_B = rewards_BG.sum(-1) / scored_BG.sum(-1).clamp(min=1)
    # The mean of equal rewards may round to a value above them; that does not put them below it.
    below_BG = scored_BG & (rewards_BG < means_B[:, None] - 1e-6)
    for group, seed in enumerate(seeds):
        below = below_BG[group].nonzero().flatten().tolist()
        surplus = 2 * len(below) - int(scored_BG[group].sum())
        if surplus > 0:
            kept_BG[group, random.Random(seed).sample(below, surplus)] = False
    return kept_BG


def exp_weights(advantages: Tensor, temperature: float, cap: float) -> Tensor:
    """RED-Weight: exp(A/T), with the exponent limited to `cap`.

    >>> exp_weights(torch.tensor([0.0, 1e6]), temperature=1.0, cap=10.0)
    tensor([1.0000e+00, 2.2026e+04])
    """
    return (advantages / temperature).clamp(max=cap).exp()


def balancing_temperature(
    advantages_N: Tensor, lengths_N: Tensor, *, lowest: float = 0.8, highest: float = 100.0, cap: float = 10.0
) -> float:
    """Return the T in [lowest, highest] at which Σ A·exp(A/T)·length is closest to zero.

    A batch whose tokens are pushed up on balance needs no rebalancing and gets `highest`. Otherwise the sum falls
    with T, and bisection in log T finds where it changes sign.

    >>> T = balancing_temperature(torch.tensor([0.75, -0.25]), torch.tensor([10, 40]))
    >>> round(T, 3)  # 0.75·10·exp(.75/T) = 0.25·40·exp(-.25/T)
    3.476
    """
    advantages_N, lengths_N = advantages_N.double(), lengths_N.double()

    def push(temperature: float) -> float:
        return float((advantages_N * exp_weights(advantages_N, temperature, cap) * lengths_N).sum())

    if float((advantages_N * lengths_N).sum()) >= 0 or push(highest) >= 0:
        return highest
    if push(lowest) <= 0:
        return lowest
    low, high = math.log(lowest), math.log(highest)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if push(math.exp(middle)) > 0 else (low, middle)
    return math.exp(low)


@dataclass(frozen=True)
class Credit:
    """The advantages and weights of a batch, and which completions are trained on."""

    advantages_BG: Tensor
    weights_BG: Tensor
    """The factor of RED-Weight; 1 without it."""
    trained_BG: Tensor
    """False for missing, unscorable, dropped and masked completions, which enter no loss and no count."""
    zero_variance_B: Tensor
    """True for groups of equal rewards, whether or not they are trained on."""
    too_small_B: Tensor
    """True for groups with fewer than two scored completions, if they are compared: there is nothing to compare."""

    def rows(self, mask_NT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return advantages [N], weights [N] and mask [N, T] for `Streams`. Untrained completions are masked out.

        >>> one_score = torch.tensor([[True, False]])
        >>> credit = assign_credit(Objective(), torch.tensor([[1.0, 0.0]]), one_score, torch.ones(1, 2))
        >>> credit.rows(torch.ones(2, 3, dtype=torch.bool))[2].any()  # one score has nothing to compare with
        tensor(False)
        """
        return self.advantages_BG.flatten(), self.weights_BG.flatten(), mask_NT & self.trained_BG.reshape(-1, 1)


def assign_credit(
    objective: Objective,
    rewards_BG: Tensor,
    scored_BG: Tensor,
    lengths_BG: Tensor,
    *,
    group_seeds: Sequence[int] = (),
    prior_B2: Tensor | None = None,
    truncated_BG: Tensor | None = None,
) -> Credit:
    """Compute the credit of every completion of a batch.

    `lengths_BG` counts trained tokens. RED-Drop uses `group_seeds`, one per group; `SHRUNK` uses `prior_B2`;
    `CutOff.MASK` uses `truncated_BG`, True for completions that were cut off at the length limit.

    >>> rewards, lengths = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[3, 5], [4, 4]])
    >>> scored = torch.ones(2, 2, dtype=torch.bool)
    >>> credit = assign_credit(Objective(zero_variance_mask=True), rewards, scored, lengths)
    >>> credit.advantages_BG[0], credit.trained_BG[1]
    (tensor([ 0.5000, -0.5000]), tensor([False, False]))
    """
    if objective.truncated is CutOff.MASK:
        if truncated_BG is None:
            raise ValueError("an objective that masks truncated completions needs truncated_BG: which ones those are")
        scored_BG = scored_BG & ~truncated_BG
    scored_BG = scored_BG & (rewards_BG.abs() <= LARGEST_REWARD)  # NaN and infinity are no scores either
    zero_variance_B = zero_variance(rewards_BG, scored_BG)
    too_small_B = scored_BG.sum(-1) < (1 if objective.advantage is Advantage.REWARD else 2)
    trained_BG = scored_BG & ~too_small_B[:, None]
    if objective.zero_variance_mask:
        trained_BG = trained_BG & ~zero_variance_B[:, None]
    if objective.drop_surplus:
        trained_BG = drop_surplus(rewards_BG, trained_BG, group_seeds)
    epsilon = objective.epsilon
    advantages_BG = advantages(objective.advantage, rewards_BG, trained_BG, prior_B2=prior_B2, epsilon=epsilon)
    weights_BG = torch.ones_like(advantages_BG)
    if (exp := objective.exp_weight) is not None:
        temperature = exp.temperature
        if exp.adaptive:
            centred_N, lengths_N = advantages_BG[trained_BG], lengths_BG[trained_BG]
            limits = {"lowest": exp.lowest, "highest": exp.highest, "cap": exp.cap}
            temperature = balancing_temperature(centred_N, lengths_N, **limits)
        weights_BG = exp_weights(advantages_BG, temperature, exp.cap)
    advantages_BG = torch.where(trained_BG, advantages_BG + objective.baseline_shift, 0.0)
    return Credit(advantages_BG, weights_BG, trained_BG, zero_variance_B, too_small_B)
