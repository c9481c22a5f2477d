"""When to publish: every v steps, or as soon as the policy has drifted too far from the policy that generates.

    why = cadence.due(step=12, published=8, drift=0.21, version=8)

A cadence decides from plain numbers and keeps no state. All it needs is the last published version, which is in the
weight log and in every checkpoint. So you can replay, resume and test it without tensors or clocks.

Drift has hysteresis. Right after a publish, batches still come from earlier versions and still show the drift that
caused it; publishing again would change nothing. Drift counts again when half of a batch's tokens come from the last
published version. That also keeps the rule monotone: with a larger budget, the n-th publish never comes earlier.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class PublishReason(StrEnum):
    """Why a publish is due."""

    PERIOD = "period"
    """v steps have passed since the last publish."""
    DRIFT = "drift"
    """The drift on the batch just trained exceeds the budget."""
    LONGEST = "longest"
    """Drift stayed within the budget for `at_most` steps."""


class Cadence(Protocol):
    """The rule that decides when to publish."""

    def due(self, step: int, published: int, drift: float | None, version: float | None) -> PublishReason | None:
        """Return why to publish after this step, or None.

        Args:
            step: Steps done, including the one just finished.
            published: The last published version.
            drift: From the behavior policy to π_k, on the batch just trained; None if unknown.
            version: The median version of that batch's tokens; None if no version of this run generated them.
        """


@dataclass(frozen=True)
class Fixed:
    """Publish every v steps.

    >>> [step for step in range(1, 9) if Fixed(every=4).due(step, published=step // 5 * 4, drift=None, version=None)]
    [4, 8]
    """

    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"a cadence of every {self.every} steps never publishes; the smallest is 1")

    def due(self, step: int, published: int, drift: float | None, version: float | None) -> PublishReason | None:
        return PublishReason.PERIOD if step - published >= self.every else None


@dataclass(frozen=True)
class Drift:
    """Publish as soon as drift exceeds the budget: after `at_least` steps at the earliest, `at_most` at the latest.

    >>> rule = Drift(budget=0.15, at_least=2, at_most=20)
    >>> print(rule.due(step=12, published=8, drift=0.21, version=8), rule.due(12, 8, 0.09, 8))
    drift None

    A batch generated before the last publish does not cause another one:

    >>> print(rule.due(step=12, published=10, drift=0.21, version=8), rule.due(30, 10, 0.0, version=10))
    None longest
    """

    budget: float
    at_least: int = 1
    at_most: int = 20

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise ValueError(f"every batch exceeds a drift budget of {self.budget}; give one above 0, for example 0.1")
        if not 1 <= self.at_least <= self.at_most:
            raise ValueError(
                f"at_least = {self.at_least} and at_most = {self.at_most} leave no step to publish at; "
                "set 1 ≤ at_least ≤ at_most"
            )

    def due(self, step: int, published: int, drift: float | None, version: float | None) -> PublishReason | None:
        """See `Cadence`. A drift of NaN exceeds every budget."""
        since = step - published
        if since >= self.at_most:
            return PublishReason.LONGEST
        if since < self.at_least or drift is None or version is None or version < published:
            return None
        return None if drift <= self.budget else PublishReason.DRIFT
