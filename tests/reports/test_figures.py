"""The arithmetic behind a report: predicted and realized improvement, pooled seeds, plots."""

import math
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offbeat.config import parse
from offbeat.evaluation import interval, mean_curve
from offbeat.experience.index import Columns
from offbeat.reports.comparison import pool_seeds
from offbeat.reports.history import PublishRecord, RunHistory, StepRecord
from offbeat.reports.improvement import VersionReward, improvements, rewards_by_version
from offbeat.reports.plot import HEIGHT, TOP, WIDTH, Plot, Series, downsample, draw, draw_stack, round_ticks, standalone

FINITE = st.floats(-1e9, 1e9)


def columns(versions: list[int], means: list[float], spreads: list[float]) -> Columns:
    n = len(versions)
    ones = [1] * n
    return Columns(list(range(n)), versions, ones, ones, [True] * n, [8] * n, [8] * n, means, spreads, ones)


def history(predicted: float, versions: dict[int, int]) -> RunHistory:
    step = StepRecord(4, {"predicted_gain": predicted}, {}, [], versions)
    return RunHistory(
        steps=[step], publishes=[PublishRecord(0, "first", "anchor", 1), PublishRecord(4, "period", "patch", 1)]
    )


def test_rewards_by_version_use_all_scored_groups() -> None:
    found = rewards_by_version(columns([0, 0, 4, 4, -1], [0.25, 0.75, 1.0, 1.0, 0.0], [0.4, 0.4, 0, 0, 0]))
    assert found.keys() == {0, 4}
    assert found[0].mean == 0.5 and found[0].error == pytest.approx(0.25) and found[0].contrast == 1.0
    assert found[4] == VersionReward(1.0, 0.0, 0.0)


def test_realized_improvement_is_relative_to_the_versions_that_generated_the_batch() -> None:
    rewards = {0: VersionReward(0.2, 0.03, 1.0), 2: VersionReward(0.4, 0.0, 0.5), 4: VersionReward(0.6, 0.04, 1.0)}
    [one] = improvements(history(0.1, {0: 3, 2: 1}), rewards, contrast_only=False)
    assert one.version == 4 and one.predicted == 0.1
    assert one.realized == pytest.approx(0.6 - (0.75 * 0.2 + 0.25 * 0.4))
    assert one.margin == pytest.approx(1.96 * math.hypot(0.04, 0.75 * 0.03))
    [scaled] = improvements(history(0.1, {0: 3, 2: 1}), rewards, contrast_only=True)
    assert scaled.predicted == pytest.approx(0.1 * (0.75 * 1.0 + 0.25 * 0.5))


def test_a_publish_without_groups_of_its_version_has_no_improvement() -> None:
    rewards = {0: VersionReward(0.2, 0.03, 1.0)}
    assert improvements(history(0.1, {0: 4}), rewards, contrast_only=False) == []
    assert improvements(history(0.1, {}), rewards | {4: rewards[0]}, contrast_only=False) == []


def test_an_interval_over_seeds_uses_students_t() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0 and found.high - found.mean == pytest.approx(4.30265 / math.sqrt(3))
    assert interval([0.5]).low == interval([0.5]).high == 0.5


def test_a_mean_curve_uses_only_the_runs_that_reached_each_step() -> None:
    steps, means = mean_curve([([1, 2], [0.0, 1.0]), ([1, 2], [1.0, 1.0]), ([1], [0.5])])
    assert steps == [1, 2] and [(one.mean, one.n) for one in means] == [(0.5, 3), (1.0, 2)]


def test_only_runs_that_differ_only_in_the_seed_are_pooled() -> None:
    runs = [("a-0", parse({"seed": 0}), 0), ("b-0", parse({"steps": 9}), 1), ("a-1", parse({"seed": 7}), 2)]
    assert [(pool.name, list(pool.runs)) for pool in pool_seeds(runs)] == [("a", [0, 2]), ("b-0", [1])]


@given(FINITE, FINITE)
@example(0.0, 5e-324)
@example(1e-300, 1e-300)
def test_ticks_span_the_values(a: float, b: float) -> None:
    low, high = min(a, b), max(a, b)
    ticks = round_ticks(low, high)
    slack = 1e-6 * max(abs(low), abs(high), 1e-80)
    assert 2 <= len(ticks) <= 8 and ticks == sorted(set(ticks))
    assert ticks[0] <= low + slack and ticks[-1] >= high - slack


@given(st.lists(st.tuples(FINITE, FINITE), min_size=1, max_size=2000))
def test_a_downsampled_curve_stays_in_the_range_of_its_values(points: list[tuple[float, float]]) -> None:
    x, y = downsample([a for a, _ in points], [b for _, b in points], most=50)
    assert 1 <= len(x) == len(y) <= 50
    assert min(b for _, b in points) - 1e-6 <= min(y) and max(y) <= max(b for _, b in points) + 1e-6


@given(
    st.lists(st.tuples(st.integers(0, 500), FINITE, st.floats(0, 1e9)), min_size=1, max_size=30),
    st.sampled_from(["line", "faint", "dots", "stems"]),
    st.booleans(),
)
def test_every_plot_stays_within_its_frame(points: list[tuple[int, float, float]], style: str, banded: bool) -> None:
    points = sorted(points)
    x, y = [float(p[0]) for p in points], [p[1] for p in points]
    series = Series("a", x, y, style=style)
    if banded:
        low, high = (
            [b - p[2] for b, p in zip(y, points, strict=True)],
            [b + p[2] for b, p in zip(y, points, strict=True)],
        )
        series = replace(series, low=low, high=high)
    drawn = ElementTree.fromstring(draw(Plot("a <title> & more", [series], marks=x[:3], level=0.0)))
    for circle in drawn.iter("circle"):
        assert 0 <= float(circle.attrib["cx"]) <= WIDTH and TOP - 1.1 <= float(circle.attrib["cy"]) <= HEIGHT
    for text in drawn.iter("text"):
        assert 0 <= float(text.attrib["x"]) <= WIDTH and 0 <= float(text.attrib["y"]) <= HEIGHT


def test_stacked_shares_fill_the_frame() -> None:
    drawn = ElementTree.fromstring(draw_stack("t", "groups", [10, 20], [[0.2, 0.5], [0.8, 0.5], [0.0, 0.0]]))
    areas = [path for path in drawn.iter("path") if path.attrib["class"].startswith("area")]
    assert len(areas) == 3 and f" {TOP:.1f}" in areas[1].attrib["d"]


def test_a_plot_file_names_its_series_and_brings_its_own_colors() -> None:
    text = standalone(
        Plot("a <run>", [Series("reward_mean", [1, 2], [0.1, 0.2]), Series("ess", [1, 2], [1, 2], color=1)])
    )
    ElementTree.fromstring(text)
    assert "a &lt;run&gt;" in text and "reward_mean" in text and "--c1" in text
