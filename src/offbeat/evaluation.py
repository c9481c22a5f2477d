"""pass@1, pass@k and maj@k with bootstrap intervals, from attempts whoever made them: a model, a log, a checkpoint.

Intervals are over prompts: prompts are drawn again with replacement, each with all its attempts, because two answers to
one prompt tell less than answers to two. A completion that could not be scored is neither right nor wrong: it is left
out and counted.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.seeds import derive

Answers = Sequence[str | None] | None
Metric = Callable[[Sequence[float], Answers], float | None]
"""Of one prompt, from rewards and answers of its scored completions; None where they are too few."""

_SUBSETS: Final = 256
"""Draws of k answers that maj@k is averaged over, where there are more than so many."""


@dataclass(frozen=True)
class Attempts:
    """All that is known about one prompt."""

    id: str
    slice: str
    """Which row of the table it belongs to."""
    rewards: Sequence[float | None]
    """One per completion; None for one that could not be scored."""
    answers: Answers = None
    """Their final answers, for maj@k; None where nothing could be read, or as a whole where nobody looked."""


@dataclass(frozen=True)
class RateEstimate:
    """A mean over prompts, with its 95 % interval."""

    value: float
    low: float
    high: float
    prompts: int
    """With enough scored completions to count."""

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


@dataclass(frozen=True)
class EvaluationRow:
    """One slice of the table."""

    slice: str
    prompts: int
    completions: int
    unscorable: int
    estimates: Mapping[str, RateEstimate]
    """By metric: 'mean reward', 'pass@1', 'pass@8', 'maj@8'."""


def pass_at_k(scored: int, correct: int, k: int) -> float:
    """The chance that k of the completions, drawn without replacement, hold a correct one: 1 − C(n−c, k) / C(n, k).

    >>> pass_at_k(scored=4, correct=1, k=1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
    (0.25, 0.5, 1.0)
    """
    if not 0 <= correct <= scored or not 1 <= k <= scored:
        raise ValueError(f"pass@{k} of {scored} completions, {correct} of them correct, does not exist")
    return 1.0 - math.comb(scored - correct, k) / math.comb(scored, k)


def majority(answers: Sequence[str | None], correct: Sequence[bool]) -> float:
    """Whether the most frequent answer is right; tied answers share the vote, and no answer is no vote.

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
    """`majority` of k completions, averaged over the ways to draw them; over 256 random ones where there are more.

    >>> maj_at_k(["7", "7", "8"], [True, True, False], k=2)
    0.6666666666666666
    """
    places = range(len(answers))
    if math.comb(len(answers), k) <= _SUBSETS:
        draws: Iterable[Sequence[int]] = itertools.combinations(places, k)
    else:
        rng = random.Random(derive(0, "maj@k", len(answers), k))  # the same draws for every prompt and every run
        draws = [rng.sample(places, k) for _ in range(_SUBSETS)]
    found = [majority([answers[i] for i in draw], [correct[i] for i in draw]) for draw in draws]
    return sum(found) / len(found)


def bootstrap(values: Sequence[float], *, seed: int = 0, draws: int = 2_000, level: float = 0.95) -> RateEstimate:
    """The mean, and the percentile interval of means of resampled prompts.

    >>> bootstrap([0.0, 1.0] * 50).value
    0.5
    >>> str(bootstrap([1.0, 1.0, 1.0]))
    '1.000 [1.000, 1.000]'
    """
    given: NDArray[np.float64] = np.asarray(values, np.float64)
    rng = np.random.default_rng(derive(seed, "bootstrap"))
    means = np.array([given[rng.integers(0, len(given), len(given))].mean() for _ in range(draws)])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return RateEstimate(float(given.mean()), float(low), float(high), len(given))


def evaluate(
    attempts: Iterable[Attempts], ks: Sequence[int] = (), *, correct_at: float = 1.0, seed: int = 0
) -> list[EvaluationRow]:
    """The table: a row for all prompts, then one for each slice where there are several.

    >>> table = evaluate([Attempts("a", "easy", [1.0, 1.0]), Attempts("b", "hard", [0.0, None])])
    >>> [(row.slice, row.unscorable, row.estimates["pass@1"].value) for row in table]
    [('all', 1, 0.5), ('easy', 0, 1.0), ('hard', 1, 0.0)]

    Args:
        attempts: One for each prompt.
        ks: For pass@k and maj@k; a prompt with fewer scored completions does not count there.
        correct_at: The reward from which a completion counts as correct.
        seed: Of the bootstrap.
    """
    found = list(attempts)
    slices = sorted({one.slice for one in found})
    table = [_row("all", found, ks, correct_at, seed)]
    if len(slices) > 1:
        table += [_row(name, [one for one in found if one.slice == name], ks, correct_at, seed) for name in slices]
    return table


def _row(name: str, attempts: Sequence[Attempts], ks: Sequence[int], correct_at: float, seed: int) -> EvaluationRow:
    metrics: dict[str, Metric] = {"mean reward": _mean, "pass@1": partial(_pass, k=1, correct_at=correct_at)}
    for k in sorted(set(ks) - {1}):
        metrics[f"pass@{k}"] = partial(_pass, k=k, correct_at=correct_at)
        metrics[f"maj@{k}"] = partial(_maj, k=k, correct_at=correct_at)
    scored = [pair for pair in map(_scored, attempts) if pair[0]]
    estimates = {}
    for metric, of in metrics.items():
        values = [value for rewards, answers in scored if (value := of(rewards, answers)) is not None]
        if values:
            estimates[metric] = bootstrap(values, seed=seed)
    completions = sum(len(one.rewards) for one in attempts)
    unscorable = sum(reward is None for one in attempts for reward in one.rewards)
    return EvaluationRow(name, len(attempts), completions, unscorable, estimates)


def _scored(one: Attempts) -> tuple[list[float], list[str | None] | None]:
    """Rewards and answers of the completions that have a score."""
    rewards = [reward for reward in one.rewards if reward is not None]
    if one.answers is None:
        return rewards, None
    return rewards, [a for a, reward in zip(one.answers, one.rewards, strict=True) if reward is not None]


def _mean(rewards: Sequence[float], answers: Answers) -> float | None:
    return sum(rewards) / len(rewards)


def _pass(rewards: Sequence[float], answers: Answers, *, k: int, correct_at: float) -> float | None:
    correct = sum(reward >= correct_at for reward in rewards)
    return pass_at_k(len(rewards), correct, k) if k <= len(rewards) else None


def _maj(rewards: Sequence[float], answers: Answers, *, k: int, correct_at: float) -> float | None:
    if answers is None or k > len(rewards):
        return None
    return maj_at_k(answers, [reward >= correct_at for reward in rewards], k)
