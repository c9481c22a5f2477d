"""The finished cells of the evidence: one line of `lab/learning/evidence/<block>.jsonl` for each run."""

import json
from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Final, NotRequired, TypedDict

from lab.learning.rows import LEARNING

KEPT: Final = LEARNING / "evidence"
EVERY: Final = 5
"""Steps between two evaluations."""
LAST: Final = 5
"""Evaluations whose mean is the final pass rate."""
COSINE: Final = "cosine"
"""Between the gradient of a step and that of the exact pass rate of its prompts; for arms that ask for it."""


CYCLE: Final = ("gate_stopped_gradient", "ess", "drift_tv_token", "drift_tv_sequence", "drift_step", COSINE)
"""The metrics of which a run keeps two means. `drift_tv_sequence` is also 1 − E min(1, ρ), ρ = π_k(y)/α(y): both are
the mean of (1 − ρ)₊."""
ByCycle = dict[str, tuple[float, float]]
"""The mean over all steps that have the metric, and over the last step before each publish."""


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
    by_cycle: NotRequired[ByCycle]
    """`CYCLE`; the first cells did not keep it."""
    kl: NotRequired[list[float]]
    """Exact KL(π ‖ π_0) at each evaluation, for arms that ask for it. After a collapse the last one is repeated."""
    seconds: float
    commit: str
    stopped: str
    """Why the run ended early, or empty."""


Key = tuple[str, float, int]
"""Arm, learning rate, seed."""
Done = Mapping[Key, EvidenceRow]
Measure = Callable[[EvidenceRow], float]


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
