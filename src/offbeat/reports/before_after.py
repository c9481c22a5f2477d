"""The same prompt, answered early and late in a run."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from offbeat.experience.index import NO_VERSION, Columns
from offbeat.reports.groups import GroupView, RunGroups
from offbeat.reports.intervals import interval
from offbeat.words import count, signed

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
