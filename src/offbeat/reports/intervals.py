"""Means over seeds, and differences of two such means, with 95 % intervals."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offbeat.evaluation.intervals import student_t

Curve = tuple[Sequence[float], Sequence[float]]
"""The x and the y of each point."""


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % interval. With one seed, both ends are the mean."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.n == 1 else f"{self.mean:.3f} ± {self.high - self.mean:.3f}"


def interval(values: Sequence[float]) -> Interval:
    """Return the mean and its 95 % t interval.

    >>> str(interval([0.9, 0.94, 0.95])), str(interval([0.9]))
    ('0.930 ± 0.066', '0.900')
    """
    mean, n = statistics.fmean(values), len(values)
    half = student_t(n - 1) * statistics.stdev(values) / math.sqrt(n) if n > 1 else 0.0
    return Interval(mean, mean - half, mean + half, n)


def difference(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Return mean(second) − mean(first) with its 95 % interval by Welch's t; both need at least two values.

    >>> found = difference([0.50, 0.52, 0.54], [0.60, 0.61, 0.62])
    >>> round(found.mean, 3), round(found.low, 3), round(found.high, 3)
    (0.09, 0.034, 0.146)
    """
    mean = statistics.fmean(second) - statistics.fmean(first)
    parts = [statistics.variance(values) / len(values) for values in (first, second)]
    if not sum(parts):
        return Interval(mean, mean, mean, min(len(first), len(second)))
    squares = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (first, second), strict=True))
    freedom = math.floor(sum(parts) ** 2 / squares)  # rounded down: a wider interval
    half = student_t(max(1, freedom)) * math.sqrt(sum(parts))
    return Interval(mean, mean - half, mean + half, min(len(first), len(second)))


def mean_curve(curves: Iterable[Curve]) -> tuple[list[float], list[Interval]]:
    """Return the mean at every x that at least one curve has.

    The band of two curves is their range: a t interval of two values is so wide that it hides every curve.

    >>> steps, means = mean_curve([([1, 2], [0.0, 1.0]), ([1], [0.5])])
    >>> steps, [(one.mean, one.low, one.n) for one in means]
    ([1, 2], [(0.25, 0.0, 2), (1.0, 1.0, 1)])
    """
    at: dict[float, list[float]] = {}
    for xs, ys in curves:
        for x, y in zip(xs, ys, strict=True):
            at.setdefault(x, []).append(y)
    steps = sorted(at)
    return steps, [interval(at[x]) if len(at[x]) != 2 else _range(at[x]) for x in steps]


def _range(values: Sequence[float]) -> Interval:
    return Interval(statistics.fmean(values), min(values), max(values), len(values))
