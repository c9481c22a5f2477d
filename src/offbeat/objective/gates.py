"""Gates that compare tokens or completions over the whole batch, decided before the backward pass.

    gate_batch                log-ratios of the whole batch  ->  which tokens may enter the loss
    losses.policy_loss        takes its rows of that as `gate_NT`, like the counts of the whole batch

What a gate decides here does not depend on how the batch is cut into micro-batches or spread over ranks. It costs one
more forward pass, without gradient, for every update.
"""

import math

import torch
from torch import Tensor

from offbeat.objective.bound import effective_sample_size
from offbeat.objective.spec import GroupESS, Objective, SecondMoment

TIE = 1e-5
"""Tokens that are this close in |log ρ| are stopped together: equal answers differ by rounding, as they are packed."""


def gate_batch(
    objective: Objective, log_ratios_NT: Tensor, advantages_N: Tensor, mask_NT: Tensor, *, group_size: int
) -> Tensor:
    """Return which tokens of a whole batch may enter the loss, [N, T] bool. N is B groups of `group_size`, in order.

    `log_ratios_NT` are log-ratios of single tokens against the policy that the objective names, π/α if not said
    otherwise.

    >>> objective = Objective(gate=SecondMoment(limit=0.04))
    >>> ratios, mask = torch.tensor([[0.1, 0.2, 0.5], [0.5, 0.0, -0.9]]), torch.ones(2, 3, dtype=torch.bool)
    >>> gate_batch(objective, ratios, torch.tensor([1.0, 1.0]), mask, group_size=2)
    tensor([[ True,  True, False],
            [False,  True,  True]])
    """
    if log_ratios_NT.shape != mask_NT.shape or log_ratios_NT.ndim != 2 or len(mask_NT) % group_size:
        shapes = f"{tuple(log_ratios_NT.shape)} and {tuple(mask_NT.shape)}"
        raise ValueError(f"log-ratios and mask must both be [B · {group_size}, T], not {shapes}")
    gate_NT = torch.ones_like(mask_NT)
    if isinstance(objective.gate, SecondMoment):
        gate_NT &= within_second_moment(log_ratios_NT, advantages_N, mask_NT, objective.gate.limit)
    if isinstance(objective.reject, GroupESS):
        trusted_B = group_ess(log_ratios_NT, mask_NT, group_size) >= objective.reject.least
        gate_NT &= trusted_B.repeat_interleave(group_size)[:, None]
    return gate_NT


def within_second_moment(log_ratios_NT: Tensor, advantages_N: Tensor, mask_NT: Tensor, limit: float) -> Tensor:
    """M2PO (Zheng et al. 2025, arXiv 2510.01161, algorithm 1): return which tokens pass, [N, T].

    Only tokens that the update pushes further out can be stopped: A > 0 and ρ > 1, or A < 0 and ρ < 1. The furthest
    of them are left out until the mean (log ρ)² of the others is at most `limit`.
    """
    outward_NT = mask_NT & (log_ratios_NT * advantages_N[:, None].sign() > 0)
    distances_NT = log_ratios_NT.abs()
    return ~(outward_NT & (distances_NT >= second_moment_limit(distances_NT[outward_NT], limit)))


def second_moment_limit(distances: Tensor, limit: float) -> float:
    """Return the |log ρ| from which tokens are stopped; inf if the mean square of all is at most `limit`.

    >>> round(second_moment_limit(torch.tensor([0.5, 0.1, 0.2]), limit=0.04), 4)  # (0.01 + 0.04)/2 ≤ 0.04
    0.5
    """
    ordered = distances.double().sort().values
    means = ordered.square().cumsum(0) / torch.arange(1, len(ordered) + 1, device=ordered.device)
    stopped = ordered[means > limit]
    return float(stopped[0]) - TIE if len(stopped) else math.inf


def group_ess(log_ratios_NT: Tensor, mask_NT: Tensor, group_size: int) -> Tensor:
    """Return the effective sample size of each group's sequence ratios as a share of its trained completions, [B].

    For long answers sequence ratios vary widely, so that one of them soon outweighs the others.

    >>> group_ess(torch.tensor([[0.0], [0.0], [3.0], [0.0]]), torch.ones(4, 1, dtype=torch.bool), group_size=2)
    tensor([1.0000, 0.5497])
    """
    sequence_N = torch.where(mask_NT, log_ratios_NT, 0.0).sum(-1)
    return effective_sample_size(sequence_N.view(-1, group_size), mask_NT.any(-1).view(-1, group_size))
