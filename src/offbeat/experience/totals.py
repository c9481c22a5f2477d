"""The totals of a log: groups, completions, scores and tokens, by task, source and version."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.experience.index import NO_VERSION, Columns

VERSION_RANGES: Final = 10
"""Ranges that versions are collected into if there are more of them."""


@dataclass(frozen=True)
class GroupTotals:
    """Totals over some groups."""

    groups: int
    completions: int
    scored: int
    reward_mean: float | None

    @classmethod
    def of(cls, rows: Columns, chosen: NDArray[np.bool_]) -> "GroupTotals":
        """Add up the groups where the mask `chosen` is True."""
        scored = rows.scored[chosen].astype(np.int64)
        total = float((rows.reward_mean[chosen].astype(np.float64) * scored).sum())
        count = int(scored.sum())
        completions = int(rows.completions[chosen].sum(dtype=np.int64))
        return cls(int(chosen.sum()), completions, count, total / count if count else None)

    def __str__(self) -> str:
        mean = "none" if self.reward_mean is None else f"{self.reward_mean:.4g}"
        return f"{self.groups} groups, {self.completions} completions, {self.scored} scored, mean reward {mean}"


@dataclass(frozen=True)
class LogStats:
    """The totals of a log. A group with several sources counts for each of them."""

    all: GroupTotals
    tokens: int
    unripe: int
    """Groups whose feedback is incomplete."""
    tasks: Mapping[str, GroupTotals]
    sources: Mapping[str, GroupTotals]
    versions: Mapping[str, GroupTotals]
    """By the oldest version in a group."""
    quarantined: Mapping[str, int]
    """Refused groups and late scores, by reason."""
    late_scores: int
    bytes_on_disk: int | None
    """None for an object store."""


def compute_stats(
    rows: Columns,
    tasks: Sequence[str],
    sources: Sequence[str],
    refusals: Iterable[str],
    *,
    late_scores: int,
    bytes_on_disk: int | None,
) -> LogStats:
    """Compute the totals of a log from its index, the names behind the index's codes, and the reasons of refusals."""
    return LogStats(
        all=GroupTotals.of(rows, np.ones(len(rows), np.bool_)),
        tokens=int(rows.tokens.sum(dtype=np.int64)),
        unripe=int((~rows.ripe).sum()),
        tasks={name: GroupTotals.of(rows, rows.task == code) for code, name in enumerate(tasks)},
        sources=_totals_by_source(rows, sources),
        versions=_totals_by_version(rows),
        quarantined=dict(Counter(refusals).most_common()),
        late_scores=late_scores,
        bytes_on_disk=bytes_on_disk,
    )


def _totals_by_source(rows: Columns, names: Sequence[str]) -> dict[str, GroupTotals]:
    """Return totals for each bit of `rows.sources`. Sources that share the last bit get one entry."""
    bits = names if len(names) <= 32 else [*names[:31], f"({len(names) - 31} others)"]
    return {name: GroupTotals.of(rows, (rows.sources & np.uint32(1 << bit)) != 0) for bit, name in enumerate(bits)}


def _totals_by_version(rows: Columns) -> dict[str, GroupTotals]:
    """Return totals for each oldest version, or for each range of versions if there are many."""
    versions = rows.oldest_version
    known = np.unique(versions[versions != NO_VERSION])
    totals = {}
    for part in np.array_split(known, min(VERSION_RANGES, len(known))) if len(known) else []:
        name = f"{part[0]}" if len(part) == 1 else f"{part[0]} … {part[-1]}"
        totals[name] = GroupTotals.of(rows, (versions >= part[0]) & (versions <= part[-1]))
    if (versions == NO_VERSION).any():
        totals["no version"] = GroupTotals.of(rows, versions == NO_VERSION)
    return totals
