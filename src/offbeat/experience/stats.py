"""What a log holds, in numbers: groups, tokens, tasks, sources, versions, rewards, refusals."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from offbeat.experience.index import NO_VERSION, Columns
from offbeat.experience.lance_table import local_path
from offbeat.experience.reader import LogReader

RANGES: Final = 10
"""Lines that versions are gathered into where there are many."""


@dataclass(frozen=True)
class Share:
    """Some of the groups.

    >>> str(Share(groups=3, completions=24, scored=20, reward_mean=0.25))
    '3 groups, 24 completions, 20 scored, mean reward 0.25'
    """

    groups: int
    completions: int
    scored: int
    reward_mean: float | None

    def __str__(self) -> str:
        mean = "none" if self.reward_mean is None else f"{self.reward_mean:.4g}"
        return f"{self.groups} groups, {self.completions} completions, {self.scored} scored, mean reward {mean}"


@dataclass(frozen=True)
class Stats:
    """The log in numbers. A group with several sources counts for each of them."""

    all: Share
    tokens: int
    unripe: int
    """Groups whose feedback is not complete."""
    tasks: Mapping[str, Share]
    sources: Mapping[str, Share]
    versions: Mapping[str, Share]
    """By the oldest version in a group."""
    quarantined: Mapping[str, int]
    """Groups and late scores, by reason."""
    late_scores: int
    bytes_on_disk: int | None
    """None for an object store."""


def stats_of(log: LogReader) -> Stats:
    """Count what is in the log now, late scores included.

    >>> import tempfile
    >>> from offbeat.experience.log import ExperienceLog
    >>> with tempfile.TemporaryDirectory() as place, ExperienceLog.open(place) as log:
    ...     stats_of(log).all.groups
    0
    """
    rows, now = log.index_since(None)
    reasons = log.tables.quarantine.scan(0, now.quarantine, ["reason"])["reason"].to_pylist()
    names = log.sources
    return Stats(
        all=_share(rows, np.ones(len(rows), np.bool_)),
        tokens=int(rows.tokens.sum(dtype=np.int64)),
        unripe=int((~rows.ripe).sum()),
        tasks={name: _share(rows, rows.task == code) for code, name in enumerate(log.tasks)},
        sources={
            name: _share(rows, (rows.sources & np.uint32(1 << bit)) != 0) for bit, name in enumerate(_bits(names))
        },
        versions=_versions(rows),
        quarantined=dict(Counter(reasons).most_common()),
        late_scores=now.scores,
        bytes_on_disk=_bytes(log),
    )


def _share(rows: Columns, chosen: "np.typing.NDArray[np.bool_]") -> Share:
    scored = rows.scored[chosen].astype(np.int64)
    total = float((rows.reward_mean[chosen].astype(np.float64) * scored).sum())
    count = int(scored.sum())
    return Share(
        groups=int(chosen.sum()),
        completions=int(rows.completions[chosen].sum(dtype=np.int64)),
        scored=count,
        reward_mean=total / count if count else None,
    )


def _bits(names: list[str]) -> list[str]:
    """Names by the bit of the index; those that share the last bit are called together."""
    return names if len(names) <= 32 else [*names[:31], f"({len(names) - 31} others)"]


def _versions(rows: Columns) -> dict[str, Share]:
    versions = rows.oldest_version
    known = np.unique(versions[versions != NO_VERSION])
    parts = np.array_split(known, min(RANGES, len(known))) if len(known) else []
    found = {}
    for part in parts:
        name = f"{part[0]}" if len(part) == 1 else f"{part[0]} … {part[-1]}"
        found[name] = _share(rows, (versions >= part[0]) & (versions <= part[-1]))
    if (versions == NO_VERSION).any():
        found["none of ours"] = _share(rows, versions == NO_VERSION)
    return found


def _bytes(log: LogReader) -> int | None:
    path = local_path(log.tables.groups.uri)
    return path and sum(file.stat().st_size for file in path.parent.rglob("*") if file.is_file())  # type: ignore[return-value]
