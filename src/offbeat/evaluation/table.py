"""pass@1, pass@k and maj@k with 95 % intervals, from the attempts of a model, a log or a checkpoint.

Intervals are over prompts, because two answers to one prompt say less than answers to two prompts (`intervals.py`). A
completion that could not be scored is neither right nor wrong: it is left out and counted.
"""

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from offbeat.evaluation.intervals import RateEstimate, paired_difference, rate_interval
from offbeat.seeds import derive

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
    """One per completion; None if it could not be scored."""
    answers: Sequence[str | None] | None = None
    """Their final answers, for maj@k; an entry is None if the completion has no answer."""
    greedy: float | None = None
    """The reward of one more completion, generated greedily; None if there is none or it could not be scored."""


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
    now = [_Measured.of(one, ks, correct_at) for one in attempts]
    then = [_Measured.of(one, ks, correct_at) for one in before]
    slices = sorted({one.prompt.slice for one in now})
    rows = [_row("all", now, then)]
    if len(slices) > 1:
        rows += [_row(name, *([m for m in side if m.prompt.slice == name] for side in (now, then))) for name in slices]
    return [replace(row, held_out=held_out) for row in rows]


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
