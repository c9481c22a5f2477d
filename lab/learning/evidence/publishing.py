"""Blocks b and c: arms that publish at given steps, and time in which a publish costs something."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from offbeat.run.cadence import PublishReason, StepEvidence


@dataclass(frozen=True)
class Follow:
    """Publish exactly as often as another arm with the same seed, but at other steps."""

    arm: str
    how: Literal["shuffled", "even"]
    """The arm's own gaps in a random order, or equal gaps."""

    def gaps(self, published: Sequence[int], steps: int, seed: int) -> list[int]:
        """Return the steps between publishes.

        >>> Follow("drift", "even").gaps([3, 4, 20], steps=90, seed=1)
        [30, 30, 30]
        >>> sorted(Follow("drift", "shuffled").gaps([3, 4, 20], steps=90, seed=1))
        [1, 3, 16]
        """
        if self.how == "even":
            ends = [round(steps * (place + 1) / len(published)) for place in range(len(published))]
            return [after - before for before, after in pairwise([0, *ends])]
        found = [after - before for before, after in pairwise([0, *published])]
        random.Random(seed).shuffle(found)
        return found


@dataclass
class Scheduled:
    """A cadence that publishes after the given gaps, whatever the evidence says."""

    gaps: list[int]
    """Those still to come, the next one first."""

    def due(self, since: Sequence[StepEvidence], publish_seconds: float | None) -> PublishReason | None:
        """Return why to publish now, or None."""
        if not self.gaps or len(since) < self.gaps[0]:
            return None
        self.gaps.pop(0)
        return PublishReason.PERIOD
