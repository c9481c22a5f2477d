"""What was promised and what came of it: predicted against realized improvement at each publish."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from offbeat.experience.index import NO_VERSION, Columns
from offbeat.reports.groups import NO_CONTRAST
from offbeat.reports.history import RunHistory

MIN_PREDICTIONS: Final = 5
"""With fewer publishes nothing is said about the predictions."""


@dataclass(frozen=True)
class VersionReward:
    """Rewards of the groups that one version generated."""

    mean: float
    error: float
    """Standard error of the mean over groups."""
    contrast: float
    """Share of groups whose rewards differ."""


@dataclass(frozen=True)
class Improvement:
    """Change in reward from the versions that wrote a batch to the version published after it."""

    version: int
    predicted: float
    realized: float
    margin: float
    """Half the 95 % interval of the realized change."""

    @property
    def agrees(self) -> bool:
        """True if the prediction is within the interval."""
        return abs(self.predicted - self.realized) <= self.margin


def rewards_by_version(columns: Columns) -> dict[int, VersionReward]:
    """Return the rewards of each version with at least two scored groups, trained on or not."""
    found = {}
    usable = columns.scored > 0
    for version in np.unique(columns.oldest_version[usable]).tolist():
        rows = usable & (columns.oldest_version == version)
        means = columns.reward_mean[rows].astype(np.float64)
        if version != NO_VERSION and len(means) > 1:
            error = float(means.std(ddof=1)) / math.sqrt(len(means))
            contrast = float((columns.reward_std[rows] > NO_CONTRAST).mean())
            found[version] = VersionReward(float(means.mean()), error, contrast)
    return found


def improvements(
    history: RunHistory, rewards: Mapping[int, VersionReward], *, contrast_only: bool
) -> list[Improvement]:
    """Return one entry for each publish if the new version and all versions in its batch have rewards.

    Args:
        history: The history of the run.
        rewards: Rewards by version.
        contrast_only: True if batches contain only groups whose rewards differ. The prediction is about the batch, so
            it is scaled by the share of such groups.
    """
    steps = {one.step: one for one in history.steps}
    found = []
    for publish in history.publishes:
        step, after = steps.get(publish.version), rewards.get(publish.version)
        if step is None or after is None or "predicted_gain" not in step.metrics:
            continue
        if not step.versions or not step.versions.keys() <= rewards.keys():
            continue
        total = sum(step.versions.values())
        before = [(count / total, rewards[version]) for version, count in step.versions.items()]
        scale = sum(share * one.contrast for share, one in before) if contrast_only else 1.0
        error = math.sqrt(after.error**2 + sum((share * one.error) ** 2 for share, one in before))
        found.append(
            Improvement(
                publish.version,
                step.metrics["predicted_gain"] * scale,
                after.mean - sum(share * one.mean for share, one in before),
                1.96 * error,
            )
        )
    return found


def summarize_improvements(found: Sequence[Improvement]) -> str:
    """Return the totals in one sentence if the predictions are calibrated, otherwise that they are not.

    >>> summarize_improvements([Improvement(4 * n, 0.02, 0.03, 0.04) for n in range(6)])
    'Over 6 publishes: predicted +0.120, realized +0.180 ± 0.098; 6 of 6 predictions are within the 95 % interval.'
    >>> summarize_improvements([Improvement(4 * n, 0.2, 0.03, 0.04) for n in range(6)])
    'Do not rely on these predictions: 0 of 6 are within the 95 % interval of what was realized.'
    """
    inside, n = sum(one.agrees for one in found), len(found)
    if n < MIN_PREDICTIONS:
        return f"Too few publishes to judge the predictions: {n}, at least {MIN_PREDICTIONS} are needed."
    predicted, realized = sum(one.predicted for one in found), sum(one.realized for one in found)
    margin = math.sqrt(sum(one.margin**2 for one in found))
    if not is_calibrated(found):
        biased = inside >= n / 2 and abs(predicted - realized) > margin
        why = f"; their sum is {predicted:+.3f}, realized {realized:+.3f} ± {margin:.3f}" if biased else ""
        return (
            f"Do not rely on these predictions: {inside} of {n} are within the 95 % interval of what was realized{why}."
        )
    return (
        f"Over {n} publishes: predicted {predicted:+.3f}, realized {realized:+.3f} ± {margin:.3f}; "
        f"{inside} of {n} predictions are within the 95 % interval."
    )


def is_calibrated(found: Sequence[Improvement]) -> bool:
    """True if misses are as rare as a 95 % interval allows (binomial, at 5 %), and the sums agree within their margin.

    >>> hit, miss = Improvement(1, 0.0, 0.0, 0.1), Improvement(1, 0.3, 0.0, 0.1)
    >>> [is_calibrated([hit] * (20 - misses) + [miss] * misses) for misses in (0, 1, 4)]
    [True, True, False]
    """
    n, inside = len(found), sum(one.agrees for one in found)
    as_bad = sum(math.comb(n, k) * 0.95**k * 0.05 ** (n - k) for k in range(inside + 1))
    gap = sum(one.predicted - one.realized for one in found)
    return n >= MIN_PREDICTIONS and as_bad >= 0.05 and abs(gap) <= math.sqrt(sum(one.margin**2 for one in found))
