"""95 % intervals for means over prompts that keep their promise with few prompts and with rates near 0 and 1.

`rate_interval` is Korn and Graubard's (Survey Methodology 24, 1998): the prompts carry as much information as some
number of independent right-or-wrong answers, and that number goes into Clopper and Pearson's exact interval. It is the
number of prompts if the attempts at a prompt agree, and up to the number of completions if prompts are equally hard.
The percentile bootstrap covers far less than 95 % with 20 prompts, and has no width at all if every answer is right.

`paired_difference` combines the intervals of two rates on the same prompts (Newcombe, Statistics in Medicine 17, 1998).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

_TAIL: Final = 0.025
"""Of each side of a 95 % interval."""
_NORMAL: Final = 1.959963984540054


@dataclass(frozen=True)
class RateEstimate:
    """A mean over prompts with its 95 % interval."""

    value: float
    low: float
    high: float
    prompts: int
    """Prompts with enough scored completions to count."""

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def rate_interval(values: Sequence[float], completions: int | None = None) -> RateEstimate:
    """Return the mean of one value per prompt with its interval.

    Values from 0 to 1 are rates; with others, such as rewards from -1 to 1, the interval is Student's.

    >>> str(rate_interval([1.0] * 20))
    '1.000 [0.832, 1.000]'
    >>> str(rate_interval([0.0, 1.0] * 50))
    '0.500 [0.398, 0.602]'

    Args:
        values: One per prompt.
        completions: Completions behind them, the most information that they can carry. Default: one per prompt.
    """
    array = np.asarray(values, np.float64)
    count, mean = len(array), float(array.mean())
    if array.min() < 0 or array.max() > 1:
        half = student_t(count - 1) * math.sqrt(_variance_of_mean(array)) if count > 1 else math.inf
        return RateEstimate(mean, mean - half, mean + half, count)
    mean = min(max(mean, 0.0), 1.0)
    size = _effective_size(array, mean, max(count, completions or 0))
    low = 0.0 if mean == 0 else _beta_quantile(_TAIL, mean * size, (1 - mean) * size + 1)
    high = 1.0 if mean == 1 else _beta_quantile(1 - _TAIL, mean * size + 1, (1 - mean) * size)
    return RateEstimate(mean, low, high, count)


def _variance_of_mean(values: NDArray[np.float64]) -> float:
    return float(values.var(ddof=1)) / len(values)


def _effective_size(values: NDArray[np.float64], mean: float, most: int) -> float:
    """Return how many independent right-or-wrong answers say as much about the mean as these values.

    At least one per prompt: no values from 0 to 1 vary more than right-or-wrong ones. The variance is itself an
    estimate, so the size is reduced as Student's interval is wider than the normal one. A skewed sample with a low mean
    also varies little by chance, so two more prompts count as if they varied like right-or-wrong answers; without them
    the interval of 20 prompts with skewed rates covers too little. Two was chosen among 0, 2, 4, 6 and 10 by
    simulations.
    """
    count, spread = len(values), mean * (1 - mean)
    if count < 2 or not spread:
        return count
    variance = _variance_of_mean(values)
    size = min(most, max(count, spread / variance * (_NORMAL / student_t(count - 1)) ** 2)) if variance else most
    return (count + 2) / (count / size + 2 / count)


def paired_difference(before: Sequence[float], after: Sequence[float], completions: int | None = None) -> RateEstimate:
    """Return the mean of `after` - `before`, two values for each prompt, with its interval.

    What the two have in common, such as how hard a prompt is, makes the interval narrower.

    >>> str(paired_difference([0.0, 1.0] * 20, [1.0, 1.0] * 20))
    '0.500 [0.316, 0.662]'
    """
    first, second = rate_interval(before, completions), rate_interval(after, completions)
    shared = _correlation(np.asarray(before, np.float64), np.asarray(after, np.float64))
    value = second.value - first.value

    def distance(one: float, other: float) -> float:
        return math.sqrt(max(0.0, one**2 - 2 * shared * one * other + other**2))

    below = distance(second.value - second.low, first.high - first.value)
    above = distance(second.high - second.value, first.value - first.low)
    return RateEstimate(value, value - below, value + above, first.prompts)


def _correlation(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return the correlation, as if two more prompts showed none; 0 if one of the two does not vary."""
    count = len(first)
    if count < 3 or not first.std() or not second.std():
        return 0.0
    return float(np.corrcoef(first, second)[0, 1]) * count / (count + 2)


@lru_cache(maxsize=4096)
def student_t(freedom: int) -> float:
    """Return Student's t for a two-sided 95 % interval.

    >>> round(student_t(4), 3), round(student_t(19), 3)
    (2.776, 2.093)
    """
    share = _beta_quantile(2 * _TAIL, freedom / 2, 0.5)
    return math.sqrt(freedom * (1 - share) / share)


@lru_cache(maxsize=4096)
def _beta_quantile(level: float, a: float, b: float) -> float:
    """Return the quantile of a beta distribution.

    >>> round(_beta_quantile(0.975, 1, 20), 4)
    0.1684
    """
    low, high, at_low, at_high = 0.0, 1.0, -level, 1 - level
    for _ in range(100):  # regula falsi, with the Illinois rule against a side that never moves
        x = (low * at_high - high * at_low) / (at_high - at_low)
        at_x = _beta_below(x, a, b) - level
        if abs(at_x) < 1e-9:
            break
        if at_x * at_high < 0:
            low, at_low = high, at_high
        else:
            at_low /= 2
        high, at_high = x, at_x
    return x


def _beta_below(x: float, a: float, b: float) -> float:
    """Return the probability below x of a beta distribution: the regularized incomplete beta function.

    >>> round(_beta_below(0.5, 2, 2), 12), round(_beta_below(0.3, 1, 1), 12)
    (0.5, 0.3)
    """
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta_below(1 - x, b, a)  # the fraction converges fast on one side of the mean only
    if x <= 0:
        return 0.0
    scale = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(scale) * _beta_fraction(x, a, b) / a


def _beta_fraction(x: float, a: float, b: float) -> float:
    """Evaluate the continued fraction of the incomplete beta function from front to back (Lentz's method)."""
    upper, lower = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    value = lower
    for m in range(1, 500):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            lower = 1 / (1 + term * lower)
            upper = 1 + term / upper
            value *= upper * lower
        if abs(upper * lower - 1) < 1e-12:
            break
    return value
