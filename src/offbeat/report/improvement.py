"""Predicted against realised improvement, publish by publish. Pure functions of figures.

The last batch before version w is published predicts what the trainer's policy gains on whoever wrote the batch:
J(π) − J(α), by importance weights. What was realised is read off later: the mean reward of all groups that w wrote,
minus that of the versions which wrote the batch, in the same mixture. Groups without contrast promise nothing; where
they are dropped before the trainer sees them, the prediction is scaled by the share of groups that have contrast.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from offbeat.experience.index import NO_VERSION, Columns
from offbeat.report.history import History


@dataclass(frozen=True)
class Earned:
    """What the groups of one version earned."""

    mean: float
    error: float
    """Standard error of the mean over groups."""
    contrast: float
    """Share of groups whose rewards differ."""


@dataclass(frozen=True)
class Improvement:
    """Of one publish against what came before."""

    version: int
    predicted: float
    realised: float
    margin: float
    """Half the 95 % interval of what was realised."""

    @property
    def agrees(self) -> bool:
        """Whether the prediction lies within the interval.

        >>> Improvement(8, predicted=0.05, realised=0.03, margin=0.04).agrees
        True
        """
        return abs(self.predicted - self.realised) <= self.margin


def earned_by_version(columns: Columns) -> dict[int, Earned]:
    """From all groups of a log, trained or not."""
    found = {}
    usable = columns.scored > 0
    for version in np.unique(columns.oldest_version[usable]).tolist():
        rows = usable & (columns.oldest_version == version)
        means = columns.reward_mean[rows].astype(np.float64)
        if version != NO_VERSION and len(means) > 1:
            error = float(means.std(ddof=1)) / math.sqrt(len(means))
            found[version] = Earned(float(means.mean()), error, float((columns.reward_std[rows] > 1e-6).mean()))
    return found


def improvements(history: History, earned: Mapping[int, Earned], *, contrast_only: bool) -> list[Improvement]:
    """One for each publish whose version wrote groups, and whose batch was by versions that did.

    Args:
        history: Of the run.
        earned: By version.
        contrast_only: Whether batches hold only groups with contrast.
    """
    steps = {one.step: one for one in history.steps}
    found = []
    for publish in history.publishes:
        step, after = steps.get(publish.version), earned.get(publish.version)
        if step is None or after is None or "predicted_gain" not in step.metrics:
            continue
        if not step.versions or not step.versions.keys() <= earned.keys():
            continue
        total = sum(step.versions.values())
        before = [(count / total, earned[version]) for version, count in step.versions.items()]
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


def in_words(found: Sequence[Improvement]) -> str:
    """What the comparison comes to.

    >>> in_words([Improvement(8, 0.05, 0.03, 0.04), Improvement(16, 0.1, 0.0, 0.05)])
    'Over 2 publishes +0.150 was predicted and +0.030 realised; 1 of 2 predictions lie within the 95 % interval.'
    """
    predicted, realised = (sum(values) for values in zip(*((o.predicted, o.realised) for o in found), strict=True))
    right = sum(one.agrees for one in found)
    return (
        f"Over {len(found)} publishes {predicted:+.3f} was predicted and {realised:+.3f} realised; {right} of "
        f"{len(found)} predictions lie within the 95 % interval."
    )
