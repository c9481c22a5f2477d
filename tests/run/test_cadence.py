"""When a cadence publishes, as properties over any sequence of steps."""

import itertools
import json
import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.run.cadence import (
    ENOUGH_TOKENS,
    Cadence,
    Cost,
    Drift,
    Fixed,
    PublishEvidence,
    PublishReason,
    StepEvidence,
    recent_drift,
)
from offbeat.run.journal import Phase
from offbeat.types import PublishedDrift

drifts = st.lists(
    st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.1, 0.2, math.nan, math.inf]), st.none()), max_size=120
)
budgets = st.floats(0.01, 1)
delays = st.integers(0, 6)


@dataclass(frozen=True)
class Publish:
    step: int
    why: PublishReason
    version: int | None
    """The version that the batch of this step came from."""


def evidence(drift: float | None, seconds: float = 1.0, tokens: int = 512) -> StepEvidence:
    """A step whose tokens come from the version published last, or from an earlier one if `drift` is None."""
    found = PublishedDrift() if drift is None else PublishedDrift(tokens, drift, min(drift, 1.0))
    return StepEvidence(found, seconds)


def publishes(cadence: Cadence, course: list[float | None], delay: int) -> list[Publish]:
    """Return what is published if batches come from the version that was newest `delay` steps before."""
    found: list[Publish] = []
    since: list[StepEvidence] = []
    for step, drift in enumerate(course, start=1):
        known = [0, *(p.step for p in found)]
        version = max((v for v in known if v <= step - delay), default=None)
        since.append(evidence(drift if version == known[-1] else None))
        why = cadence.due(since, publish_seconds=2.0)
        if why is not None:
            found.append(Publish(step, why, version))
            since.clear()
    return found


def gaps(found: list[Publish]) -> list[int]:
    steps = [0, *(p.step for p in found)]
    return [after - before for before, after in itertools.pairwise(steps)]


@st.composite
def rules(draw: st.DrawFn) -> Drift | Cost:
    at_least = draw(st.integers(1, 8))
    at_most = at_least + draw(st.integers(0, 12))
    return draw(st.sampled_from([Cost(at_least, at_most), Drift(draw(budgets), at_least, at_most)]))


@given(rules(), drifts, delays)
@settings(max_examples=1000)
def test_a_rule_publishes_between_at_least_and_at_most_steps(rule: Drift | Cost, course: list, delay: int) -> None:
    found = publishes(rule, course, delay)
    assert all(rule.at_least <= gap <= rule.at_most for gap in gaps(found))
    last = found[-1].step if found else 0
    assert len(course) - last < rule.at_most


@given(rules(), drifts, delays, budgets)
@settings(max_examples=1000)
def test_a_larger_budget_never_publishes_earlier_or_more_often(
    rule: Drift | Cost, course: list, delay: int, budget: float
) -> None:
    low, high = sorted([budget, budget / 2])
    often = publishes(Drift(low, rule.at_least, rule.at_most), course, delay)
    rarely = publishes(Drift(high, rule.at_least, rule.at_most), course, delay)
    assert len(rarely) <= len(often)
    assert all(early.step <= late.step for early, late in zip(often, rarely, strict=False))


@given(rules(), drifts, delays)
@settings(max_examples=1000)
def test_evidence_causes_one_publish_until_its_effect_shows(rule: Drift | Cost, course: list, delay: int) -> None:
    found = publishes(rule, course, delay)
    for before, after in itertools.pairwise(found):
        if after.why in (PublishReason.DRIFT, PublishReason.COST):
            assert after.version is not None and after.version >= before.step
            assert after.step - before.step >= delay


@given(budgets, drifts, delays)
@settings(max_examples=500)
def test_drift_within_its_budget_or_unknown_publishes_only_after_at_most_steps(
    budget: float, course: list, delay: int
) -> None:
    calm = [drift if drift is None or drift <= budget else budget for drift in course]
    # A mean of equal numbers may round above them.
    assert all(p.why is PublishReason.LONGEST for p in publishes(Drift(budget * (1 + 1e-9), 2, 9), calm, delay))


@given(st.integers(1, 30), st.integers(0, 200))
def test_fixed_publishes_every_v_steps(every: int, steps: int) -> None:
    assert [p.step for p in publishes(Fixed(every), [None] * steps, 0)] == list(range(every, steps + 1, every))


def test_a_drift_of_nan_exceeds_every_budget() -> None:
    assert Drift(0.5).due([evidence(math.nan)], 0.0) is PublishReason.DRIFT


def test_steady_drift_above_its_budget_publishes_as_often_as_its_effect_shows() -> None:
    assert [p.step for p in publishes(Drift(0.1, 1, 20), [0.5] * 10, delay=3)] == [3, 6, 9]


def test_a_decision_about_drift_waits_for_enough_tokens() -> None:
    few = evidence(0.9, tokens=ENOUGH_TOKENS // 2)
    assert Drift(0.1).due([few], 0.0) is None
    assert Drift(0.1).due([few, few], 0.0) is PublishReason.DRIFT
    assert recent_drift([evidence(0.9), few, evidence(0.0)]) == 0.0, "enough tokens in the last step alone"
    assert recent_drift([evidence(0.8, tokens=300), evidence(0.2, tokens=100)]) == pytest.approx(0.65)


def test_cost_publishes_when_the_wasted_seconds_exceed_those_of_a_publish() -> None:
    step = StepEvidence(PublishedDrift(512, 0.1, wasted=0.25), seconds=4.0)
    assert Cost().due([step, step], publish_seconds=2.0) is None
    assert Cost().due([step] * 3, publish_seconds=2.0) is PublishReason.COST


@pytest.mark.parametrize("cost", [0.5, 2.0, 8.0])
def test_cost_finds_the_cheapest_period_if_the_wasted_share_grows_steadily(cost: float) -> None:
    growth = 0.01

    def steps(period: int) -> list[StepEvidence]:
        return [StepEvidence(PublishedDrift(512, 0.1, wasted=growth * lag), 1.0) for lag in range(period)]

    def price(period: int) -> float:
        return (cost + sum(growth * lag for lag in range(period))) / period

    chosen = next(n for n in range(1, 100) if Cost().due(steps(n), cost) is PublishReason.COST)
    assert price(chosen) <= 1.02 * min(map(price, range(1, 100)))


@given(rules(), st.lists(st.floats(0, 1), min_size=1, max_size=60), st.integers(1, 60))
@settings(max_examples=300)
def test_a_resumed_cadence_decides_the_same(rule: Drift | Cost, course: list[float], cut: int) -> None:
    def decisions(kill_at: int | None) -> list[PublishReason | None]:
        found, evidence, total = [], PublishEvidence(), dict.fromkeys(Phase, 0.0)
        for step, drift in enumerate(course):
            if step == kill_at:
                evidence = PublishEvidence.restore(json.loads(json.dumps(evidence.state())))
                total = dict.fromkeys(Phase, 0.0)  # a stopwatch starts again
            total |= {Phase.TRAINING: total[Phase.TRAINING] + 1.0, Phase.PUBLISHING: total[Phase.PUBLISHING] + 3.0}
            evidence.add_step(PublishedDrift(512, drift, drift), total)
            found.append(rule.due(evidence.since, evidence.publish_seconds))
            if found[-1] is not None:
                evidence.published()
        return found

    assert decisions(cut) == decisions(None)


def test_a_publish_costs_what_it_takes_until_workers_have_loaded_it() -> None:
    evidence = PublishEvidence()
    total = {Phase.PUBLISHING: 2.0, Phase.LOADING: 60.0, Phase.TRAINING: 5.0}  # engines start: 60 s no publish repeats
    evidence.add_step(PublishedDrift(), total)
    assert evidence.publish_seconds == 2.0 and evidence.since[0].seconds == 5.0
    evidence.published()
    total |= {Phase.PUBLISHING: 4.0, Phase.LOADING: 61.0, Phase.TRAINING: 8.0, Phase.EVALUATING: 50.0}
    evidence.add_step(PublishedDrift(), total)
    assert evidence.costs == [2.0, 3.0] and evidence.since[0].seconds == 3.0


@pytest.mark.parametrize(("budget", "at_least", "at_most"), [(0.0, 1, 2), (math.nan, 1, 2), (0.1, 0, 2), (0.1, 3, 2)])
def test_a_rule_that_cannot_work_is_refused(budget: float, at_least: int, at_most: int) -> None:
    with pytest.raises(ValueError, match=r"budget|at_least"):
        Drift(budget, at_least, at_most)


def test_a_period_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="smallest is 1"):
        Fixed(0)
