"""What training changed: improvement predicted and realized at each publish, and a prompt answered early and late."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from offbeat.evaluation import interval
from offbeat.experience.index import NO_VERSION, Columns
from offbeat.reports.groups import NO_CONTRAST, GroupView, RunGroups
from offbeat.reports.history import RunHistory
from offbeat.words import count, signed

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


READ: Final = 2_000
"""Groups at the beginning of a run, and as many at its end, whose prompts are read if no example was asked twice."""


@dataclass(frozen=True)
class PromptPair:
    """Two groups of one prompt, by their places in the run's groups, with their mean rewards."""

    early: int
    late: int
    before: float
    after: float

    @property
    def change(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class PromptChange:
    """Two groups of one prompt, ready to print."""

    why: str
    """Why this prompt is shown."""
    early: GroupView
    late: GroupView
    pair: PromptPair


@dataclass(frozen=True)
class BeforeAfter:
    """The section of a report about prompts that were answered twice."""

    summary: str
    changes: Sequence[PromptChange]


def pair_prompts(columns: Columns) -> list[PromptPair]:
    """Pair the first group of each prompt in the earlier half of the versions with its last in the later half.

    >>> same = [4] * 4
    >>> rows = Columns([0, 1, 2, 3], [0, 2, 8, 8], same, same, [True] * 4, same, same, [0, 0, 1, 1], same, same,
    ...                prompt=[7, 7, 7, 9])
    >>> pair_prompts(rows)
    [PromptPair(early=0, late=2, before=0.0, after=1.0)]
    """
    usable = np.flatnonzero((columns.scored > 0) & (columns.oldest_version != NO_VERSION))
    if not len(usable):
        return []
    versions = columns.oldest_version
    middle = (int(versions[usable].min()) + int(versions[usable].max())) / 2
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place in usable.tolist():
        if versions[place] <= middle:
            first.setdefault(int(columns.prompt[place]), place)
        else:
            last[int(columns.prompt[place])] = place
    rewards = columns.reward_mean
    return [
        PromptPair(early, last[prompt], float(rewards[early]), float(rewards[last[prompt]]))
        for prompt, early in first.items()
        if prompt in last
    ]


def before_and_after(groups: RunGroups) -> BeforeAfter:
    """Compare the prompts of a run that were answered in both halves, and show the extremes and the middle."""
    pairs = sorted(pair_prompts(groups.columns) or _pair_texts(groups), key=lambda pair: pair.change)
    if not pairs:
        return BeforeAfter("No prompt was answered both early and late in this run.", [])
    chosen = {pairs[-1]: "largest rise", pairs[0]: "largest fall" if pairs[0].change < 0 else "smallest rise"}
    chosen = {pairs[len(pairs) // 2]: "median change"} | chosen
    changes = []
    for pair, why in sorted(chosen.items(), key=lambda item: -item[0].change):
        early, late = groups.load([pair.early, pair.late])
        changes.append(PromptChange(why, early, late, pair))
    return BeforeAfter(summarize(pairs), changes)


def _pair_texts(groups: RunGroups) -> list[PromptPair]:
    """Pair by the text of the prompts: generated tasks ask the same sum under many ids."""
    places = sorted({*range(len(groups))[:READ], *range(len(groups))[-READ:]})
    shown = replace(groups.columns.take(places), prompt=groups.prompt_numbers(places))
    return [replace(one, early=places[one.early], late=places[one.late]) for one in pair_prompts(shown)]


def summarize(pairs: Sequence[PromptPair]) -> str:
    """Say what became of all pairs.

    >>> summarize([PromptPair(0, 1, 0.0, 0.5), PromptPair(2, 3, 0.5, 0.75)])   # doctest: +ELLIPSIS
    '2 prompts were answered early and late: mean reward 0.250, then 0.625 (change +0.375, 95 % interval [−1.213, ...'
    """
    changes = [pair.change for pair in pairs]
    before, after = (sum(values) / len(pairs) for values in zip(*((p.before, p.after) for p in pairs), strict=True))
    found = interval(changes)
    ends = f", 95 % interval [{signed(found.low, 3)}, {signed(found.high, 3)}]" if len(pairs) > 1 else ""
    rose, fell = sum(change > 1e-6 for change in changes), sum(change < -1e-6 for change in changes)
    verb = "was" if len(pairs) == 1 else "were"
    return (
        f"{count(len(pairs), 'prompt')} {verb} answered early and late: mean reward {before:.3f}, then {after:.3f} "
        f"(change {signed(found.mean, 3)}{ends}). It rose for {rose}, fell for {fell} and stayed for "
        f"{len(pairs) - rose - fell}."
    )
