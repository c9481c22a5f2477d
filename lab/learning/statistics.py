"""Means with intervals over seeds, and intervals over runs for figures that use many publishes of each run."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final, TypeVar

T_975: Final = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t by number of values: 95 % of it lies between minus this and this."""
RESAMPLES: Final = 2000

Run = TypeVar("Run")


@dataclass(frozen=True)
class Interval:
    """A mean and the half width of its 95 % interval.

    >>> print(Interval.of([0.9, 0.92, 0.91, 0.93, 0.89]))
    0.910 ± 0.020
    """

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Interval":
        """Compute the interval over seeds with Student's t."""
        return cls(fmean(values), T_975[len(values)] * stdev(values) / len(values) ** 0.5)

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half:.3f}"


def difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Return the difference of two arms with the same seeds: paired, so that the effect of a seed on both cancels.

    >>> print(difference([0.5, 0.6, 0.7], [0.4, 0.5, 0.6]))
    0.100 ± 0.000
    """
    return Interval.of([one - other for one, other in zip(first, second, strict=True)])


def bootstrap(runs: Sequence[Run], figure: Callable[[Sequence[Run]], float]) -> tuple[float, float]:
    """Return the 95 % interval of a figure over runs. It resamples whole runs: their publishes are not independent.

    >>> low, high = bootstrap([[1.0], [1.0], [4.0]], lambda runs: fmean(one for run in runs for one in run))
    >>> low, high
    (1.0, 4.0)
    """
    rng = random.Random(0)
    found = sorted(figure(rng.choices(runs, k=len(runs))) for _ in range(RESAMPLES))
    return found[round(0.025 * RESAMPLES)], found[round(0.975 * RESAMPLES) - 1]


def slope(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return the slope of ys on xs by least squares.

    >>> slope([0.0, 1.0, 2.0], [1.0, 3.0, 5.0])
    2.0
    """
    x, y = fmean(xs), fmean(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Return Pearson's correlation.

    >>> round(correlation([0.0, 1.0, 2.0], [1.0, 3.0, 5.0]), 6)
    1.0
    """
    forth, back = slope(xs, ys), slope(ys, xs)
    return math.copysign(math.sqrt(forth * back), forth)
