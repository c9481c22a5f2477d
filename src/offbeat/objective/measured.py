"""What our own runs say about each objective under lag: the verdicts of docs/evidence.md, each with its row.

`measured_lag.json` is written by `python -m lab.learning.evidence.limits` from the finished runs. A verdict about v
steps holds for the learning rate and the size of model of its runs. Each one gives the drift as well. That says more
than steps do, but not what lag costs another task or model.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Literal

from offbeat.types import Json


@dataclass(frozen=True, eq=False)
class MeasuredLag:
    """The verdict on one objective that trained with weights published every v steps, or with replay, against v = 1.

    >>> print(MeasuredLag("grpo", "sums", 20, "fails", -0.05, -0.07, -0.03, rate=5e-4, drift=0.07, n=12, row="a.v20"))
    fails at v = 20: -0.050 [-0.070, -0.030], drift 0.070 at learning rate 0.0005 (sums, a.v20)
    """

    preset: str
    task: str
    """What was learned, or the model that learned it."""
    v: int
    verdict: Literal["tolerates", "fails", "undecided"]
    difference: float
    """Final pass rate minus that of v = 1, paired by seed; `low` and `high` are the limits of its interval."""
    low: float
    high: float
    rate: float
    """The learning rate; on the sums the best one at this v."""
    drift: float | None
    """The mean drift of the tokens that were trained on; None if the log-probs of its data were unknown."""
    n: int
    row: str
    """The id of its row of figures."""
    parameters: int = 90_000
    """Parameters of the model."""
    changes: Mapping[str, Json] = field(default_factory=dict)
    """Settings of [objective] beside the preset."""
    replay: bool = False
    """True if half of every batch was replayed, and v is 1."""

    @property
    def plain(self) -> bool:
        """True if it is about the preset as published, with fresh groups."""
        return not self.changes and not self.replay

    def __str__(self) -> str:
        words = {"tolerates": "tolerates v = {}", "fails": "fails at v = {}", "undecided": "is undecided at v = {}"}
        if self.replay:
            words = {
                "tolerates": "tolerates replay",
                "fails": "fails with replay",
                "undecided": "is undecided with replay",
            }
        drift = "" if self.drift is None else f"drift {self.drift:.3f} at "
        numbers = f"{self.difference:.3f} [{self.low:.3f}, {self.high:.3f}]"
        settings = "".join(f", {name} = {value}" for name, value in self.changes.items())
        return (
            f"{words[self.verdict].format(self.v)}: {numbers}, {drift}learning rate {self.rate:g} "
            f"({self.task}{settings}, {self.row})"
        )


@cache
def measured_lags() -> Mapping[str, Sequence[MeasuredLag]]:
    """Return all verdicts by the name of their preset, the shortest lag first."""
    listed = json.loads(files("offbeat.objective").joinpath("measured_lag.json").read_text(encoding="utf-8"))
    found: dict[str, list[MeasuredLag]] = {}
    for one in sorted((MeasuredLag(**fields) for fields in listed), key=lambda one: one.v):
        found.setdefault(one.preset, []).append(one)
    return found


def failing_drift(measured: Sequence[MeasuredLag]) -> float | None:
    """Return the smallest drift at which an objective was measured to fail; None if it never did.

    A failure at a drift that another task tolerates says nothing about drift, and does not count.
    """
    tolerated = max((one.drift or 0.0 for one in measured if one.verdict == "tolerates"), default=0.0)
    drifts = [one.drift for one in measured if one.verdict == "fails" and one.drift is not None]
    return min((drift for drift in drifts if drift > tolerated), default=None)
