"""The metrics of a step of our own trainer: what `objective/measures.py` computes, and the figures of its credit."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offbeat.metrics import METRICS
from offbeat.objective.measures import NO_LAG, WholeGroups
from offbeat.objective.measures import measure as measure_rows
from offbeat.trainer.batch import Batch, MicroBatchTensors
from offbeat.trainer.fsdp import Ranks
from offbeat.types import Finish, GroupDrift, PublishedDrift, Unscorable


@dataclass(frozen=True)
class Measures:
    """The metrics of a step, overall and by lag bucket. `offbeat.metrics` declares their names."""

    overall: dict[str, float]
    by_lag: dict[str, dict[str, float]]
    published: PublishedDrift
    groups: dict[str, GroupDrift]


def measure(batch: Batch, parts: Sequence[MicroBatchTensors], *, gated: bool, ranks: Ranks) -> Measures:
    """Return the metrics of a step, without those it has no data for (no log-probs, no gate, no token at lag 0)."""
    credit, versions = batch.credit, [group.oldest_version for group in batch.groups]
    lags = [NO_LAG if v is None or v > batch.step else batch.step - v for v in versions]
    groups = WholeGroups(
        batch.rewards_BG, batch.fresh_B, ~credit.zero_variance_B, ~credit.too_small_B, torch.tensor(lags)
    )
    found = measure_rows(parts, groups, gated=gated, add_up=ranks.sum)
    overall = found.overall | _credit_figures(batch)
    assert overall.keys() <= METRICS.keys()
    drift = {group.id: one for group, one in zip(batch.groups, found.groups, strict=True) if one is not None}
    return Measures(overall, found.by_lag, found.published, drift)


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
