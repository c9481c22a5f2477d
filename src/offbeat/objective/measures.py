"""Drift, gates and the improvement bound by lag, from the log-probs of the updates.

They need no extra forward pass: the first update's log-probs are the proximal policy's, the last update's are the
policy's. All figures come from sums over tokens or completions, so micro-batches and ranks can add them up. They cover
the completions that are trained on; drift covers those with known behavior log-probs.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from torch import Tensor

from offbeat.metrics import METRICS
from offbeat.objective.bound import (
    PAPER_FACTOR,
    TIGHT_FACTOR,
    effective_sample_size,
    group_bounds,
    normalized_gain,
    predicted_gain,
    shortfall,
)
from offbeat.objective.losses import bounded_exp, linear_exp, log_ratios
from offbeat.types import GroupDrift, PublishedDrift

NO_LAG: Final = -1
"""The lag of tokens that no earlier version of this policy wrote: by another model, a person, or a later version."""
LAG_BUCKETS: Final = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32+", "none")
"""Lag in steps; 'none' for tokens with `NO_LAG`."""


def bucket_indices(lags: Tensor) -> Tensor:
    """Return the index in `LAG_BUCKETS` of each lag.

    >>> [LAG_BUCKETS[b] for b in bucket_indices(torch.tensor([0, 1, 3, 4, 31, 900, NO_LAG])).tolist()]
    ['0', '1', '2-3', '4-7', '16-31', '32+', 'none']
    """
    edges = torch.tensor([1, 2, 4, 8, 16, 32], device=lags.device)
    return torch.where(lags == NO_LAG, len(LAG_BUCKETS) - 1, torch.bucketize(lags, edges, right=True))


@dataclass(frozen=True)
class ForwardPass:
    """What one update's forward pass computed for some completions."""

    policy_NT: Tensor
    entropies_NT: Tensor
    passed_NT: Tensor
    """Tokens that gate and rejection let through."""


@dataclass(kw_only=True)
class Rows:
    """Some completions of a batch: the inputs of the loss, and the results of the passes made so far."""

    mask_NT: Tensor
    """Tokens to train on."""
    behavior_NT: Tensor
    """NaN where unknown."""
    lags_NT: Tensor
    """k − version, or `NO_LAG`."""
    published_NT: Tensor
    """Fresh tokens that the version published last wrote."""
    advantages_N: Tensor
    weights_N: Tensor
    flat_indices_N: Tensor
    """Each completion's index in a flattened [B · G]."""
    reference_NT: Tensor | None = None
    start_NT: Tensor | None = None
    """Log-probs of the proximal policy, where the first pass was made by a later one."""
    passes: list[ForwardPass] = field(default_factory=list)
    """One per update."""

    @property
    def proximal_NT(self) -> Tensor:
        """Log-probs of the policy at the start of the batch: those of the first pass, if not given."""
        return self.passes[0].policy_NT if self.start_NT is None else self.start_NT


@dataclass(frozen=True)
class WholeGroups:
    """What the figures need to know of the groups of a batch."""

    rewards_BG: Tensor
    fresh_B: Tensor
    """True for groups of this run's policy that are not drawn from the past."""
    contrast_B: Tensor
    """False for groups of equal rewards."""
    enough_B: Tensor
    """True for groups with at least two scored completions."""
    lags_B: Tensor
    """k − the oldest version, or `NO_LAG`."""


@dataclass(frozen=True)
class StepFigures:
    """The metrics of a step, overall and by lag bucket. `offbeat.metrics` declares their names."""

    overall: dict[str, float]
    by_lag: dict[str, dict[str, float]]
    published: PublishedDrift
    groups: list[GroupDrift | None]
    """The drift of each group; None where behavior log-probs are unknown."""


TAIL: Final = math.log(10)
"""|log π_k/α| beyond this: the token has become ten times more or less likely."""
_SUMS: Final = (
    "tokens", "entropy", "known", "tv", "kl", "tail", "gap", "lagged", "lag",
    "up", "up_stopped", "down", "down_stopped", "pull", "slope", "slope_stopped", "reference", "reference_kl",
)  # fmt: skip
_TOKEN_FIGURES: Final = {
    "entropy": ("entropy", "tokens"),
    "lag": ("lag", "lagged"),
    "drift_tv_token": ("tv", "known"),
    "drift_kl_token": ("kl", "known"),
    "ratio_tail_share": ("tail", "known"),
    "gate_stopped_up": ("up_stopped", "up"),
    "gate_stopped_down": ("down_stopped", "down"),
    "gate_stopped_gradient": ("slope_stopped", "slope"),
    "reference_kl": ("reference_kl", "reference"),
}
"""Each metric is the ratio of two sums."""


def _alone(sums: Tensor) -> Tensor:
    return sums


def measure(
    parts: Sequence[Rows], groups: WholeGroups, *, gated: bool, add_up: Callable[[Tensor], Tensor] = _alone
) -> StepFigures:
    """Return the metrics of a step, without those it has no data for (no log-probs, no gate, no token at lag 0).

    `add_up` adds a tensor over the ranks that share the batch.
    """
    device = parts[0].mask_NT.device
    sums_SK = torch.zeros(len(_SUMS), len(LAG_BUCKETS), dtype=torch.float64, device=device)
    published = torch.zeros(5, dtype=torch.float64, device=device)
    sequences = torch.zeros(len(_ROWS), groups.rewards_BG.numel(), dtype=torch.float64, device=device)
    for part in parts:
        _add_tokens(sums_SK, published, part, gated)
        _add_sequences(sequences, part)
    sums_SK, published, sequences = (add_up(x).cpu() for x in (sums_SK, published, sequences))
    rows = {name: row.view(groups.rewards_BG.shape) for name, row in zip(_ROWS, sequences, strict=True)}
    reused = len(parts[0].passes) > 1
    overall = _token_figures(sums_SK.sum(-1)) | _sequence_figures(groups, rows, reused)
    columns = dict(zip(_SUMS, sums_SK, strict=True))
    drift = _published_drift(published, float(columns["pull"].sum()) / len(parts[0].passes))
    if drift.tokens:
        overall["drift_published"] = drift.tv
    if float(columns["known"][0]) > 0:
        overall["engine_gap"] = float(columns["gap"][0] / columns["known"][0])
    by_lag = {}
    buckets_B = bucket_indices(groups.lags_B)
    for bucket, name in enumerate(LAG_BUCKETS):
        if float(columns["tokens"][bucket]) > 0:
            by_lag[name] = _token_figures(sums_SK[:, bucket]) | _group_figures(rows, buckets_B == bucket)
    assert overall.keys() <= METRICS.keys()
    return StepFigures(overall, by_lag, drift, _group_drift(rows))


def _published_drift(sums: Tensor, pull: float) -> PublishedDrift:
    tokens, lost, own_pull, ahead, stopped = sums.tolist()
    wasted = (stopped / ahead) * (own_pull / pull) if ahead else 0.0
    return PublishedDrift(int(tokens), lost / max(tokens, 1), wasted)


def _add_tokens(sums_SK: Tensor, published: Tensor, part: Rows, gated: bool) -> None:
    mask_NT, first, last = part.mask_NT, part.passes[0], part.passes[-1]
    known_NT = mask_NT & ~part.behavior_NT.isnan()
    drift_NT = log_ratios(part.proximal_NT, part.behavior_NT, known_NT)
    ratios_NT = bounded_exp(drift_NT)
    shortfall_NT = shortfall(drift_NT)
    served_NT = known_NT & part.published_NT
    published[:2] += torch.stack([served_NT.sum(), shortfall_NT[served_NT].double().sum()])
    up_NT, down_NT = (mask_NT & side[:, None] for side in (part.advantages_N > 0, part.advantages_N < 0))
    values = {
        "tokens": mask_NT,
        "entropy": first.entropies_NT,
        "known": known_NT,
        "tv": shortfall_NT,
        "kl": ratios_NT - 1 - drift_NT,
        "tail": drift_NT.abs() > TAIL,
        "gap": drift_NT.abs(),
        "lagged": part.lags_NT != NO_LAG,
        "lag": part.lags_NT.clamp(min=0),
    }
    if gated:
        stopped_NT = torch.stack([~update.passed_NT for update in part.passes]).sum(0)
        values |= {"up": up_NT * len(part.passes), "down": down_NT * len(part.passes)}
        values |= {"up_stopped": up_NT * stopped_NT, "down_stopped": down_NT * stopped_NT}
        # The size of a token's pull on the policy, without the importance weight: a stopped token's may be enormous.
        pull_NT = (part.advantages_N * part.weights_N).abs().double()[:, None].expand_as(mask_NT)
        # A token that is certain has hardly a gradient: that of log π with respect to its own logit is 1 - π.
        slopes = [pull_NT * -torch.expm1(update.policy_NT.double()) for update in part.passes]
        values |= {"pull": pull_NT * len(part.passes), "slope": torch.stack(slopes).sum(0)}
        lost = [slope * ~update.passed_NT for slope, update in zip(slopes, part.passes, strict=True)]
        values["slope_stopped"] = torch.stack(lost).sum(0)
        # Only the first update shows what lag stops: before later ones, the batch's own updates have moved the policy.
        ahead_NT = mask_NT & part.published_NT & (drift_NT * part.advantages_N[:, None] > 0)
        chosen = (mask_NT & part.published_NT, ahead_NT, ahead_NT & ~first.passed_NT)
        published[2:] += torch.stack([pull_NT[chosen_NT].sum() for chosen_NT in chosen])
    if part.reference_NT is not None:
        difference_NT = log_ratios(last.policy_NT, part.reference_NT, mask_NT)
        values |= {"reference": mask_NT, "reference_kl": linear_exp(-difference_NT) + difference_NT - 1}
    buckets = bucket_indices(part.lags_NT)[mask_NT]
    for name, value_NT in values.items():
        sums_SK[_SUMS.index(name)].index_add_(0, buckets, value_NT[mask_NT].double())


_ROWS: Final = ("proximal", "policy", "known", "tokens", "shortfall")
"""A completion's log π_k/α and log π/α, whether both are known, its known tokens, and their sum of (1 - ρ)₊."""


def _add_sequences(sequences: Tensor, part: Rows) -> None:
    """Add to the rows of [B · G]."""
    known_NT = part.mask_NT & ~part.behavior_NT.isnan()
    known_N = part.mask_NT.any(-1) & (known_NT == part.mask_NT).all(-1)
    first_NT, last_NT = (
        log_ratios(one_NT, part.behavior_NT, known_NT) for one_NT in (part.proximal_NT, part.passes[-1].policy_NT)
    )
    values = [torch.where(known_N, x.sum(-1), 0) for x in (first_NT, last_NT)]
    values += [known_N, known_NT.sum(-1), torch.where(known_NT, shortfall(first_NT), 0).sum(-1)]
    for row, value_N in zip(sequences, values, strict=True):
        row.index_add_(0, part.flat_indices_N, value_N.double())


def _group_drift(rows: dict[str, Tensor]) -> list[GroupDrift | None]:
    known_BG = rows["known"] > 0
    tokens_B, shortfall_B = rows["tokens"].sum(-1), rows["shortfall"].sum(-1)
    ess_B = effective_sample_size(torch.where(known_BG, rows["proximal"], 0), known_BG)
    measured = zip(tokens_B.tolist(), shortfall_B.tolist(), ess_B.tolist(), strict=True)
    return [GroupDrift(lost / tokens, ess) if tokens and ess > 0 else None for tokens, lost, ess in measured]


def _token_figures(sums_S: Tensor) -> dict[str, float]:
    total = dict(zip(_SUMS, sums_S.tolist(), strict=True))
    return {name: total[top] / total[under] for name, (top, under) in _TOKEN_FIGURES.items() if total[under] > 0}


def _sequence_figures(groups: WholeGroups, rows: dict[str, Tensor], reused: bool) -> dict[str, float]:
    """Return ESS, the predicted gain and, for batches with several updates, the improvement bound.

    The gain averages over all fresh groups, also those of equal rewards, which have no forward pass and no gain. With
    one update π = π_k: the bound is then at most 0 in expectation and cannot promise anything, so it is left out.
    """
    figures = _group_figures(rows, torch.ones_like(groups.fresh_B))
    known_BG = rows["known"] > 0
    compared_B = groups.fresh_B & (known_BG.sum(-1) >= 2)
    if not bool(compared_B.any()):
        return figures
    rewards, known, policy, proximal = (
        x[compared_B] for x in (groups.rewards_BG, known_BG, rows["policy"], rows["proximal"])
    )
    counted = int((compared_B | (groups.fresh_B & ~groups.contrast_B & groups.enough_B)).sum())
    figures["predicted_gain"] = float(normalized_gain(rewards, known, policy).sum()) / counted
    figures["predicted_gain_plain"] = float(predicted_gain(rewards, known, policy).sum()) / counted
    if reused:
        for name, factor in (("bound_paper", PAPER_FACTOR), ("bound_tight", TIGHT_FACTOR)):
            figures[name] = float(group_bounds(rewards, known, policy, proximal, factor).mean())
    return figures


def _group_figures(rows: dict[str, Tensor], chosen_B: Tensor) -> dict[str, float]:
    """Return the figures of the chosen groups that have known log-probs."""
    proximal_BG, known_BG = rows["proximal"], (rows["known"] > 0) & chosen_B[:, None]
    groups_B = known_BG.any(-1)
    if not bool(groups_B.any()):
        return {}
    ess_B = effective_sample_size(proximal_BG[groups_B], known_BG[groups_B])
    return {"drift_tv_sequence": float(shortfall(proximal_BG[known_BG]).mean()), "ess": float(ess_B.mean())}
