"""Ratios of two policies on the tokens of completions, in logs until the last moment."""

import math

import torch
from torch import Tensor

from offbeat.objective.spec import Importance, Level, One, Tapered, Weight

LOG_RATIO_LIMIT = 20.0
"""exp(±20) ≈ 5e8 and 2e-9: beyond that a ratio says no more, and products of two stay finite in float32."""


def log_ratios(numerator_NT: Tensor, denominator_NT: Tensor, mask_NT: Tensor, level: Level = Level.TOKEN) -> Tensor:
    """log of numerator/denominator at `level`, [N, T], the same for all tokens of a completion if above the token.

    0 on masked tokens, whatever their log-probs hold.

    >>> new, behavior = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    >>> mask = torch.tensor([[True, True]])
    >>> log_ratios(new, behavior, mask), log_ratios(new, behavior, mask, Level.GEOMETRIC)
    (tensor([[ 0.5000, -1.0000]]), tensor([[-0.2500, -0.2500]]))
    """
    if not numerator_NT.shape == denominator_NT.shape == mask_NT.shape or numerator_NT.ndim != 2:
        shapes = [tuple(x.shape) for x in (numerator_NT, denominator_NT, mask_NT)]
        raise ValueError(f"log-probs and mask must have one shape [N, T], not {shapes}")
    dtype = torch.promote_types(numerator_NT.dtype, torch.float32)
    zero = torch.zeros((), dtype=dtype, device=numerator_NT.device)
    # Masked first, subtracted second: -inf or NaN on a masked token must not reach the difference.
    token_NT = torch.where(mask_NT, numerator_NT.to(dtype), zero) - torch.where(mask_NT, denominator_NT.to(dtype), zero)
    if level is Level.TOKEN:
        return token_NT
    sequence_N1 = token_NT.sum(-1, keepdim=True)
    if level is Level.GEOMETRIC:
        sequence_N1 = sequence_N1 / mask_NT.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(mask_NT, sequence_N1, zero)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp with its argument held within ±`LOG_RATIO_LIMIT`."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def linear_exp(x: Tensor) -> Tensor:
    """exp up to `LOG_RATIO_LIMIT`, its tangent beyond: finite, and unlike a clamp it still has a gradient there."""
    excess = (x - LOG_RATIO_LIMIT).clamp(min=0)
    return x.clamp(max=LOG_RATIO_LIMIT).exp() + math.exp(LOG_RATIO_LIMIT) * excess


def importance_weights(weight: Weight, ratios_NT: Tensor, advantages_N1: Tensor) -> Tensor:
    """The factor w of the objective, [N, T].

    >>> importance_weights(Importance(cap=2.0), torch.tensor([[0.5, 3.0]]), torch.tensor([[1.0]]))
    tensor([[0.5000, 2.0000]])
    """
    match weight:
        case One():
            return torch.ones_like(ratios_NT)
        case Importance(cap=cap):
            return ratios_NT.clamp(max=cap)
        case Tapered():
            return torch.where(advantages_N1 >= 0, 1.0, ratios_NT.clamp(max=1.0))
