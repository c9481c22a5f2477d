"""The data of the learning figures: one line of `lab/learning/cells.jsonl` for every run."""

import json
from pathlib import Path
from statistics import fmean
from typing import Final, NotRequired, TypedDict

LEARNING: Final = Path(__file__).resolve().parent
CELLS: Final = LEARNING / "cells.jsonl"
RATES: Final = (2.5e-4, 5e-4, 1e-3)
TUNING: Final = (101, 102)
REPORTED: Final = (1, 2, 3, 4, 5)
MORE_SEEDS: Final = tuple(range(6, 16))
BUDGETS: Final = (0.05, 0.1)
"""Drift budgets, as mean per-token TV."""

Key = tuple[str, float, int]
"""Arm, learning rate, seed."""


class Promised(TypedDict):
    """What a batch promises of a publish, each as value and standard error, and the realized gain."""

    gain: list[float]
    normalized: list[float]
    """`predicted_gain` of a run: ratios divided by their sum in each group, bias removed by the jackknife."""
    bound_paper: list[float]
    bound_tight: list[float]
    realised: list[float]
    """The exact gain, over all sums."""
    own: list[float]
    """The exact gain over the sums of the batch. Prompts are drawn without replacement, so these are sums that were not
    trained on lately."""


class Published(TypedDict):
    """One published version."""

    step: int
    bytes: int
    unseen: NotRequired[Promised]
    """Computed before the step, on the batch that is about to be trained."""
    seen: NotRequired[Promised]
    """Computed after the step, on the batch that the published policy has just trained on."""


class ByLag(TypedDict, total=False):
    """Means over the steps that had tokens of this lag."""

    steps: int
    gate_stopped_up: float
    gate_stopped_down: float
    drift_tv_token: float
    drift_tv_sequence: float
    ess: float


class Row(TypedDict):
    """One run."""

    arm: str
    rate: float
    seed: int
    steps: int
    final: float
    """Pass rate: mean of the last evaluations."""
    curve: dict[str, float]
    """Pass rate by step."""
    publishes: int
    published: list[Published]
    drift: list[float | None]
    """By step: drift from the version published last, which the cadence uses; None without tokens of that version."""
    by_lag: dict[str, ByLag]
    groups: int
    """Fresh groups that were trained."""
    alarms: int
    seconds: dict[str, float]
    """Seconds by phase of the loop."""
    stopped: NotRequired[str]
    """Why the run ended early, or empty. After an early end, `final` is the last evaluation."""


def rows() -> dict[Key, Row]:
    """Return the finished cells."""
    lines = CELLS.read_text(encoding="utf-8").splitlines() if CELLS.exists() else []
    return {key(row): row for row in map(json.loads, lines)}


def key(row: Row) -> Key:
    return row["arm"], row["rate"], row["seed"]


def keep(row: Row) -> None:
    """Append a row to the file."""
    with CELLS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(_rounded(row)) + "\n")


def _rounded(value: object) -> object:
    """Round to six decimals: more than seeds agree on, and the file is a third smaller."""
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [_rounded(one) for one in value]
    return round(value, 6) if isinstance(value, float) else value


def best_rate(arm: str, done: dict[Key, Row]) -> float:
    """Return the learning rate that does best on the tuning seeds alone."""

    def final(rate: float) -> float:
        return fmean(done[arm, rate, seed]["final"] for seed in TUNING)

    return max((rate for rate in RATES if all((arm, rate, seed) in done for seed in TUNING)), key=final)


def promising(arm: str, done: dict[Key, Row]) -> list[float]:
    """Return the rates that get a second tuning seed: all but the worst on the first."""
    return sorted(RATES, key=lambda rate: -done[arm, rate, TUNING[0]]["final"])[:-1]
