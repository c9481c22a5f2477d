"""An arm of the evidence: one of the ways to train that a block compares, and how its learning rate is found."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from lab.learning.evidence.others import Use
from lab.learning.evidence.publishing import Follow
from lab.learning.evidence.rows import Done, Key, Measure
from offbeat.types import Json

RATES: Final = (1.25e-4, 2.5e-4, 5e-4, 1e-3)
TUNING: Final = (101, 102, 103, 104)
EXTENSIONS: Final = 2
"""How often the grid of learning rates is extended if the best one is at its edge."""

Settings = Mapping[str, Json | Mapping[str, Json]]


@dataclass(frozen=True)
class EvidenceArm:
    """One of the ways to train that a block compares."""

    name: str
    settings: Settings = field(default_factory=dict)
    """What it changes, as in a configuration file."""
    rate: float | None = None
    """A learning rate that is given instead of tuned."""
    rates: tuple[float, ...] = RATES
    """The learning rates that tuning begins with."""
    tuning: tuple[int, ...] = TUNING
    """The seeds of tuning."""
    task: str = ""
    """Its task, if that is not the one of its block."""
    use: Use | None = None
    """What it does with the answers of another model."""
    cost: float | None = None
    """For `sync.by_cost`: how many steps a publish costs, in simulated seconds."""
    follow: Follow | None = None
    """Publishes as often as another arm with the same seed and learning rate, at other times."""
    keeps_publishes: bool = False
    """True if its rows say at which steps it published."""
    keeps_cosine: bool = False
    """True if its rows have the cosine between each step's gradient and that of the exact pass rate."""
    keeps_kl: bool = False
    """True if its rows have the exact KL(π ‖ π_0)."""

    def missing_tuning(self, done: Done, by: Measure) -> list[Key]:
        """Return the cells that have to be trained before the arm's learning rate is known, as far as one can tell.

        If the best rate, the one with the highest mean of `by`, is at the edge of the grid, the grid is extended.
        """
        if self.rate is not None or self.follow is not None:
            return []
        rates = list(self.rates)
        for extension in range(EXTENSIONS + 1):
            missing = [key for rate in rates for seed in self.tuning if (key := (self.name, rate, seed)) not in done]
            best = None if missing else self._best(rates, done, by)
            if best is None or min(rates) < best < max(rates) or extension == EXTENSIONS:
                return missing
            rates.append(best / 2 if best == min(rates) else best * 2)
        raise AssertionError("the loop returns in its last round")

    def best_rate(self, done: Done, by: Measure) -> float:
        """Return the given rate, or the one with the highest mean of `by` over the tuning seeds."""
        if self.rate is not None:
            return self.rate
        name = self.follow.arm if self.follow else self.name
        tuned = sorted({rate for arm, rate, _ in done if arm == name})
        whole = [rate for rate in tuned if all((name, rate, seed) in done for seed in self.tuning)]
        return self._best(whole, done, by, name)

    def _best(self, rates: Sequence[float], done: Done, by: Measure, name: str = "") -> float:
        return max(rates, key=lambda rate: sum(by(done[name or self.name, rate, seed]) for seed in self.tuning))
