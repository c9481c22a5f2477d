"""Everything a report knows about one run, read once."""

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
from offbeat.report.groups import RunGroups
from offbeat.report.history import RunHistory, RunState, read_history, state_of
from offbeat.run.directory import RunDirectory
from offbeat.types import Json


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


def improvements(history: RunHistory, earned: Mapping[int, Earned], *, contrast_only: bool) -> list[Improvement]:
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


@dataclass(frozen=True)
class RunRecord:
    """One run."""

    name: str
    path: Path
    config: Config
    environment: Mapping[str, Json]
    history: RunHistory
    state: RunState
    groups: RunGroups | None
    """None where there is no experience log yet."""

    @classmethod
    def of(cls, path: Path) -> "RunRecord":
        """Read a run directory, also of a run that goes on. Raises `RunError` where there is none."""
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
            groups=RunGroups.of(directory, config),
        )

    @property
    def shares_log(self) -> bool:
        """Whether its experience log holds groups of others, whose versions are not its own."""
        return bool(self.config.run.experience)

    @property
    def generates(self) -> bool:
        """Whether it has workers of its own."""
        return self.config.run.mode != "offline"

    def improvements(self) -> list[Improvement]:
        """Predicted and realised at each publish that can be judged."""
        if self.groups is None or self.shares_log or self.cannot_predict:
            return []
        masked = self.config.objective.resolve().zero_variance_mask
        return improvements(self.history, earned_by_version(self.groups.columns), contrast_only=masked)

    @property
    def cannot_predict(self) -> bool:
        """One update on samples of the very same policy: the prediction is 0 by construction."""
        return self.config.updates_per_batch == 1 and self.config.largest_lag == 0

    @property
    def imbalance(self) -> str:
        """What is wrong with the books; empty where they balance."""
        try:
            if self.groups is not None:
                self.groups.ledger.check()
        except ConservationError as error:
            return str(error)
        return ""

    def fates(self) -> dict[str, int]:
        """Groups by fate, the trained first; what does not occur is left out."""
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
