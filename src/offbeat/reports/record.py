"""Everything a report uses from one run directory, and predicted against realized improvement at each publish."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from offbeat.config import Config
from offbeat.errors import ConservationError
from offbeat.experience.index import NO_VERSION, Columns
from offbeat.experience.ledger import Fate
from offbeat.reports.groups import NO_CONTRAST, RunGroups
from offbeat.reports.history import RunHistory, RunState, read_history, state_of
from offbeat.run.directory import RunDirectory
from offbeat.types import Json


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
    """Return the totals in one sentence.

    >>> summarize_improvements([Improvement(8, 0.05, 0.03, 0.04), Improvement(16, 0.1, 0.0, 0.05)])
    'Over 2 publishes: predicted +0.150, realized +0.030; 1 of 2 predictions are within the 95 % interval.'
    """
    predicted, realized = sum(one.predicted for one in found), sum(one.realized for one in found)
    return (
        f"Over {len(found)} publishes: predicted {predicted:+.3f}, realized {realized:+.3f}; "
        f"{sum(one.agrees for one in found)} of {len(found)} predictions are within the 95 % interval."
    )


@dataclass(frozen=True)
class RunRecord:
    """One run directory, read once."""

    name: str
    path: Path
    config: Config
    environment: Mapping[str, Json]
    history: RunHistory
    state: RunState
    groups: RunGroups | None
    """None if there is no experience log yet."""

    @classmethod
    def load(cls, path: Path) -> "RunRecord":
        """Read a run directory; works while the run is running. Raises `RunError` if `path` is not one."""
        directory = RunDirectory(path)
        config = directory.config()
        history = read_history(directory)
        return cls(
            name=path.resolve().name,
            path=path,
            config=config,
            environment=_environment(path / "environment.json"),
            history=history,
            state=state_of(directory, history, config.steps),
            groups=RunGroups.open(directory, config),
        )

    @property
    def shares_log(self) -> bool:
        """True if other runs may write to its experience log, so that version numbers are ambiguous."""
        return bool(self.config.run.experience)

    @property
    def generates(self) -> bool:
        return self.config.run.mode != "offline"

    def improvements(self) -> list[Improvement]:
        """Return predicted and realized improvement at each publish for which both are known."""
        if self.groups is None or self.shares_log or self.is_on_policy:
            return []
        refilled = self.config.sampler.refill
        return improvements(self.history, rewards_by_version(self.groups.columns), contrast_only=refilled)

    @property
    def is_on_policy(self) -> bool:
        """True if each batch comes from the policy it trains; the predicted gain is then 0 by construction."""
        return self.config.updates_per_batch == 1 and self.config.largest_lag == 0

    @property
    def imbalance(self) -> str:
        """Why the ledger does not balance; empty if it does."""
        try:
            if self.groups is not None:
                self.groups.ledger.check()
        except ConservationError as error:
            return str(error)
        return ""

    def fates(self) -> dict[str, int]:
        """Return the number of groups by fate, trained first, without fates that no group has."""
        if self.groups is None:
            return {}
        order = [Fate.TRAINED, Fate.WAITING, Fate.IN_FLIGHT, *Fate]
        return {fate.value: count for fate in dict.fromkeys(order) if (count := self.groups.ledger.counts[fate])}


def _environment(file: Path) -> Mapping[str, Json]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
