"""Drift, gates and the improvement bound, computed from the log-probs of the updates.

They need no extra forward pass: the first update's log-probs are the proximal policy's, the last update's are the
policy's. All figures come from sums over tokens or completions, so ranks can add them up. They cover the completions
that are trained on; drift covers those with known behavior log-probs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
from offbeat.trainer.batch import NO_LAG, Batch, MicroBatchTensors
from offbeat.trainer.fsdp import Ranks
from offbeat.types import Finish, GroupDrift, PublishedDrift, Unscorable

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
class Measures:
    """The metrics of a step, overall and by lag bucket. `offbeat.metrics` declares their names."""

    overall: dict[str, float]
    by_lag: dict[str, dict[str, float]]
    published: PublishedDrift
    groups: dict[str, GroupDrift]


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


def measure(batch: Batch, parts: Sequence[MicroBatchTensors], *, gated: bool, ranks: Ranks) -> Measures:
    """Return the metrics of a step, without those it has no data for (no log-probs, no gate, no token at lag 0)."""
    device = parts[0].mask_NT.device
    sums_SK = torch.zeros(len(_SUMS), len(LAG_BUCKETS), dtype=torch.float64, device=device)
    published = torch.zeros(5, dtype=torch.float64, device=device)
    sequences = torch.zeros(len(_ROWS), batch.rewards_BG.numel(), dtype=torch.float64, device=device)
    for part in parts:
        _add_tokens(sums_SK, published, part, gated)
        _add_sequences(sequences, part)
    sums_SK, published, sequences = (ranks.sum(x).cpu() for x in (sums_SK, published, sequences))
    reused = len(parts[0].passes) > 1
    overall = _token_figures(sums_SK.sum(-1)) | _credit_figures(batch) | _sequence_figures(batch, sequences, reused)
    columns = dict(zip(_SUMS, sums_SK, strict=True))
    drift = _published_drift(published, float(columns["pull"].sum()) / len(parts[0].passes))
    if drift.tokens:
        overall["drift_published"] = drift.tv
    if float(columns["known"][0]) > 0:
        overall["engine_gap"] = float(columns["gap"][0] / columns["known"][0])
    by_lag = {}
    for bucket, name in enumerate(LAG_BUCKETS):
        if float(columns["tokens"][bucket]) > 0:
            by_lag[name] = _token_figures(sums_SK[:, bucket]) | _group_figures(batch, sequences, bucket)
    assert overall.keys() <= METRICS.keys()
    return Measures(overall, by_lag, drift, _group_drift(batch, sequences))


def _published_drift(sums: Tensor, pull: float) -> PublishedDrift:
    tokens, lost, own_pull, ahead, stopped = sums.tolist()
    wasted = (stopped / ahead) * (own_pull / pull) if ahead else 0.0
    return PublishedDrift(int(tokens), lost / max(tokens, 1), wasted)


def _add_tokens(sums_SK: Tensor, published: Tensor, part: MicroBatchTensors, gated: bool) -> None:
    mask_NT, first, last = part.mask_NT, part.passes[0], part.passes[-1]
    known_NT = mask_NT & ~part.behavior_NT.isnan()
    drift_NT = log_ratios(first.policy_NT, part.behavior_NT, known_NT)
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


def _add_sequences(sequences: Tensor, part: MicroBatchTensors) -> None:
    """Add to the rows of [B · G]."""
    known_NT = part.mask_NT & ~part.behavior_NT.isnan()
    known_N = part.mask_NT.any(-1) & (known_NT == part.mask_NT).all(-1)
    first_NT, last_NT = (
        log_ratios(one.policy_NT, part.behavior_NT, known_NT) for one in (part.passes[0], part.passes[-1])
    )
    values = [torch.where(known_N, x.sum(-1), 0) for x in (first_NT, last_NT)]
    values += [known_N, known_NT.sum(-1), torch.where(known_NT, shortfall(first_NT), 0).sum(-1)]
    for row, value_N in zip(sequences, values, strict=True):
        row.index_add_(0, part.flat_indices_N, value_N.double())


def _rows(batch: Batch, sequences: Tensor) -> dict[str, Tensor]:
    """Return each row of `sequences` as [B, G]."""
    return {name: row.view(batch.rewards_BG.shape) for name, row in zip(_ROWS, sequences, strict=True)}


def _group_drift(batch: Batch, sequences: Tensor) -> dict[str, GroupDrift]:
    rows = _rows(batch, sequences)
    known_BG = rows["known"] > 0
    tokens_B, shortfall_B = rows["tokens"].sum(-1), rows["shortfall"].sum(-1)
    ess_B = effective_sample_size(torch.where(known_BG, rows["proximal"], 0), known_BG)
    measured = zip(batch.groups, tokens_B.tolist(), shortfall_B.tolist(), ess_B.tolist(), strict=True)
    return {group.id: GroupDrift(lost / tokens, ess) for group, tokens, lost, ess in measured if tokens and ess > 0}


def _token_figures(sums_S: Tensor) -> dict[str, float]:
    total = dict(zip(_SUMS, sums_S.tolist(), strict=True))
    return {name: total[top] / total[under] for name, (top, under) in _TOKEN_FIGURES.items() if total[under] > 0}


def _credit_figures(batch: Batch) -> dict[str, float]:
    credit, groups = batch.credit, len(batch.groups)
    figures = {
        "trained_tokens": float(batch.counts.tokens),
        "zero_variance_share": float(credit.zero_variance_B.sum()) / groups,
        "too_small_share": float(credit.too_small_B.sum()) / groups,
    }
    completions = [one for group in batch.groups for one in group.completions]
    counts = {
        "unscorable_share": sum(isinstance(one.score, Unscorable) for one in completions),
        "truncated_share": sum(one.finish is Finish.LENGTH for one in completions),
        "completion_length": sum(len(one.token_ids) for one in completions),
    }
    figures |= {name: count / len(completions) for name, count in counts.items()}
    if bool(batch.scored_BG.any()):
        figures["reward_mean"] = float(batch.rewards_BG[batch.scored_BG].mean())
    return figures


def _sequence_figures(batch: Batch, sequences: Tensor, reused: bool) -> dict[str, float]:
    """Return ESS, the predicted gain and, for batches with several updates, the improvement bound.

    The gain averages over all fresh groups, also those of equal rewards, which have no forward pass and no gain. With
    one update π = π_k: the bound is then at most 0 in expectation and cannot promise anything, so it is left out.
    """
    figures = _group_figures(batch, sequences, None)
    rows = _rows(batch, sequences)
    known_BG = rows["known"] > 0
    compared_B = batch.fresh_B & (known_BG.sum(-1) >= 2)
    if not bool(compared_B.any()):
        return figures
    rewards, known, policy, proximal = (
        x[compared_B] for x in (batch.rewards_BG, known_BG, rows["policy"], rows["proximal"])
    )
    groups = int((compared_B | (batch.fresh_B & batch.credit.zero_variance_B & ~batch.credit.too_small_B)).sum())
    figures["predicted_gain"] = float(normalized_gain(rewards, known, policy).sum()) / groups
    figures["predicted_gain_plain"] = float(predicted_gain(rewards, known, policy).sum()) / groups
    if reused:
        for name, factor in (("bound_paper", PAPER_FACTOR), ("bound_tight", TIGHT_FACTOR)):
            figures[name] = float(group_bounds(rewards, known, policy, proximal, factor).mean())
    return figures


def _group_figures(batch: Batch, sequences: Tensor, bucket: int | None) -> dict[str, float]:
    """Return the figures of the groups whose oldest version is in `bucket`; of all groups if it is None."""
    rows = _rows(batch, sequences)
    proximal_BG, known_BG = rows["proximal"], rows["known"] > 0
    if bucket is not None:
        known_BG = known_BG & (_group_buckets(batch) == bucket)[:, None]
    groups_B = known_BG.any(-1)
    if not bool(groups_B.any()):
        return {}
    ess_B = effective_sample_size(proximal_BG[groups_B], known_BG[groups_B])
    return {"drift_tv_sequence": float(shortfall(proximal_BG[known_BG]).mean()), "ess": float(ess_B.mean())}


def _group_buckets(batch: Batch) -> Tensor:
    versions = [group.oldest_version for group in batch.groups]
    lags = [NO_LAG if v is None or v > batch.step else batch.step - v for v in versions]
    return bucket_indices(torch.tensor(lags))
