"""What the loop measures for its cadence: each step since the last publish, and what a publish costs in this run."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Final, cast

from offbeat.run.cadence import StepEvidence
from offbeat.run.journal import Phase
from offbeat.types import Json, PublishedDrift

STEP_PHASES: Final = (Phase.GROUPS, Phase.TRAINING, Phase.ITSELF)
PUBLISH_PHASES: Final = (Phase.PUBLISHING, Phase.LOADING)
REMEMBERED: Final = 5
"""Publishes over which the cost is a median."""


@dataclass
class PublishEvidence:
    """The evidence behind the next decision. It is part of a checkpoint, so a resumed run decides alike.

    >>> evidence = PublishEvidence()
    >>> evidence.add_step(PublishedDrift(384, 0.02, 0.1), {Phase.TRAINING: 4.0, Phase.PUBLISHING: 2.0})
    6.0
    >>> evidence.since[0].seconds, evidence.publish_seconds
    (4.0, 2.0)
    """

    since: list[StepEvidence] = field(default_factory=list)
    """One entry for each step since the last publish."""
    costs: list[float] = field(default_factory=list)
    """Seconds of the latest publishes, until workers had loaded them."""
    _counted: dict[Phase, float] = field(default_factory=dict)
    _first_step: bool = True
    _just_published: bool = True

    @property
    def publish_seconds(self) -> float | None:
        """The median cost of the latest publishes, in seconds; None before the first one is measured."""
        return median(self.costs) if self.costs else None

    def add_step(self, drift: PublishedDrift, seconds: Mapping[Phase, float]) -> float:
        """Add a finished step and return its seconds. `seconds` are the totals by phase, from the run's stopwatch."""
        spent = {phase: total - self._counted.get(phase, 0.0) for phase, total in seconds.items()}
        self._counted = dict(seconds)
        self.since.append(StepEvidence(drift, sum(spent.get(phase, 0.0) for phase in STEP_PHASES)))
        if self._just_published:
            # Before the first step, loading includes starting the engines, which no later publish does.
            phases = PUBLISH_PHASES[:1] if self._first_step else PUBLISH_PHASES
            cost = sum(spent.get(phase, 0.0) for phase in phases)
            self.costs = [*self.costs, cost][-REMEMBERED:]
        self._first_step = self._just_published = False
        return sum(spent.values())

    def published(self) -> None:
        """Start again after a publish."""
        self.since.clear()
        self._just_published = True

    def state(self) -> Json:
        """Return the evidence as JSON, for the checkpoint."""
        return {"since": [cast(Json, asdict(step)) for step in self.since], "costs": [*self.costs]}

    @classmethod
    def restore(cls, state: Mapping[str, Any]) -> "PublishEvidence":
        """Return the evidence of a checkpoint."""
        since = [StepEvidence(PublishedDrift(**step["drift"]), step["seconds"]) for step in state["since"]]
        return cls(since, list(state["costs"]), _just_published=False)
