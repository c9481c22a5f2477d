"""Means with intervals over seeds, and intervals over runs for figures that use many publishes of each run."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Final, TypeVar

LEVEL: Final = 0.05
"""How often an interval may miss the truth."""
_INTERVALS: Final = 400
"""Parts into which Simpson's rule divides a tail: more than enough for ten digits."""
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
    def of(cls, values: Sequence[float], level: float = LEVEL) -> "Interval":
        """Compute the interval over seeds with Student's t. With another `level` it is wider or narrower than 95 %."""
        return cls(fmean(values), student_limit(len(values) - 1, level) * stdev(values) / len(values) ** 0.5)

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.half:.3f}"


def student_tail(t: float, freedom: int) -> float:
    """Return how often Student's t is farther from 0 than `t`, on both sides together.

    >>> round(student_tail(2.776, freedom=4), 4)
    0.05
    """
    start = math.atan(abs(t) / math.sqrt(freedom))  # the density of this angle is cos^(freedom - 1), up to a factor
    width = (math.pi / 2 - start) / _INTERVALS
    heights = [math.cos(start + place * width) ** (freedom - 1) for place in range(_INTERVALS + 1)]
    tail = width / 3 * (heights[0] + heights[-1] + 4 * sum(heights[1::2]) + 2 * sum(heights[2:-1:2]))
    whole = math.sqrt(math.pi) * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    return 2 * tail / whole


@cache
def student_limit(freedom: int, level: float = LEVEL) -> float:
    """Return the t that is exceeded, on either side, as often as `level` says.

    >>> round(student_limit(4), 3), round(student_limit(11, 0.01), 3)
    (2.776, 3.106)
    """
    low, high = 0.0, 1e5
    while high - low > 1e-9 * (1 + low):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, freedom) > level else (low, middle)
    return high


def p_value(values: Sequence[float], edge: float) -> float:
    """Return the two-sided p-value against a true mean of `edge`.

    >>> round(p_value([0.01, 0.02, 0.03], edge=0.0), 3)
    0.074
    """
    spread = stdev(values)
    if spread == 0:  # all seeds agree to the last digit
        return float(fmean(values) == edge)
    return student_tail((fmean(values) - edge) * len(values) ** 0.5 / spread, len(values) - 1)


def holm_levels(p_values: Sequence[float], level: float = LEVEL) -> list[float]:
    """Return the level at which each of several comparisons is decided, so that all are right in 95 % of the cases.

    The smallest p-value is held against level / m, the next one against level / (m - 1), and so on, up to the first
    that is too large. It and all after it are undecided.

    >>> [round(one, 4) for one in holm_levels([0.001, 0.04, 0.03])]
    [0.0167, 0.025, 0.025]
    """
    levels, undecided = [0.0] * len(p_values), False
    current = level
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        if not undecided:
            current = level / (len(p_values) - rank)
            undecided = p_values[place] > current
        levels[place] = current
    return levels


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
