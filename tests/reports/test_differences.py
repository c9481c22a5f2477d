"""Is one configuration better than another? Named runs, pooled seeds, and the sentence about their difference."""

from pathlib import Path

import pytest

from offbeat.config import parse
from offbeat.errors import RunError
from offbeat.evaluation import difference, student_t
from offbeat.reports.comparison import SeedPool, differences, name_runs
from offbeat.reports.history import EvaluationPoint, RunHistory, RunState, StepRecord
from offbeat.reports.record import RunRecord


def record(rates: list[float], half: float = 0.05) -> RunRecord:
    """Make a run with an evaluation before its first step and one at each step after."""
    points = [EvaluationPoint(n, {"pass@1": (r, r - half, r + half)}, 64) for n, r in enumerate([0.1, *rates])]
    steps = [StepRecord(n, {"reward_mean": r}, {}, [], {}) for n, r in enumerate(rates, start=1)]
    history = RunHistory(steps=steps, evaluations=points if half else [])
    return RunRecord("run", Path("run"), parse({}), {}, history, RunState.FINISHED, None)


def compared(*pools: list[RunRecord]) -> list[str]:
    return differences([SeedPool(name, runs) for name, runs in zip(("baseline", "mine", "other"), pools, strict=False)])


def test_a_difference_over_seeds_has_the_interval_of_welch() -> None:
    # by hand: variances 0.00025 and 0.00045, standard error 0.01183, 7.4 degrees of freedom, t of 7 is 2.365
    found = difference([0.50, 0.52, 0.54, 0.51, 0.53], [0.60, 0.55, 0.58, 0.57, 0.60])
    assert found.mean == pytest.approx(0.06) and found.low == pytest.approx(0.06 - 2.365 * 0.01183, abs=1e-5)
    assert found.high == pytest.approx(0.06 + 2.365 * 0.01183, abs=1e-5)


def test_the_sentence_names_the_measure_the_seeds_and_what_final_means() -> None:
    base = [record([value] * 10) for value in (0.50, 0.52, 0.54, 0.51, 0.53)]
    mine = [record([value] * 10) for value in (0.60, 0.55, 0.58, 0.57, 0.60)]
    [sentence] = compared(base, mine)
    assert sentence.startswith("mine − baseline = +0.060 [+0.0")
    assert sentence.endswith("in pass@1 (5 seeds each; final = mean of the last 5 evaluations).")
    assert len(compared(base, mine, mine)) == 2


def test_an_interval_that_includes_0_says_so() -> None:
    [sentence] = compared([record([0.5] * 10), record([0.7] * 10)], [record([0.6] * 10), record([0.65] * 10)])
    assert "The interval includes 0: this may be chance." in sentence


def test_the_evaluation_before_the_first_step_is_no_final_result() -> None:
    [sentence] = compared([record([0.5])], [record([0.9])])
    assert "mine − baseline = +0.400" in sentence and "of the last evaluation" in sentence


def test_one_run_each_has_an_interval_over_prompts_only() -> None:
    [sentence] = compared([record([0.5] * 10)], [record([0.9] * 10)])
    assert "= +0.400 [+0.329, +0.471] in pass@1 (one run each: the interval is over prompts" in sentence


def test_without_evaluations_and_seeds_there_is_no_interval() -> None:
    [sentence] = compared([record([0.5] * 10, half=0)], [record([0.9] * 10, half=0)])
    assert (
        "+0.400 in training reward (one run each; final = mean of the last 5 steps). There is no interval" in sentence
    )


def test_students_t_falls_with_the_degrees_of_freedom() -> None:
    values = [student_t(n) for n in range(1, 200)]
    assert values == sorted(values, reverse=True) and values[-1] == pytest.approx(1.972, abs=1e-3)


PATHS = [Path("runs/a"), Path("runs/b"), Path("runs/c")]
CONFIGS = [parse({"seed": 0}), parse({"seed": 1}), parse({"seed": 0, "group_size": 4})]


def test_names_are_given_by_run_or_by_configuration() -> None:
    assert name_runs(PATHS, CONFIGS, []) == ["a", "b", "c"]
    assert name_runs(PATHS, CONFIGS, ["baseline", "mine"]) == ["baseline", "baseline", "mine"]
    assert name_runs(PATHS, CONFIGS, ["x", "", "mine"]) == ["x", "b", "mine"]
    assert name_runs([Path("one/run"), Path("two/run")], CONFIGS[:2], []) == ["one/run", "two/run"]


def test_names_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(RunError, match="4 names for 3 runs of 2 configurations"):
        name_runs(PATHS, CONFIGS, ["a", "b", "c", "d"])
    with pytest.raises(RunError, match="the runs named 'x' differ in group_size; give them different names"):
        name_runs(PATHS, CONFIGS, ["x", "y", "x"])
