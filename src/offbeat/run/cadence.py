"""When to publish: every v steps, when the policy has drifted too far, or when waiting costs more than a publish.

    why = cadence.due(since=[StepEvidence(PublishedDrift(tokens=384, tv=0.21), seconds=8.0)], publish_seconds=3.0)

A cadence decides from plain numbers and keeps no state: what it sees is one `StepEvidence` for each step since the last
publish. The loop keeps them, in its checkpoint too. So you can replay, resume and test it without tensors or clocks.

Evidence counts only fresh tokens that the version published last wrote. Right after a publish, batches may still come
from earlier versions and show the drift that caused it; publishing again would change nothing. Replayed and imported
tokens say nothing about the workers' policy at all.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from statistics import median
from typing import Any, Final, Protocol, cast

from offbeat.errors import OwnPartError
from offbeat.imports import load_own
from offbeat.run.journal import Phase
from offbeat.types import Json, PublishedDrift

ENOUGH_TOKENS: Final = 256
"""Tokens behind a decision about drift. With fewer in one batch, the steps before it are added."""


class PublishReason(StrEnum):
    """Why a publish is due."""

    PERIOD = "period"
    """v steps have passed since the last publish."""
    DRIFT = "drift"
    """The drift from the last published version exceeds the budget."""
    COST = "cost"
    """The gradient that the gate stopped since the last publish cost more seconds than a publish."""
    LONGEST = "longest"
    """Neither happened for `at_most` steps."""


@dataclass(frozen=True)
class StepEvidence:
    """What one step says about the version published last."""

    drift: PublishedDrift = field(default_factory=PublishedDrift)
    seconds: float = 0.0
    """How long the step took, without publishing, loading, evaluating and saving."""


class Cadence(Protocol):
    """The rule that decides when to publish."""

    def due(self, since: Sequence[StepEvidence], publish_seconds: float | None) -> str | None:
        """Return why to publish now, or None.

        Args:
            since: The steps since the last publish, the one just finished included.
            publish_seconds: How long a publish takes in this run, until workers have loaded it; None if unknown.
        """


@dataclass(frozen=True)
class Fixed:
    """Publish every v steps.

    >>> print(*(Fixed(every=4).due([StepEvidence()] * steps, publish_seconds=0.0) for steps in (3, 4)))
    None period
    """

    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"a cadence of every {self.every} steps never publishes; the smallest is 1")

    def due(self, since: Sequence[StepEvidence], publish_seconds: float | None) -> PublishReason | None:
        return PublishReason.PERIOD if len(since) >= self.every else None


@dataclass(frozen=True)
class Drift:
    """Publish as soon as drift exceeds the budget: after `at_least` steps at the earliest, `at_most` at the latest.

    >>> rule, far = Drift(budget=0.15, at_least=2, at_most=20), StepEvidence(PublishedDrift(tokens=384, tv=0.21))
    >>> print(rule.due([far], 0.0), rule.due([far, far], 0.0), rule.due([StepEvidence()] * 20, 0.0))
    None drift longest
    """

    budget: float
    at_least: int = 1
    at_most: int = 20

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise ValueError(f"every batch exceeds a drift budget of {self.budget}; give one above 0, for example 0.1")
        _check_steps(self.at_least, self.at_most)

    def due(self, since: Sequence[StepEvidence], publish_seconds: float | None) -> PublishReason | None:
        """See `Cadence`. A drift of NaN exceeds every budget."""
        if len(since) >= self.at_most:
            return PublishReason.LONGEST
        drift = recent_drift(since)
        if len(since) < self.at_least or drift is None:
            return None
        return None if drift <= self.budget else PublishReason.DRIFT


def recent_drift(since: Sequence[StepEvidence]) -> float | None:
    """Return the drift over the latest steps that have `ENOUGH_TOKENS` together; None if they never do.

    >>> small = StepEvidence(PublishedDrift(tokens=200, tv=0.1))
    >>> print(recent_drift([small]), recent_drift([small, small]))
    None 0.1
    """
    tokens, shortfall = 0, 0.0
    for step in reversed(since):
        tokens += step.drift.tokens
        shortfall += step.drift.tokens * step.drift.tv
        if tokens >= ENOUGH_TOKENS:
            return shortfall / tokens
    return None


@dataclass(frozen=True)
class Cost:
    """Publish when the gradient stopped by the gate since the last publish has cost more seconds than a publish.

    A step in which the gate stops a tenth of the gradient wastes a tenth of its seconds. If the wasted share grows by
    the same amount each step, this is exactly the period with the least total cost; there is no number to tune.

    >>> wasted = StepEvidence(PublishedDrift(tokens=384, tv=0.1, wasted=0.25), seconds=8.0)   # 2 of 8 seconds
    >>> print(Cost(at_most=20).due([wasted], publish_seconds=3.0), Cost(at_most=20).due([wasted] * 2, 3.0))
    None cost
    """

    at_least: int = 1
    at_most: int = 100

    def __post_init__(self) -> None:
        _check_steps(self.at_least, self.at_most)

    def due(self, since: Sequence[StepEvidence], publish_seconds: float | None) -> PublishReason | None:
        if len(since) >= self.at_most:
            return PublishReason.LONGEST
        if len(since) < self.at_least or publish_seconds is None:
            return None
        wasted = sum(step.drift.wasted * step.seconds for step in since)
        return PublishReason.COST if wasted > publish_seconds else None


@dataclass(frozen=True)
class OwnCadence:
    """A rule of your own: asked after `at_least` steps at the earliest; `at_most` steps are the limit without it."""

    rule: Cadence
    at_least: int = 1
    at_most: int = 100

    @classmethod
    def load(cls, reference: str, at_least: int, at_most: int) -> "OwnCadence":
        """Load the rule: an object with a method `due`, or a class, of which one is made without arguments."""
        rule = load_own(reference)
        return cls(cast(Cadence, rule() if inspect.isclass(rule) else rule), at_least, at_most)

    def due(self, since: Sequence[StepEvidence], publish_seconds: float | None) -> str | None:
        if len(since) >= self.at_most:
            return PublishReason.LONGEST
        why = self.rule.due(since, publish_seconds) if len(since) >= self.at_least else None
        if why is not None and not isinstance(why, str):
            raise OwnPartError(f"sync.cadence returned {why!r}; it must return a text, why to publish, or None")
        return why


def _check_steps(at_least: int, at_most: int) -> None:
    if not 1 <= at_least <= at_most:
        raise ValueError(
            f"at_least = {at_least} and at_most = {at_most} leave no step to publish at; set 1 ≤ at_least ≤ at_most"
        )


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
