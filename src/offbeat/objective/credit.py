"""From the rewards of whole groups to the credit of each completion: once per batch, before any forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offbeat.objective.advantages import advantages, zero_variance
from offbeat.objective.shaping import balancing_temperature, drop_surplus, exp_weights
from offbeat.objective.spec import Objective


@dataclass(frozen=True)
class Credit:
    """What the loss needs to know about each completion, and which ones it is about."""

    advantages_BG: Tensor
    weights_BG: Tensor
    """RED-Weight's factor; 1 without it."""
    trained_BG: Tensor
    """False for the absent, the unscorable, the dropped and the masked: they enter no loss and no count."""
    zero_variance_B: Tensor
    too_small_B: Tensor
    """Fewer than two scored completions: nothing to compare."""

    def rows(self, mask_NT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Advantages [N], weights [N] and mask [N, T] as `Streams` takes them: who is not trained is masked out.

        >>> one_score = torch.tensor([[True, False]])
        >>> credit = assign_credit(Objective(), torch.tensor([[1.0, 0.0]]), one_score, torch.ones(1, 2))
        >>> credit.rows(torch.ones(2, 3, dtype=torch.bool))[2].any()  # one score is too few to compare
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
) -> Credit:
    """Credit of every completion of a batch.

    `lengths_BG` are trained tokens. RED-Drop draws by `group_seeds`, one per group; `SHRUNK` reads `prior_B2`.

    >>> rewards, lengths = torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[3, 5], [4, 4]])
    >>> scored = torch.ones(2, 2, dtype=torch.bool)
    >>> credit = assign_credit(Objective(zero_variance_mask=True), rewards, scored, lengths)
    >>> credit.advantages_BG[0], credit.trained_BG[1]
    (tensor([ 0.5000, -0.5000]), tensor([False, False]))
    """
    zero_variance_B = zero_variance(rewards_BG, scored_BG)
    too_small_B = scored_BG.sum(-1) < 2
    trained_BG = scored_BG & ~too_small_B[:, None]
    if objective.zero_variance_mask:
        trained_BG = trained_BG & ~zero_variance_B[:, None]
    if objective.drop_surplus:
        trained_BG = drop_surplus(rewards_BG, trained_BG, group_seeds)
    advantages_BG = advantages(objective.advantage, rewards_BG, trained_BG, prior_B2=prior_B2)
    weights_BG = torch.ones_like(advantages_BG)
    if objective.exp_weight is not None:
        temperature, cap = objective.exp_weight.temperature, objective.exp_weight.cap
        if objective.exp_weight.adaptive:
            temperature = balancing_temperature(advantages_BG[trained_BG], lengths_BG[trained_BG], cap=cap)
        weights_BG = exp_weights(advantages_BG, temperature, cap)
    advantages_BG = torch.where(trained_BG, advantages_BG + objective.baseline_shift, 0.0)
    return Credit(advantages_BG, weights_BG, trained_BG, zero_variance_B, too_small_B)
