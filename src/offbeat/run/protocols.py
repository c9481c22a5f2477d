"""What the loop is made of: the plan of a run, what it needs of log and trainer, and what a step comes to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from offbeat.experience.index import Columns
from offbeat.experience.ledger import Ledger, LedgerEvent
from offbeat.experience.sampler import Draw
from offbeat.experience.schema import Snapshot
from offbeat.trainer.trainer import RefusedBatch, Trained
from offbeat.types import Group, Json, Score


@dataclass(frozen=True)
class RunPlan:
    """What a run is to do."""

    steps: int
    batch: int
    """B."""
    fresh: int
    """Of them, new ones: fewer than B where past groups are replayed."""
    refill: int = 4
    """Prompts asked for one batch, as a multiple of B, before a smaller batch will do."""
    save_every: int = 50
    evaluate_every: int = 0
    patience: float = 1800.0
    """Seconds without a single new group before the run gives up."""
    pause_seconds: float = 24 * 3600.0
    """How long a paused run waits for a person."""
    poll_seconds: float = 0.5
    """Between looks at the log for groups that come from elsewhere."""


class PauseControl(Protocol):
    """Where a paused run waits for a person."""

    def shut(self) -> None:
        """Ask the person."""

    def is_open(self) -> bool:
        """Whether the run may go on."""


class NeverPaused:
    """No person: a pause is a checkpoint and goes on."""

    def shut(self) -> None:
        """See `PauseControl`."""

    def is_open(self) -> bool:
        """See `PauseControl`."""
        return True


class Learner(Protocol):
    """The trainer's side of a run: in this process, or behind actors."""

    @property
    def step(self) -> int:
        """k."""

    def check(self) -> None:
        """Raises where it is lost, or its last checkpoint was."""

    async def train(self, groups: Sequence[Group]) -> Trained | RefusedBatch:
        """One step. Raises `NoGradient` where the batch has nothing to teach."""

    async def publish(self, version: int) -> Mapping[str, Json]:
        """The policy as it is now, into the weight log; returns what there is to say about it."""

    async def save(self, state: Mapping[str, Json]) -> None:
        """A checkpoint, with `state` of the loop in it."""

    async def finish(self) -> None:
        """The last checkpoint is on disk."""


class Log(Protocol):
    """What the loop needs of the experience log."""

    def index_since(self, cursor: Snapshot | None, until: Snapshot | None = None) -> tuple[Columns, Snapshot]:
        """See `LogReader`."""

    def read(self, which: Sequence[int]) -> list[Group]:
        """See `LogReader`."""

    def record(self, events: Sequence[LedgerEvent]) -> None:
        """See `ExperienceLog`."""

    def ledger(self) -> Ledger:
        """See `LogReader`."""


@dataclass(frozen=True)
class StepOutcome:
    """A step that was made."""

    trained: Trained
    draw: Draw
    groups: Sequence[Group]

    @property
    def median_version(self) -> float | None:
        """Of the batch's tokens; None where no version of ours wrote any."""
        spans = [span for group in self.groups for one in group.completions for span in one.versions]
        if not spans:
            return None
        versions = np.repeat([span.version for span in spans], [span.end - span.start for span in spans])
        return float(np.median(versions))

    def rewards_by_version(self) -> dict[str, Json]:
        """Mean reward and number of groups by oldest version: what improvement was realised, read off later."""
        found: dict[int, list[float]] = {}
        for group in self.groups:
            rewards = [one.score.reward for one in group.completions if isinstance(one.score, Score)]
            if group.oldest_version is not None and rewards:
                found.setdefault(group.oldest_version, []).append(sum(rewards) / len(rewards))
        return {str(version): [sum(means) / len(means), len(means)] for version, means in sorted(found.items())}
