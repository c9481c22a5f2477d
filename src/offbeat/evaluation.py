"""How good is it? pass@1, pass@k and maj@k with 95 % intervals, from the attempts of a model, a log or a checkpoint.

A completion that made its own scoring fail is wrong. One that the grader could not score is counted and left out of the
value; the interval begins where it would with all of them wrong, and ends where it would with all of them right.
Intervals are over prompts, because two answers to one prompt say less than answers to two prompts. They keep their
promise with few prompts and with rates near 0 and 1: `rate_interval` is Korn and Graubard's (Survey Methodology 24,
1998). The prompts carry as much information as some number of independent right-or-wrong answers, and that number goes
into Clopper and Pearson's exact interval. It is the number of prompts if the attempts at a prompt agree, and up to the
number of completions if prompts are equally hard. The percentile bootstrap covers far less than 95 % with 20 prompts,
and has no width at all if every answer is right. `paired_difference` combines the intervals of two rates on the same
prompts (Newcombe, Statistics in Medicine 17, 1998).

`interval`, `difference` and `mean_curve` are of means over seeds, by Student's t.
"""

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.seeds import derive
from offbeat.types import Score, Unscorable


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


_SUBSETS: Final = 256
"""The most draws of k answers that maj@k averages over."""
GREEDY: Final = "greedy pass@1"
"""The pass rate of one greedy completion per prompt."""


@dataclass(frozen=True)
class Attempts:
    """The completions of one prompt."""

    id: str
    slice: str
    """The row of the table it belongs to."""
    rewards: Sequence[float | None]
    """One per completion, as `counted` returns it; None if it could not be scored."""
    answers: Sequence[str | None] | None = None
    """Their final answers, for maj@k; an entry is None if the completion has no answer."""
    greedy: float | None = None
    """The reward of one more completion, generated greedily; None if there is none, NaN if it could not be scored."""


@dataclass(frozen=True)
class EvaluationRow:
    """One slice of the table."""

    slice: str
    prompts: int
    completions: int
    unscorable: int
    estimates: Mapping[str, RateEstimate]
    """By metric, for instance 'mean reward', 'pass@1', 'pass@8', 'maj@8', 'greedy pass@1'."""
    before: Mapping[str, RateEstimate] = field(default_factory=dict)
    """The same of the model that a run started from, on the same prompts."""
    difference: Mapping[str, RateEstimate] = field(default_factory=dict)
    """`estimates` minus `before`, paired by prompt."""
    held_out: bool | None = None
    """Whether the prompts were kept out of training; None if that is not known."""

    @property
    def origin(self) -> str:
        """The same in words, after 'asked on 64 …'."""
        if self.held_out is None:
            return "prompts; it is not known whether the model was trained on them"
        return "held-out prompts" if self.held_out else "training prompts, because nothing was held out"


def counted(score: Score | Unscorable | None) -> float | None:
    """Return the reward of a completion, -inf if it has none because it made its own scoring fail, or else None."""
    if isinstance(score, Unscorable):
        return -math.inf if score.blame == "answer" else None
    return score.reward if score else None


def pass_at_k(scored: int, correct: int, k: int) -> float:
    """Return the chance that k completions, drawn without replacement, include a correct one: 1 − C(n−c, k) / C(n, k).

    >>> pass_at_k(scored=4, correct=1, k=1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not 0 <= correct <= scored or not 1 <= k <= scored:
        raise ValueError(f"pass@{k} of {scored} completions, {correct} of them correct, is not defined")
    return 1.0 - math.comb(scored - correct, k) / math.comb(scored, k)


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Return 1 if the most frequent answer is right, else 0; tied answers share the vote, and None is no vote.

    >>> majority(["7", "7", "8"], [True, True, False]), majority(["7", "8"], [True, False]), majority([None], [False])
    (1.0, 0.5, 0.0)
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return 0.0
    most = max(votes.values())
    winners = [answer for answer, count in votes.items() if count == most]
    right = [sum(c for a, c in zip(answers, correct, strict=True) if a == winner) / votes[winner] for winner in winners]
    return sum(right) / len(winners)


def maj_at_k(answers: Sequence[str | None], correct: Sequence[bool], k: int) -> float:
    """Average `majority` of k completions over all ways to draw them, or over 256 random draws if there are more.

    >>> maj_at_k(["7", "7", "8"], [True, True, False], k=2)
    0.6666666666666666
    """
    indices = range(len(answers))
    if math.comb(len(answers), k) <= _SUBSETS:
        draws: Iterable[Sequence[int]] = itertools.combinations(indices, k)
    else:
        rng = random.Random(derive(0, "maj@k", len(answers), k))  # the same draws for every prompt and every run
        draws = [rng.sample(indices, k) for _ in range(_SUBSETS)]
    majorities = [majority([answers[i] for i in draw], [correct[i] for i in draw]) for draw in draws]
    return sum(majorities) / len(majorities)


def evaluate(
    attempts: Iterable[Attempts],
    ks: Sequence[int] = (),
    *,
    before: Iterable[Attempts] = (),
    correct_at: float = 1.0,
    held_out: bool | None = None,
) -> list[EvaluationRow]:
    """Make the table: a row for all prompts, then a row for each slice if there are several.

    >>> table = evaluate([Attempts("a", "easy", [1.0, 1.0]), Attempts("b", "hard", [0.0, None])])
    >>> [(row.slice, row.unscorable, row.estimates["pass@1"].value) for row in table]
    [('all', 1, 0.5), ('easy', 0, 1.0), ('hard', 1, 0.0)]

    Args:
        attempts: One entry per prompt.
        ks: The k of pass@k and maj@k; a prompt with fewer scored completions does not count.
        before: Attempts of another model at the same prompts, to compare with.
        correct_at: A completion with at least this reward counts as correct.
        held_out: Whether the prompts were kept out of training, if that is known.
    """
    sides = list(attempts), list(before)
    known = [r for side in sides for one in side for r in one.rewards if r is not None and math.isfinite(r)]
    low, high = min(0.0, correct_at - 1, *known), max([correct_at, *known])

    def rows(*fills: float | None) -> list[EvaluationRow]:
        now, then = (
            [_Measured.of(_filled(one, by, low), ks, correct_at) for one in side]
            for side, by in zip(sides, fills, strict=True)
        )
        slices = sorted({one.prompt.slice for one in now})
        found = [_row("all", now, then)]
        for name in slices if len(slices) > 1 else ():
            found.append(_row(name, *([m for m in side if m.prompt.slice == name] for side in (now, then))))
        return [replace(row, held_out=held_out) for row in found]

    return list(map(_widened, rows(None, None), rows(low, high), rows(high, low)))


def _filled(prompt: Attempts, by: float | None, low: float) -> Attempts:
    """Return the attempts with this reward for unscorable ones, and none below the lowest."""
    greedy = by if prompt.greedy is not None and math.isnan(prompt.greedy) else prompt.greedy
    return replace(prompt, rewards=[by if one is None else max(one, low) for one in prompt.rewards], greedy=greedy)


def _widened(row: EvaluationRow, *ends: EvaluationRow) -> EvaluationRow:
    """Return a row with intervals that hold those of the others."""

    def widened(part: str) -> dict[str, RateEstimate]:
        all_ = [getattr(end, part) for end in (row, *ends)]
        return {
            name: replace(one, low=min(each[name].low for each in all_), high=max(each[name].high for each in all_))
            for name, one in getattr(row, part).items()
        }

    return replace(row, **{part: widened(part) for part in ("estimates", "before", "difference")})  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Measured:
    """The metrics that one prompt has enough scored completions for, in the order of the table."""

    prompt: Attempts
    metrics: Mapping[str, float]

    @classmethod
    def of(cls, prompt: Attempts, ks: Sequence[int], correct_at: float) -> "_Measured":
        return cls(prompt, _metrics(prompt, ks, correct_at))


def _row(name: str, now: Sequence[_Measured], then: Sequence[_Measured]) -> EvaluationRow:
    rewards = [reward for one in now for reward in one.prompt.rewards]
    return EvaluationRow(
        name,
        len(now),
        len(rewards),
        rewards.count(None),
        _estimates(now),
        _estimates(then),
        _differences(now, then),
    )


def _names(measured: Sequence[_Measured]) -> list[str]:
    """Return the metrics in the order of the prompt that has most of them."""
    return max((list(one.metrics) for one in measured), key=len, default=[])


def _estimates(measured: Sequence[_Measured]) -> dict[str, RateEstimate]:
    return {
        name: rate_interval([one.metrics[name] for one in having], _completions(having, name))
        for name in _names(measured)
        if (having := [one for one in measured if name in one.metrics])
    }


def _differences(now: Sequence[_Measured], then: Sequence[_Measured]) -> dict[str, RateEstimate]:
    earlier = {one.prompt.id: one.metrics for one in then}
    found = {}
    for name in _names(now) if then else []:
        both = [one for one in now if name in one.metrics and name in earlier.get(one.prompt.id, {})]
        if both:
            values = [earlier[one.prompt.id][name] for one in both], [one.metrics[name] for one in both]
            found[name] = paired_difference(*values, _completions(both, name))
    return found


def _completions(measured: Sequence[_Measured], name: str) -> int:
    if name == GREEDY:
        return len(measured)
    return sum(reward is not None for one in measured for reward in one.prompt.rewards)


def _metrics(prompt: Attempts, ks: Sequence[int], correct_at: float) -> dict[str, float]:
    rewards = [reward for reward in prompt.rewards if reward is not None]
    metrics = {} if prompt.greedy is None else {GREEDY: float(prompt.greedy >= correct_at)}
    if not rewards:
        return metrics
    correct = [reward >= correct_at for reward in rewards]
    sampled = {"mean reward": sum(rewards) / len(rewards)}
    for k in sorted({1, *ks}):
        if k <= len(rewards):
            sampled[f"pass@{k}"] = pass_at_k(len(rewards), sum(correct), k)
            if k > 1 and prompt.answers is not None:
                answers = [a for a, r in zip(prompt.answers, prompt.rewards, strict=True) if r is not None]
                sampled[f"maj@{k}"] = maj_at_k(answers, correct, k)
    return sampled | metrics


_TAIL: Final = 0.025
"""The probability on each side of a 95 % interval."""
_NORMAL: Final = 1.959963984540054


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
