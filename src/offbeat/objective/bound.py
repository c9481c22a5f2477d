"""How far a policy has drifted from its data, and the improvement that the data still guarantees.

The bound is from Mroueh et al. 2025 (arXiv 2505.22257; docs/how-it-works/objective.md). For rewards in [0, 1] and A
whitened by the behavior policy's own mean and σ = √(Var_α r + ε), per prompt:

    J(π) - J(π_k)  ≥  L_α(π) - c·((1-σ)/σ)·TV(π, α) - c·TV(π_k, α),      L_α(π) = E_α[(π/α)·A]

with c = 2 in the paper. With TV = ½·L1, as here, c = 1 is valid too. Both follow from J(π) - J(α) = σ·L_α(π), exactly.
"""

import torch
from torch import Tensor

from offbeat.objective.credit import EPSILON, advantages
from offbeat.objective.losses import bounded_exp
from offbeat.objective.spec import Advantage

PAPER_FACTOR = 2.0
TIGHT_FACTOR = 1.0


def sigma(variance: Tensor, epsilon: float = EPSILON) -> Tensor:
    """σ = √(Var + ε), the whitening scale.

    >>> p = torch.tensor([0.5, 0.01, 0.0], dtype=torch.float64)
    >>> s = sigma(p * (1 - p))
    >>> [round(float(x), 1) for x in (1 - s) / s]  # the reason to mask all-right and all-wrong groups
    [1.0, 9.0, 99.0]
    """
    return (variance + epsilon).sqrt()


def improvement_bound(
    surrogate: Tensor, sigma: Tensor, tv_policy: Tensor, tv_proximal: Tensor, factor: float = PAPER_FACTOR
) -> Tensor:
    """Return the right-hand side of the bound above.

    >>> one = torch.ones(())
    >>> improvement_bound(0.5 * one, 0.5 * one, 0.1 * one, 0.05 * one)
    tensor(0.2000)
    """
    return surrogate - factor * ((1 - sigma) / sigma * tv_policy + tv_proximal)


def group_bounds(
    rewards_BG: Tensor,
    scored_BG: Tensor,
    policy_log_ratios_BG: Tensor,
    proximal_log_ratios_BG: Tensor,
    factor: float = PAPER_FACTOR,
) -> Tensor:
    """Estimate the bound of each group, [B], from the sequence ratios log π/α and log π_k/α of its samples.

    For long answers sequence ratios vary wildly and the bound says nothing: report per-token drift as well.
    """
    whitened_BG = advantages(Advantage.WHITENED, rewards_BG, scored_BG)
    centred_BG = advantages(Advantage.CENTRED, rewards_BG, scored_BG)
    sigma_B = sigma(_mean(centred_BG.square(), scored_BG))
    surrogate_B = _mean(bounded_exp(policy_log_ratios_BG) * whitened_BG, scored_BG)
    tv_policy_B = total_variation(policy_log_ratios_BG, scored_BG)
    tv_proximal_B = total_variation(proximal_log_ratios_BG, scored_BG)
    return improvement_bound(surrogate_B, sigma_B, tv_policy_B, tv_proximal_B, factor)


def predicted_gain(rewards_BG: Tensor, scored_BG: Tensor, log_ratios_BG: Tensor) -> Tensor:
    """Estimate J(π) - J(α) from each group, [B]: G/(G-1) · mean of ρ·(r - r̄), with sequence ratios log π/α.

    r̄ contains r itself, which makes the mean smaller by (G-1)/G; the factor makes the estimate unbiased. A group of
    equal rewards gives 0 and counts: average over ALL groups of a batch.

    >>> rewards, scored = torch.tensor([[1.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool)
    >>> predicted_gain(rewards, scored, torch.tensor([[1.2, 0.8]]).log())  # 2 · (0.5·1.2·0.5 - 0.5·0.8·0.5)
    tensor([0.2000])
    """
    centred_BG = advantages(Advantage.CENTRED, rewards_BG, scored_BG)
    return _fair(scored_BG) * _mean(bounded_exp(log_ratios_BG) * centred_BG, scored_BG)


def normalized_gain(rewards_BG: Tensor, scored_BG: Tensor, log_ratios_BG: Tensor) -> Tensor:
    """Estimate J(π) - J(α) from each group, [B]: Σρr/Σρ - r̄, with its bias removed by the jackknife.

    Dividing by Σρ instead of G keeps one large ratio from deciding, and makes the estimate biased in small groups. The
    jackknife, G·θ - (G-1)·mean of θ without each completion, removes the bias of order 1/G, the factor G/(G-1) of
    `predicted_gain` included.

    >>> rewards, scored = torch.tensor([[1.0, 0.0]]), torch.ones(1, 2, dtype=torch.bool)
    >>> normalized_gain(rewards, scored, torch.tensor([[6.0, 2.0]]).log())  # 2 · 6/8 - (1 + 0)/2 - 1/2
    tensor([0.5000])
    """
    count_B = scored_BG.sum(-1).clamp(min=1)
    rewards_BG = torch.where(scored_BG, rewards_BG, 0.0)
    log_ratios_BG = torch.where(scored_BG, log_ratios_BG, -torch.inf)
    whole_B = _normalized_mean(rewards_BG, log_ratios_BG)
    itself_GG = torch.eye(rewards_BG.shape[-1], dtype=torch.bool, device=rewards_BG.device)
    without_BG = _normalized_mean(rewards_BG[:, None], log_ratios_BG[:, None].masked_fill(itself_GG, -torch.inf))
    jackknife_B = count_B * whole_B - (count_B - 1) * _mean(without_BG, scored_BG)
    return jackknife_B - rewards_BG.sum(-1) / count_B


def _normalized_mean(rewards: Tensor, log_ratios: Tensor) -> Tensor:
    """Σρr/Σρ over the last axis, without entries whose log-ratio is -inf; 0 if there are no others."""
    shares = torch.where(log_ratios.isneginf(), 0.0, log_ratios.softmax(-1))
    return (shares * rewards).sum(-1)


def _fair(scored_BG: Tensor) -> Tensor:
    """G/(G-1), [B]."""
    count_B = scored_BG.sum(-1)
    return count_B / (count_B - 1).clamp(min=1)


def shortfall(log_ratios: Tensor) -> Tensor:
    """(1 - ρ)₊ of each sample. On samples of the denominator its mean is the total variation, and it is at most 1.

    ½|ρ - 1| has the same mean and no upper limit, so a few tokens decide what it says.

    >>> shortfall(torch.tensor([1.5, 0.5]).log())
    tensor([0.0000, 0.5000])
    """
    return (1 - bounded_exp(log_ratios)).clamp(min=0)


def total_variation(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """mean (1 - ρ)₊ over the last axis: TV between the two policies, on samples of the denominator.

    >>> total_variation(torch.tensor([1.5, 0.5]).log(), torch.tensor([True, True]))
    tensor(0.2500)
    """
    return _mean(shortfall(log_ratios), mask)


def effective_sample_size(log_ratios: Tensor, mask: Tensor) -> Tensor:
    """(Σρ)²/(n·Σρ²) over the last axis: 1 if all samples count equally, 1/n if only one counts.

    >>> effective_sample_size(torch.tensor([0.0, -50.0]), torch.tensor([True, True]))
    tensor(0.5000)
    """
    # The scale cancels, so subtracting the largest log-ratio keeps exp in range without a clamp.
    highest = torch.where(mask, log_ratios, -torch.inf).amax(-1, keepdim=True)
    ratios = torch.where(mask, (log_ratios - highest).exp(), 0.0)
    count = mask.sum(-1).clamp(min=1)
    return ratios.sum(-1).square() / (count * ratios.square().sum(-1).clamp(min=torch.finfo(ratios.dtype).tiny))


def _mean(values: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, values, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
