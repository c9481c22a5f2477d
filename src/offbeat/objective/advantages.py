"""From the rewards of a group to advantages. Absent or unscored completions take part in nothing and get 0."""

import torch
from torch import Tensor

from offbeat.objective.spec import Advantage

EPSILON = 1e-4
"""Keeps a division finite where all rewards of a group agree; P2's and TRL's value."""

VARIANCE_TOLERANCE = 1e-12
"""Relative to the rewards' square. Rewards that differ by a millionth are the same; == would part 0.1+0.2 and 0.3."""


def advantages(
    kind: Advantage, rewards_BG: Tensor, scored_BG: Tensor, *, prior_B2: Tensor | None = None, epsilon: float = EPSILON
) -> Tensor:
    """Advantages [B, G] of the given kind.

    `prior_B2` holds, for `SHRUNK` alone, the pseudo-counts (right, wrong) known of each prompt beforehand.

    >>> rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    >>> advantages(Advantage.CENTRED, rewards, torch.ones_like(rewards, dtype=torch.bool))
    tensor([[ 0.7500, -0.2500, -0.2500, -0.2500]])
    """
    _check(rewards_BG, scored_BG)
    count_B1 = scored_BG.sum(-1, keepdim=True).clamp(min=1)
    rewards_BG = torch.where(scored_BG, rewards_BG, 0.0)
    # A rounded mean leaves equal rewards a little off zero, and dividing by a deviation near zero would blow that up.
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
        case Advantage.SHRUNK:
            return centred_BG / (_posterior_variance(rewards_BG, count_B1, prior_B2) + epsilon).sqrt()


def _posterior_variance(rewards_BG: Tensor, count_B1: Tensor, prior_B2: Tensor | None) -> Tensor:
    """E[p(1-p)] for a success rate p ~ Beta(prior + what the group showed); rewards in [0, 1].

    G samples of a hard prompt often show no variance at all; what is known of the prompt says there is some.
    """
    if prior_B2 is None:
        raise ValueError("shrunk advantages need prior_B2: the (right, wrong) pseudo-counts of each prompt")
    right_B1 = prior_B2[:, :1] + rewards_BG.sum(-1, keepdim=True)
    wrong_B1 = prior_B2[:, 1:] + count_B1 - rewards_BG.sum(-1, keepdim=True)
    total_B1 = right_B1 + wrong_B1
    return right_B1 * wrong_B1 / (total_B1 * (total_B1 + 1))


def zero_variance(rewards_BG: Tensor, scored_BG: Tensor) -> Tensor:
    """[B]: whether all scored rewards of the group are the same, up to `VARIANCE_TOLERANCE`.

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
