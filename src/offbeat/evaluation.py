"""pass@1, pass@k and maj@k with bootstrap intervals, from the attempts of a model, a log or a checkpoint.

Intervals are over prompts: the bootstrap resamples prompts, each with all its attempts, because two answers to one
prompt say less than answers to two prompts. A completion that could not be scored is neither right nor wrong: it is
left out and counted.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.seeds import derive

_SUBSETS: Final = 256
"""The most draws of k answers that maj@k averages over."""


@dataclass(frozen=True)
class Attempts:
    """The completions of one prompt."""

    id: str
    slice: str
    """The row of the table it belongs to."""
    rewards: Sequence[float | None]
    """One per completion; None if it could not be scored."""
    answers: Sequence[str | None] | None = None
    """Their final answers, for maj@k; an entry is None if the completion has no answer."""


@dataclass(frozen=True)
class RateEstimate:
    """A mean over prompts with a bootstrap interval."""

    value: float
    low: float
    high: float
    prompts: int
    """Prompts with enough scored completions to count."""

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
    """By metric, for instance 'mean reward', 'pass@1', 'pass@8', 'maj@8'."""


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


def bootstrap(values: Sequence[float], *, seed: int = 0, draws: int = 2_000, level: float = 0.95) -> RateEstimate:
    """Return the mean, and the percentile interval of the means of resampled prompts.

    >>> bootstrap([0.0, 1.0] * 50).value
    0.5
    >>> str(bootstrap([1.0, 1.0, 1.0]))
    '1.000 [1.000, 1.000]'
    """
    samples: NDArray[np.float64] = np.asarray(values, np.float64)
    rng = np.random.default_rng(derive(seed, "bootstrap"))
    means = np.array([samples[rng.integers(0, len(samples), len(samples))].mean() for _ in range(draws)])
    low, high = np.quantile(means, [(1 - level) / 2, (1 + level) / 2])
    return RateEstimate(float(samples.mean()), float(low), float(high), len(samples))


def evaluate(
    attempts: Iterable[Attempts], ks: Sequence[int] = (), *, correct_at: float = 1.0, seed: int = 0
) -> list[EvaluationRow]:
    """Make the table: a row for all prompts, then a row for each slice if there are several.

    >>> table = evaluate([Attempts("a", "easy", [1.0, 1.0]), Attempts("b", "hard", [0.0, None])])
    >>> [(row.slice, row.unscorable, row.estimates["pass@1"].value) for row in table]
    [('all', 1, 0.5), ('easy', 0, 1.0), ('hard', 1, 0.0)]

    Args:
        attempts: One entry per prompt.
        ks: The k of pass@k and maj@k; a prompt with fewer scored completions does not count.
        correct_at: A completion with at least this reward counts as correct.
        seed: Seed of the bootstrap.
    """
    prompts = list(attempts)
    slices = sorted({prompt.slice for prompt in prompts})
    table = [_row("all", prompts, ks, correct_at, seed)]
    if len(slices) > 1:
        table += [_row(name, [p for p in prompts if p.slice == name], ks, correct_at, seed) for name in slices]
    return table


def _row(name: str, prompts: Sequence[Attempts], ks: Sequence[int], correct_at: float, seed: int) -> EvaluationRow:
    per_prompt = [_metrics(prompt, ks, correct_at) for prompt in prompts]
    at_k = [f"{metric}@{k}" for k in sorted(set(ks) - {1}) for metric in ("pass", "maj")]
    estimates = {
        metric: bootstrap(values, seed=seed)
        for metric in ("mean reward", "pass@1", *at_k)
        if (values := [metrics[metric] for metrics in per_prompt if metric in metrics])
    }
    rewards = [reward for prompt in prompts for reward in prompt.rewards]
    return EvaluationRow(name, len(prompts), len(rewards), rewards.count(None), estimates)


def _metrics(prompt: Attempts, ks: Sequence[int], correct_at: float) -> dict[str, float]:
    """Return the metrics that one prompt has enough scored completions for."""
    rewards = [reward for reward in prompt.rewards if reward is not None]
    if not rewards:
        return {}
    correct = [reward >= correct_at for reward in rewards]
    metrics = {"mean reward": sum(rewards) / len(rewards)}
    for k in {1, *ks}:
        if k <= len(rewards):
            metrics[f"pass@{k}"] = pass_at_k(len(rewards), sum(correct), k)
            if k > 1 and prompt.answers is not None:
                answers = [a for a, r in zip(prompt.answers, prompt.rewards, strict=True) if r is not None]
                metrics[f"maj@{k}"] = maj_at_k(answers, correct, k)
    return metrics
