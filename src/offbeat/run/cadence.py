"""When to publish: every v steps, or as soon as the policy has drifted too far from the one that generates.

    why = cadence.due(step=12, published=8, drift=0.21, version=8)

A cadence decides from plain numbers and remembers nothing: all there is to keep is the version published last, which is
in the weight log and in every checkpoint. So it can be replayed, resumed and tested without tensors or clocks.

Drift has hysteresis. Right after a publish the batches still come from before it, so they still show the drift that
caused it; publishing again would mend nothing. Drift counts again when half of a batch's tokens come from the last
published version. That also keeps it monotone: with a larger budget the n-th publish never comes earlier.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class PublishReason(StrEnum):
    """What made a publish due."""

    PERIOD = "period"
    """v steps have passed."""
    DRIFT = "drift"
    """Drift on the batch just trained exceeds its budget."""
    LONGEST = "longest"
    """Drift stayed within its budget for as long as is allowed."""


class Cadence(Protocol):
    """Fixed or driven by drift."""

    def due(self, step: int, published: int, drift: float | None, version: float | None) -> PublishReason | None:
        """Whether to publish after this step, and why.

        Args:
            step: Steps done, the one just finished included.
            published: The version published last.
            drift: Of π_k from the behavior policy, on the batch just trained; None where nobody knows.
            version: The median version of that batch's tokens; None where no version of ours wrote them.
        """


@dataclass(frozen=True)
class Fixed:
    """Every v steps.

    >>> [step for step in range(1, 9) if Fixed(every=4).due(step, published=step // 5 * 4, drift=None, version=None)]
    [4, 8]
    """

    every: int

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"a cadence of every {self.every} steps never publishes; the smallest is 1")

    def due(self, step: int, published: int, drift: float | None, version: float | None) -> PublishReason | None:
        """See `Cadence`."""
        return PublishReason.PERIOD if step - published >= self.every else None


@dataclass(frozen=True)
class Drift:
    """As soon as drift exceeds its budget, at the earliest after `at_least` steps and at the latest after `at_most`.

    >>> rule = Drift(budget=0.15, at_least=2, at_most=20)
    >>> print(rule.due(step=12, published=8, drift=0.21, version=8), rule.due(12, 8, 0.09, 8))
    drift None

    What was generated before the last publish cannot ask for another:

    >>> print(rule.due(step=12, published=10, drift=0.21, version=8), rule.due(30, 10, 0.0, version=10))
    None longest
    """

    budget: float
    at_least: int = 1
    at_most: int = 20

    def __post_init__(self) -> None:
        if not self.budget > 0:
            raise ValueError(f"a drift budget of {self.budget} is exceeded by every batch; give one above 0, say 0.1")
        if not 1 <= self.at_least <= self.at_most:
            raise ValueError(
                f"at_least = {self.at_least} and at_most = {self.at_most} leave no step to publish at; "
                "need 1 ≤ at_least ≤ at_most"
            )

    def due(self, step: int, published: int, drift: float | None, version: float | None) -> PublishReason | None:
        """See `Cadence`. A drift that is not a number is beyond every budget."""
        since = step - published
        if since >= self.at_most:
            return PublishReason.LONGEST
        if since < self.at_least or drift is None or version is None or version < published:
            return None
        return None if drift <= self.budget else PublishReason.DRIFT
