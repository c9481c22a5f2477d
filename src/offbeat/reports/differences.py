"""Is one configuration better than another? The difference of their final results, with its interval."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

from offbeat.reports.intervals import Interval, difference
from offbeat.reports.pools import SeedPool
from offbeat.reports.record import RunRecord
from offbeat.words import count, signed

FINAL: Final = 5
"""The final result is the mean of so many last evaluations or steps, or of half of them if there are fewer than ten."""


@dataclass(frozen=True)
class FinalResult:
    """How the final result of a run is computed, the same for all runs that are compared."""

    what: str
    unit: str
    last: int

    @classmethod
    def of(cls, runs: Sequence[RunRecord]) -> "FinalResult | None":
        """Use pass@1 if every run was evaluated after its first step, else the reward; None if a run has neither."""
        for what, unit in (("pass@1", "evaluation"), ("training reward", "step")):
            numbers = [len(cls(what, unit, FINAL)._points(run)) for run in runs]
            if min(numbers):
                return cls(what, unit, min(FINAL, max(1, min(numbers) // 2)))
        return None

    def _points(self, run: RunRecord) -> list[tuple[float, float]]:
        """Return each value with half the width of its interval, without the evaluation before the first step."""
        if self.what == "pass@1":
            steps, rates = run.history.pass_rates()
            return [(v, (high - low) / 2) for step, (v, low, high) in zip(steps, rates, strict=True) if step > 0]
        return [(value, 0.0) for value in run.history.series("reward_mean")[1]]

    def value(self, run: RunRecord) -> float:
        return fmean(value for value, _ in self._points(run)[-self.last :])

    def margin(self, run: RunRecord) -> float:
        """Half the 95 % interval over prompts; every evaluation asks the same ones, so a mean of them has no less."""
        return fmean(half for _, half in self._points(run)[-self.last :])

    def __str__(self) -> str:
        return (
            f"final = mean of the last {count(self.last, self.unit)}" if self.last > 1 else f"of the last {self.unit}"
        )


def differences(pools: Sequence[SeedPool[RunRecord]]) -> list[str]:
    """Compare every pool with the first one, a sentence for each; nothing if there is no result to compare."""
    final = FinalResult.of([run for pool in pools for run in pool.runs])
    return [] if final is None else [_statement(final, pools[0], other) for other in pools[1:]]


def _statement(final: FinalResult, base: SeedPool[RunRecord], other: SeedPool[RunRecord]) -> str:
    values, others = ([final.value(run) for run in pool.runs] for pool in (base, other))
    seeds = f"{len(others)} and {len(values)} seeds" if len(values) != len(others) else f"{len(values)} seeds each"
    if min(len(values), len(others)) > 1:
        return _sentence(final, base, other, difference(values, others), seeds)
    gap = fmean(others) - fmean(values)
    if len(values) == len(others) == 1 and final.what == "pass@1":
        half = math.hypot(final.margin(base.runs[0]), final.margin(other.runs[0]))
        over = "one run each: the interval is over prompts and says nothing about other seeds"
        return _sentence(final, base, other, Interval(gap, gap - half, gap + half, 1), over)
    runs = "one run each" if len(values) == len(others) else seeds
    return (
        f"{other.name} − {base.name} = {signed(gap, 3)} in {final.what} ({runs}; {final}). There is no interval: it "
        "needs at least two seeds of each."
    )


def _sentence(
    final: FinalResult, base: SeedPool[RunRecord], other: SeedPool[RunRecord], found: Interval, over: str
) -> str:
    mean, low, high = (signed(value, 3) for value in (found.mean, found.low, found.high))
    chance = " The interval includes 0: this may be chance." if found.low <= 0 <= found.high else ""
    return f"{other.name} − {base.name} = {mean} [{low}, {high}] in {final.what} ({over}; {final}).{chance}"
