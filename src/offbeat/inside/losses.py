"""A preset as the loss of a host: padded tensors of a micro-batch in; a loss, and figures of drift and gate, out."""

import torch
from torch import Tensor

from offbeat.errors import NotServable
from offbeat.objective.bound import shortfall
from offbeat.objective.losses import Counts, Streams, counts, log_ratios, policy_loss
from offbeat.objective.spec import Need, Objective
from offbeat.types import LOGPROB_RULE, LOWEST_LOGPROB, UNKNOWN, Unknown


def host_loss(
    objective: Objective,
    policy_NT: Tensor,
    behavior_NT: Tensor,
    advantages_NT: Tensor,
    mask_NT: Tensor,
    *,
    proximal_NT: Tensor | Unknown = UNKNOWN,
    total: Counts | None = None,
    length_limit: int | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return the loss of a micro-batch, and its figures by name.

    `advantages_NT` hold one advantage a completion, repeated over its tokens, as verl and Trinity-RFT keep them.
    `total` are the counts of the whole batch; without them the micro-batch is averaged alone.

    >>> from offbeat.objective.presets import PRESETS
    >>> policy, mask = torch.full((2, 3), -1.0, requires_grad=True), torch.ones(2, 3, dtype=torch.bool)
    >>> advantages = torch.tensor([[1.0], [-1.0]]).expand(2, 3)
    >>> loss, figures = host_loss(PRESETS["rec-oneside-nois"].objective, policy, policy.detach() + 1, advantages, mask)
    >>> figures["gate_stopped_up"], figures["gate_stopped_down"], round(figures["drift_tv_token"], 3)
    (0.0, 1.0, 0.632)
    """
    mask_NT = mask_NT.bool()
    advantages_N = (advantages_NT * mask_NT).sum(-1) / mask_NT.sum(-1).clamp(min=1)
    apart = (mask_NT * (advantages_NT - advantages_N[:, None])).abs().max()
    if bool(apart > 1e-4 * advantages_NT.abs().max()):
        raise NotServable("offbeat's presets have one advantage a completion, and these differ from token to token")
    if Need.BEHAVIOR in objective.needs and not bool((behavior_NT[mask_NT].abs() <= -LOWEST_LOGPROB).all()):
        raise NotServable(f"some log-probs of the policy that generated are NaN or infinite; {LOGPROB_RULE}")
    streams = Streams(
        policy_NT=policy_NT,
        behavior_NT=behavior_NT,
        proximal_NT=proximal_NT,
        reference_NT=UNKNOWN,
        advantages_N=advantages_N,
        weights_N=torch.ones_like(advantages_N),
        mask_NT=mask_NT,
    )
    found = policy_loss(objective, streams, total or counts(mask_NT), length_limit=length_limit or mask_NT.shape[-1])
    return found.total, _figures(streams, found.passed_NT)


@torch.no_grad()
def _figures(streams: Streams, passed_NT: Tensor) -> dict[str, float]:
    mask_NT = streams.mask_NT
    ratios_NT = log_ratios(streams.policy_NT, streams.need(Need.BEHAVIOR), mask_NT)
    stopped_NT, tokens = mask_NT & ~passed_NT, mask_NT.sum().clamp(min=1)
    figures = {
        "kl": -ratios_NT.sum() / tokens,
        "gate_stopped": stopped_NT.sum() / tokens,
        "drift_tv_token": shortfall(ratios_NT).where(mask_NT, 0.0).sum() / tokens,
    }
    for name, side_N in (("up", streams.advantages_N > 0), ("down", streams.advantages_N < 0)):
        side_NT = mask_NT & side_N[:, None]
        figures[f"gate_stopped_{name}"] = (side_NT & stopped_NT).sum() / side_NT.sum().clamp(min=1)
    return {name: float(value) for name, value in figures.items()}
