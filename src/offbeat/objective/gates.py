"""Which tokens may push the policy: pure tests of a ratio, inclusive at their edges."""

import torch
from torch import Tensor

from offbeat.objective.spec import CentredBand, Gate, NoGate, OneSide, Ring, TwoSide


def passes(gate: Gate, ratios_NT: Tensor, advantages_N1: Tensor, proximal_ratios_NT: Tensor | None = None) -> Tensor:
    """Whether each token passes, [N, T] bool. `proximal_ratios_NT` = π_k/α is what `CentredBand` is centred on.

    >>> ratios = torch.tensor([[0.7, 1.0, 1.3]])
    >>> passes(OneSide(0.2, 0.2), ratios, torch.tensor([[1.0]]))
    tensor([[ True,  True, False]])
    >>> passes(OneSide(0.2, 0.2), ratios, torch.tensor([[-1.0]]))
    tensor([[False,  True,  True]])
    """
    up, down = advantages_N1 >= 0, advantages_N1 <= 0
    match gate:
        case NoGate():
            return torch.ones_like(ratios_NT, dtype=torch.bool)
        case OneSide(low, high):
            return (up & (ratios_NT <= 1 + high)) | (down & (ratios_NT >= 1 - low))
        case TwoSide(low, high):
            return _within(ratios_NT, low, high)
        case Ring(low, high, outer_low, outer_high):
            comes_back = (up & (ratios_NT <= 1 - outer_low)) | (down & (ratios_NT >= 1 + outer_high))
            return _within(ratios_NT, low, high) | comes_back
        case CentredBand(width):
            if proximal_ratios_NT is None:
                raise ValueError("a centred band needs proximal_ratios_NT, the ratios π_k/α it is centred on")
            above = ratios_NT <= proximal_ratios_NT + width
            below = ratios_NT >= (proximal_ratios_NT - width).clamp(min=0)
            return (up & above) | (down & below)


def _within(ratios_NT: Tensor, low: float, high: float) -> Tensor:
    return (ratios_NT >= 1 - low) & (ratios_NT <= 1 + high)
