"""Shaping the data before the gradient: RED-Drop and RED-Weight (P1, section 4 of docs/objectives.md)."""

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor


def drop_surplus(rewards_BG: Tensor, scored_BG: Tensor, seeds: Sequence[int]) -> Tensor:
    """RED-Drop: keep [B, G], with as many answers below the group's mean left out as outnumber the others.

    Which ones is drawn uniformly from the group's own seed. A group of equal rewards loses nothing.

    >>> rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    >>> drop_surplus(rewards, torch.ones_like(rewards, dtype=torch.bool), seeds=[7]).sum()
    tensor(2)
    """
    if len(seeds) != len(rewards_BG):
        raise ValueError(f"{len(seeds)} seeds for {len(rewards_BG)} groups: give one per group")
    kept_BG = scored_BG.clone()
    rewards_BG = torch.where(scored_BG, rewards_BG, 0.0)
    means_B = rewards_BG.sum(-1) / scored_BG.sum(-1).clamp(min=1)
    # A mean of equal rewards may round above them all; nobody is below it for that.
    below_BG = scored_BG & (rewards_BG < means_B[:, None] - 1e-6)
    for group, seed in enumerate(seeds):
        below = below_BG[group].nonzero().flatten().tolist()
        surplus = 2 * len(below) - int(scored_BG[group].sum())
        if surplus > 0:
            kept_BG[group, random.Random(seed).sample(below, surplus)] = False
    return kept_BG


def exp_weights(advantages: Tensor, temperature: float, cap: float) -> Tensor:
    """RED-Weight: exp(A/T), the exponent cut off at `cap`.

    >>> exp_weights(torch.tensor([0.0, 1e6]), temperature=1.0, cap=10.0)
    tensor([1.0000e+00, 2.2026e+04])
    """
    return (advantages / temperature).clamp(max=cap).exp()


def balancing_temperature(
    advantages_N: Tensor, lengths_N: Tensor, *, lowest: float = 0.8, highest: float = 100.0, cap: float = 10.0
) -> float:
    """The T in [lowest, highest] at which Σ A·exp(A/T)·length is as near zero as it gets.

    A batch whose tokens are pushed up on balance needs no rebalancing and gets `highest`. Otherwise the sum falls
    with T, and bisection (in log T) finds where it changes sign.

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
