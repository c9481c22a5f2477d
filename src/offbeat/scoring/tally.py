"""The statistics of a scoring pool and its limit on failures. No clock, no I/O."""

import heapq
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from offbeat.errors import PoolError
from offbeat.types import Group, Score, Unscorable

OutcomeCount = tuple[int, str, int]
"""A policy version, what became of completions that it wrote, and how many: 'scored', or 'answer timeout', 'grader
sandbox' and so on, with who is to blame and the reason. Plain values, because it travels between processes."""
SCORED: Final = "scored"


def failure_of(score: Score | Unscorable | None) -> str:
    """Return why the scoring of a completion failed, by its own fault or not; empty if it did not fail.

    >>> failure_of(Score(0.0, {"unscorable.crash": 0.0})), failure_of(Unscorable("timeout")), failure_of(Score(1.0))
    ('crash', 'timeout', '')
    """
    return score.reason if isinstance(score, Unscorable) else score.fault if isinstance(score, Score) else ""


def caused_by_answer(score: Score | Unscorable) -> bool:
    """Return True if the scoring failed by the answer's fault, or on a right answer: the grader works for others."""
    return score.blame != "grader" if isinstance(score, Unscorable) else bool(score.fault)


def count_outcomes(groups: Sequence[Group]) -> list[OutcomeCount]:
    """Count what became of the completions of groups, by the oldest version that wrote any of them; -1 if none did."""
    found = Counter[tuple[int, str]]()
    for group in groups:
        version = -1 if group.oldest_version is None else group.oldest_version
        for score in (completion.score for completion in group.completions):
            reason = failure_of(score)
            blame = score.blame if isinstance(score, Unscorable) else "answer"
            found[version, f"{blame} {reason}" if reason else SCORED] += 1
    return [(version, what, count) for (version, what), count in sorted(found.items())]


@dataclass(frozen=True)
class Scored:
    """A completion that went through the pool."""

    of: str
    """The name that the caller gave it."""
    text: str
    """The beginning of its text."""
    seconds: float
    outcome: Score | Unscorable
    cpu: float = 0.0
    """Seconds that workers computed for it, its controls included."""
    why: str = ""
    """The error behind a score that an answer got because it made its scoring fail."""
    controlled: bool = True
    """False if no control has failed, so that the failure says nothing about the grader."""

    def __str__(self) -> str:
        out = self.outcome
        result = f"{out.reason}: {out.detail}" if isinstance(out, Unscorable) else f"reward {out.reward:g}"
        if isinstance(out, Score) and out.fault:
            result += f" because the answer made its scoring fail ({out.fault}: {self.why})"
        return f"{self.of or '(unnamed)'} after {self.seconds:.2f} s, {result}; it begins {self.text!r}"


@dataclass(frozen=True)
class PoolReport:
    """The work of a pool so far."""

    scored: int
    unscorable: Mapping[str, int]
    """Counts by reason, without those that the answer caused."""
    answer_faults: Mapping[str, int]
    """Completions that made their own scoring fail: counts by reason."""
    restarts: int
    slowest: tuple[Scored, ...]
    """The slowest first."""
    failing: tuple[Scored, ...]
    """The most recent completions whose scoring failed, the latest last."""


@dataclass(frozen=True)
class FailureLimit:
    """The share of completions without a score above which the scoring itself counts as broken.

    Only failures whose controls failed as well count (`blame.py`): otherwise a policy could stop the run.
    """

    share: float = 0.25
    """The largest allowed share of the window; 1 never stops the pool."""
    window: int = 200
    """The number of most recent completions to look at."""
    least: int = 50
    """Below this number of completions the limit does not apply."""
    none: int = 16
    """It applies to so many completions if not one of them has a score: then the reward function does not work."""


class TooManyFailures(PoolError):
    """More completions than allowed got no score: the scoring is broken, not the answers."""

    examples: tuple[Scored, ...] = ()

    @classmethod
    def of(cls, tally: "ScoringTally") -> "TooManyFailures":
        """Make the error with the most recent failures as examples."""
        examples = tally.report().failing
        shown = "\n".join(f"  {entry}" for entry in examples[-5:])
        latest = [entry.outcome.detail for entry in examples if isinstance(entry.outcome, Unscorable)][-1]
        error = cls(
            f"{latest}\n"
            f"{tally.failure_share:.1%} of the last completions (at most {tally.limit.window}) could not be scored, "
            f"but only {tally.limit.share:.1%} are allowed; the last of them:\n{shown}\n"
            "Fix the reward function, or raise the task's deadline or the failure limit"
        )
        error.examples = examples
        return error


@dataclass
class ScoringTally:
    """Counts outcomes and keeps the slowest and the failing completions.

    >>> tally = ScoringTally(FailureLimit(share=0.5, window=4, least=2))
    >>> tally.add(Scored("g1/0", "42", 0.01, Score(1.0)))
    >>> tally.add(Scored("g1/1", "7" * 9, 2.0, Unscorable("timeout", "stopped after 2 s")))
    >>> tally.failure_share, tally.too_many
    (0.5, False)
    >>> tally.add(Scored("g1/2", "8" * 9, 2.0, Unscorable("timeout", "stopped after 2 s")))
    >>> tally.too_many
    True
    """

    limit: FailureLimit = field(default_factory=FailureLimit)
    kept: int = 10
    """The length of each list in the report."""
    _scored: int = 0
    _reasons: Counter[str] = field(default_factory=Counter)
    _faults: Counter[str] = field(default_factory=Counter)
    _slowest: list[tuple[float, int, Scored]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._added = 0
        self._recent_failures: deque[bool] = deque(maxlen=self.limit.window)
        self._failing: deque[Scored] = deque(maxlen=self.kept)

    def add(self, entry: Scored) -> None:
        outcome, reason = entry.outcome, failure_of(entry.outcome)
        by_grader = bool(reason) and not caused_by_answer(outcome)
        self._recent_failures.append(by_grader and entry.controlled)
        if reason:
            (self._reasons if by_grader else self._faults)[reason] += 1
            self._failing.append(entry)
        self._scored += isinstance(outcome, Score)
        self._added += 1
        item = (entry.seconds, -self._added, entry)  # of equally slow ones, keep the first
        if len(self._slowest) < self.kept:
            heapq.heappush(self._slowest, item)
        elif item > self._slowest[0]:
            heapq.heapreplace(self._slowest, item)

    @property
    def failure_share(self) -> float:
        """The share of completions in the window without a score that is the grader's fault."""
        return sum(self._recent_failures) / max(1, len(self._recent_failures))

    @property
    def too_many(self) -> bool:
        enough = self.limit.least if self._scored else min(self.limit.none, self.limit.least)
        return len(self._recent_failures) >= enough and self.failure_share > self.limit.share

    def report(self, restarts: int = 0) -> PoolReport:
        """Return a snapshot; the pool adds how often it replaced a worker."""
        slowest = tuple(entry for _, _, entry in sorted(self._slowest, reverse=True))
        return PoolReport(
            self._scored, dict(self._reasons), dict(self._faults), restarts, slowest, tuple(self._failing)
        )
