"""What our own runs say about each objective under lag: the verdicts of docs/evidence.md, for `offbeat objectives`.

`measured_lag.json` is written by `python -m lab.learning.evidence.limits` from the runs of block a. A verdict about v
steps holds for the learning rate of its runs. What carries over to another rate is drift, so each one gives both.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal


@dataclass(frozen=True)
class MeasuredLag:
    """The verdict on one objective that trained with weights published every v steps, against v = 1.

    >>> print(MeasuredLag("grpo", "sums", 20, "fails", -0.05, -0.07, -0.03, rate=5e-4, drift=0.07, n=12))
    fails at v = 20: -0.050 [-0.070, -0.030], drift 0.070 at learning rate 0.0005 (sums)
    """

    preset: str
    task: str
    v: int
    verdict: Literal["tolerates", "fails", "undecided"]
    difference: float
    """Final pass rate minus that of v = 1, paired by seed; `low` and `high` are the limits of its interval."""
    low: float
    high: float
    rate: float
    """The learning rate, the best one at this v."""
    drift: float | None
    """The mean drift of the tokens that were trained on; None if the log-probs of its data were unknown."""
    n: int

    def __str__(self) -> str:
        words = {"tolerates": "tolerates", "fails": "fails at", "undecided": "undecided at"}
        drift = "" if self.drift is None else f"drift {self.drift:.3f} at "
        numbers = f"{self.difference:.3f} [{self.low:.3f}, {self.high:.3f}]"
        return f"{words[self.verdict]} v = {self.v}: {numbers}, {drift}learning rate {self.rate:g} ({self.task})"


@cache
def measured_lags() -> Mapping[str, Sequence[MeasuredLag]]:
    """Return the verdicts of each objective that was measured, by its name, the shortest lag first."""
    listed = json.loads(files("offbeat.objective").joinpath("measured_lag.json").read_text(encoding="utf-8"))
    found: dict[str, list[MeasuredLag]] = {}
    for one in sorted((MeasuredLag(**fields) for fields in listed), key=lambda one: one.v):
        found.setdefault(one.preset, []).append(one)
    return found


def tolerated_lag(measured: Sequence[MeasuredLag]) -> int:
    """Return the largest lag that an objective was measured to tolerate, in steps; 0 if none.

    Every task has to tolerate it, and every shorter lag that was measured.

    >>> one = MeasuredLag("grpo", "sums", 5, "tolerates", 0.0, -0.01, 0.01, 5e-4, 0.02, 12)
    >>> two = MeasuredLag("grpo", "sums", 20, "undecided", -0.03, -0.05, -0.01, 5e-4, 0.07, 12)
    >>> tolerated_lag([one, two])
    4
    """
    longest = 1
    for v in sorted({one.v for one in measured}):
        if any(one.verdict != "tolerates" for one in measured if one.v == v):
            break
        longest = v
    return longest - 1


def failing_drift(measured: Sequence[MeasuredLag]) -> float | None:
    """Return the smallest drift at which an objective was measured to fail; None if it never did."""
    return min((one.drift for one in measured if one.verdict == "fails" and one.drift is not None), default=None)
