"""Claims about the cells of a block, and how they are judged: paired by seed, all claims of a block by Holm's rule."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from lab.figures import Figure
from lab.learning.evidence.blocks import Block
from lab.learning.evidence.rows import Done, EvidenceRow, final
from lab.learning.statistics import Interval, holm_levels, p_value

UNDECIDED: Final = "undecided"


@dataclass(frozen=True)
class Paired:
    """One arm minus another, seed by seed."""

    arms: tuple[str, str]
    values: Sequence[float]
    """One difference for each seed."""


@dataclass(frozen=True)
class Claim:
    """A statement about paired differences, with the words for each outcome."""

    id: str
    what: str
    rule: str
    paired: Paired
    edges: tuple[float, ...]
    """One margin, which the interval has to lie above or below; or two, between which it has to lie."""
    above: str
    """The verdict if the interval lies above the margin, or between the margins."""
    below: str
    """The verdict if it lies below the margin, or outside of both."""
    note: str
    shown: Callable[[float], float] = float
    """From the scale of the values to the one that is reported."""
    below_edge: float | None = None
    """The margin below which `below` is decided, if it is not the one above which `above` is."""

    @property
    def values(self) -> Sequence[float]:
        return self.paired.values

    def p_value(self) -> float:
        """Return how surprising the values would be if the truth were at the margin that is nearest to a decision."""
        edges = self.edges if self.below_edge is None else (*self.edges, self.below_edge)
        found = [p_value(self.values, edge) for edge in edges]
        inside = len(self.edges) == 2 and self.edges[0] < fmean(self.values) < self.edges[1]
        return max(found) if inside else min(found)

    def judge(self, level: float) -> "Verdict":
        """Decide at the level that Holm's rule gives this claim."""
        interval = Interval.of(self.values, level)
        first, last = self.edges[0], self.edges[-1]
        if len(self.edges) == 1:
            limit = first if self.below_edge is None else self.below_edge
            word = self.above if interval.low > first else self.below if interval.high < limit else UNDECIDED
        elif first < interval.low and interval.high < last:
            word = self.above
        else:
            word = self.below if interval.low > last or interval.high < first else UNDECIDED
        return Verdict(self, word, interval, level)


@dataclass(frozen=True)
class Verdict:
    """What was decided about a claim."""

    claim: Claim
    word: str
    interval: Interval
    level: float
    before: str = ""
    """What the same rule says with rates tuned by area, if that is something else."""

    @property
    def holds(self) -> bool:
        return self.word == self.claim.above

    @property
    def numbers(self) -> str:
        mean = self.claim.shown(self.interval.mean)
        low, high = sorted(map(self.claim.shown, (self.interval.low, self.interval.high)))  # a scale may be reversed
        return f"{mean:.3f} [{low:.3f}, {high:.3f}]"

    def figure(self) -> Figure:
        """Return the row of this verdict."""
        claim = self.claim
        why = "" if self.holds else f"{'the interval holds the margin' if self.word == UNDECIDED else self.word}; "
        return Figure(
            claim.id,
            claim.what,
            claim.rule,
            f"{self.word}: {self.numbers}",
            "",
            self.holds,
            len(claim.values),
            f"{why}{claim.note}{self.before}; interval at level {self.level:.4f} by Holm's rule",
        )


def judge(claims: Sequence[Claim]) -> list[Verdict]:
    """Decide all claims of a block together, by Holm's rule."""
    levels = holm_levels([claim.p_value() for claim in claims])
    return [claim.judge(level) for claim, level in zip(claims, levels, strict=True)]


def beside_before(verdicts: Sequence[Verdict], before: Sequence[Verdict]) -> list[Verdict]:
    """Return the verdicts, each with the one of `before`, by rates tuned by area, if that has another word or mean."""
    previous = {verdict.claim.id: f"{verdict.interval.mean:+.3f}, {verdict.word}" for verdict in before}
    found = []
    for verdict in verdicts:
        said = previous[verdict.claim.id]
        same = said == f"{verdict.interval.mean:+.3f}, {verdict.word}"
        found.append(verdict if same else replace(verdict, before=f"; with rates tuned by area: {said}"))
    return found


@dataclass(frozen=True)
class Cells:
    """The cells of a block, by arm."""

    block: Block
    done: Done

    def of(self, arm: str) -> list[EvidenceRow]:
        """Return the reported seeds at the arm's own learning rate."""
        rate = self.block.best_rate(arm, self.done)
        return [self.done[arm, rate, seed] for seed in range(1, self.block.seeds + 1)]

    def apart(self, arm: str, other: str, of: Callable[[EvidenceRow], float] = final) -> Paired:
        """Return one arm minus another, seed by seed."""
        pairs = zip(self.of(arm), self.of(other), strict=True)
        return Paired((arm, other), [of(one) - of(two) for one, two in pairs])

    def drift(self, arm: str) -> float | None:
        """Return the mean drift of an arm's runs; None if the log-probs of their data are unknown."""
        drifts = [row["drift"] for row in self.of(arm) if row["drift"] is not None]
        return fmean(drifts) if drifts else None

    def describe(self, *arms: str) -> str:
        """Give learning rate, final pass rate, drift and lag of each arm."""
        found = []
        for arm in arms:
            rows = self.of(arm)
            drift = "" if (mean_drift := self.drift(arm)) is None else f", drift {mean_drift:.3f}"
            stopped = sum(bool(row["stopped"]) for row in rows)
            ended = f", {stopped} of {len(rows)} runs collapsed" if stopped else ""
            mean = Interval.of([final(row) for row in rows])
            lag = fmean(row["lag"] for row in rows)
            found.append(f"{arm}: {mean} at lr {rows[0]['rate']:g}, mean lag {lag:.1f}{drift}{ended}")
        return "; ".join(found)
