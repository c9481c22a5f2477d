"""When a cadence publishes, as properties over any sequence of drifts."""

import itertools
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.run.cadence import Cadence, Drift, Fixed, PublishReason

drifts = st.lists(
    st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.1, 0.2, math.nan, math.inf]), st.none()), max_size=120
)
budgets = st.floats(0.01, 1)
delays = st.integers(0, 6)


@dataclass(frozen=True)
class Publish:
    step: int
    why: PublishReason
    version: float | None


def publishes(cadence: Cadence, course: list[float | None], delay: int) -> list[Publish]:
    """Return what is published if batches come from the version that was newest `delay` steps before."""
    found: list[Publish] = []
    for step, drift in enumerate(course, start=1):
        known = [0, *(p.step for p in found)]
        version = max((v for v in known if v <= step - delay), default=None)
        why = cadence.due(step, known[-1], drift, version)
        if why is not None:
            found.append(Publish(step, why, version))
    return found


def gaps(found: list[Publish]) -> list[int]:
    steps = [0, *(p.step for p in found)]
    return [after - before for before, after in itertools.pairwise(steps)]


@st.composite
def rules(draw: st.DrawFn) -> Drift:
    at_least = draw(st.integers(1, 8))
    return Drift(draw(budgets), at_least, at_least + draw(st.integers(0, 12)))


@given(rules(), drifts, delays)
@settings(max_examples=1000)
def test_drift_publishes_between_at_least_and_at_most_steps(rule: Drift, course: list, delay: int) -> None:
    found = publishes(rule, course, delay)
    assert all(rule.at_least <= gap <= rule.at_most for gap in gaps(found))
    last = found[-1].step if found else 0
    assert len(course) - last < rule.at_most


@given(rules(), drifts, delays, budgets)
@settings(max_examples=1000)
def test_a_larger_budget_never_publishes_earlier_or_more_often(
    rule: Drift, course: list, delay: int, budget: float
) -> None:
    low, high = sorted([rule.budget, budget])
    often = publishes(Drift(low, rule.at_least, rule.at_most), course, delay)
    rarely = publishes(Drift(high, rule.at_least, rule.at_most), course, delay)
    assert len(rarely) <= len(often)
    assert all(early.step <= late.step for early, late in zip(often, rarely, strict=False))


@given(rules(), drifts, delays)
@settings(max_examples=1000)
def test_a_drift_causes_one_publish_until_its_effect_shows(rule: Drift, course: list, delay: int) -> None:
    found = publishes(rule, course, delay)
    for before, after in itertools.pairwise(found):
        if after.why is PublishReason.DRIFT:
            assert after.version is not None and after.version >= before.step
            assert after.step - before.step >= delay


@given(rules(), drifts, delays)
@settings(max_examples=1000)
def test_drift_within_its_budget_or_unknown_publishes_only_after_at_most_steps(
    rule: Drift, course: list, delay: int
) -> None:
    calm = [drift if drift is None or drift <= rule.budget else rule.budget for drift in course]
    assert all(p.why is PublishReason.LONGEST for p in publishes(rule, calm, delay))


@given(rules(), drifts, delays, st.integers(0, 120))
@settings(max_examples=300)
def test_a_cadence_resumed_from_its_last_published_version_decides_the_same(
    rule: Drift, course: list, delay: int, cut: int
) -> None:
    whole = publishes(rule, course, delay)
    before = [p for p in whole if p.step <= cut]
    known = [0, *(p.step for p in before)]
    resumed = list(before)
    for step, drift in enumerate(course[cut:], start=cut + 1):
        version = max((v for v in known if v <= step - delay), default=None)
        if why := rule.due(step, known[-1], drift, version):
            known.append(step)
            resumed.append(Publish(step, why, version))
    assert resumed == whole


@given(st.integers(1, 30), st.integers(0, 200))
def test_fixed_publishes_every_v_steps(every: int, steps: int) -> None:
    assert [p.step for p in publishes(Fixed(every), [None] * steps, 0)] == list(range(every, steps + 1, every))


def test_a_drift_of_nan_exceeds_every_budget() -> None:
    assert Drift(0.5).due(step=3, published=2, drift=math.nan, version=2) is PublishReason.DRIFT


def test_steady_drift_above_its_budget_publishes_as_often_as_its_effect_shows() -> None:
    assert [p.step for p in publishes(Drift(0.1, 1, 20), [0.5] * 10, delay=3)] == [3, 6, 9]


@pytest.mark.parametrize(("budget", "at_least", "at_most"), [(0.0, 1, 2), (math.nan, 1, 2), (0.1, 0, 2), (0.1, 3, 2)])
def test_a_rule_that_cannot_work_is_refused(budget: float, at_least: int, at_most: int) -> None:
    with pytest.raises(ValueError, match=r"budget|at_least"):
        Drift(budget, at_least, at_most)


def test_a_period_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="smallest is 1"):
        Fixed(0)
