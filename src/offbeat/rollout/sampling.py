"""From logits to the distribution really sampled from, and a draw from it."""

import torch
from torch import Tensor


def sampled_from(logits_NV: Tensor, temperature: float, top_p: float, top_k: int) -> Tensor:
    """Log-probs [N, V] after temperature, top-k and top-p, in float32; what cannot be drawn has −inf.

    >>> logits = torch.tensor([[2.0, 1.0, 0.0]])
    >>> sampled_from(logits, 1.0, 1.0, top_k=2).exp().round(decimals=3)
    tensor([[0.7310, 0.2690, 0.0000]])
    """
    logits_NV = logits_NV.float() / temperature
    if top_k and top_k < logits_NV.shape[-1]:
        smallest_N1 = logits_NV.topk(top_k, -1).values[:, -1:]
        logits_NV = logits_NV.masked_fill(logits_NV < smallest_N1, -torch.inf)
    if top_p < 1:
        ordered_NV, places_NV = logits_NV.softmax(-1).sort(-1, descending=True)
        # A token stays where those before it do not yet make up top_p, so at least one always stays.
        beyond_NV = ordered_NV.cumsum(-1) - ordered_NV >= top_p
        logits_NV = logits_NV.masked_fill(torch.zeros_like(beyond_NV).scatter_(-1, places_NV, beyond_NV), -torch.inf)
    return torch.log_softmax(logits_NV, -1)


def draw(logprobs_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """One token a row, where its own number in [0, 1) falls among the cumulated probabilities.

    >>> draw(torch.tensor([[0.5, 0.25, 0.25]]).log().expand(3, 3), torch.tensor([0.1, 0.6, 0.99]))
    tensor([0, 1, 2])
    """
    cumulated_NV = logprobs_NV.double().exp().cumsum(-1)
    sum_N1 = cumulated_NV[:, -1:]  # which rounding keeps from being 1
    aim_N1 = torch.minimum(uniform_N.double()[:, None] * sum_N1, torch.nextafter(sum_N1, torch.zeros_like(sum_N1)))
    # The first that lies strictly above the aim is a token that adds something: none of probability 0 is drawn.
    return torch.searchsorted(cumulated_NV, aim_N1, right=True).squeeze(-1)
