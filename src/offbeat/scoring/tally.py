"""What a scoring pool remembers: counts, the slowest, the failing, and whether too many fail. No clock, no I/O."""

import heapq
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from offbeat.types import Score, Unscorable


@dataclass(frozen=True)
class Scored:
    """One completion that went through the pool."""

    of: str
    """What the caller called it."""
    text: str
    """Its beginning."""
    seconds: float
    outcome: Score | Unscorable

    def __str__(self) -> str:
        said = self.outcome
        result = f"{said.reason}: {said.detail}" if isinstance(said, Unscorable) else f"reward {said.reward:g}"
        return f"{self.of or '(unnamed)'} after {self.seconds:.2f} s, {result}; it begins {self.text!r}"


@dataclass(frozen=True)
class PoolReport:
    """A pool's work so far."""

    scored: int
    unscorable: Mapping[str, int]
    """By reason."""
    restarts: int
    slowest: tuple[Scored, ...]
    """The slowest first."""
    failing: tuple[Scored, ...]
    """The last that got no score, the latest last."""


@dataclass(frozen=True)
class FailureLimit:
    """How many completions may go without a score before something is wrong with the scoring itself.

    >>> limit = FailureLimit(share=0.25, window=200, least=50)
    """

    share: float = 0.25
    """Of the window; 1 never stops."""
    window: int = 200
    """The last completions looked at."""
    least: int = 50
    """Completions before a verdict."""


@dataclass
class ScoringTally:
    """Counts what it is told.

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
    """Entries of each list."""
    restarts: int = 0
    _scored: int = 0
    _reasons: Counter[str] = field(default_factory=Counter)
    _slowest: list[tuple[float, int, Scored]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._recent: deque[bool] = deque(maxlen=self.limit.window)
        self._failing: deque[Scored] = deque(maxlen=self.kept)

    def add(self, entry: Scored) -> None:
        """One completion has ended."""
        failed = isinstance(entry.outcome, Unscorable)
        self._recent.append(failed)
        if isinstance(entry.outcome, Unscorable):
            self._reasons[entry.outcome.reason] += 1
            self._failing.append(entry)
        else:
            self._scored += 1
        place = (entry.seconds, -self._scored - self._reasons.total(), entry)
        if len(self._slowest) < self.kept:
            heapq.heappush(self._slowest, place)
        elif place > self._slowest[0]:
            heapq.heapreplace(self._slowest, place)

    @property
    def failure_share(self) -> float:
        """Of the last completions, those without a score."""
        return sum(self._recent) / max(1, len(self._recent))

    @property
    def too_many(self) -> bool:
        """Whether the limit is passed."""
        return len(self._recent) >= self.limit.least and self.failure_share > self.limit.share

    def report(self) -> PoolReport:
        """What is known now."""
        slowest = tuple(entry for _, _, entry in sorted(self._slowest, reverse=True))
        return PoolReport(self._scored, dict(self._reasons), self.restarts, slowest, tuple(self._failing))
