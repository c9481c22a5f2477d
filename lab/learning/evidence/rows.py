"""The finished cells of the evidence: one line of `lab/learning/evidence/<block>.jsonl` for each run."""

import json
from collections.abc import Mapping
from statistics import fmean
from typing import Final, NotRequired, TypedDict

from lab.learning.rows import LEARNING

KEPT: Final = LEARNING / "evidence"
EVERY: Final = 5
"""Steps between two evaluations."""
LAST: Final = 5
"""Evaluations whose mean is the final pass rate."""


class EvidenceRow(TypedDict):
    """One run."""

    arm: str
    rate: float
    seed: int
    curve: list[float]
    """Exact pass rate every five steps, from step 0. After a collapse the last one is repeated."""
    groups: list[int]
    """Groups generated until each of these steps."""
    publishes: int
    published: NotRequired[list[int]]
    """Steps of the publishes, without the first one; kept where the question is when to publish."""
    drift: float | None
    """Mean drift of the groups that were trained on; None if their log-probs are unknown."""
    lag: float
    """Mean lag of the groups that were trained on."""
    seconds: float
    commit: str
    stopped: str
    """Why the run ended early, or empty."""


Key = tuple[str, float, int]
"""Arm, learning rate, seed."""
Done = Mapping[Key, EvidenceRow]


def final(row: EvidenceRow) -> float:
    """Return the mean of the last evaluations."""
    return fmean(row["curve"][-LAST:])


def area(row: EvidenceRow) -> float:
    """Return the mean of all evaluations."""
    return fmean(row["curve"])


def rows(block: str) -> dict[Key, EvidenceRow]:
    """Return the finished cells of a block."""
    file = KEPT / f"{block}.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {(row["arm"], row["rate"], row["seed"]): row for row in map(json.loads, lines)}


def keep(block: str, row: EvidenceRow) -> None:
    """Append a finished cell."""
    with (KEPT / f"{block}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
