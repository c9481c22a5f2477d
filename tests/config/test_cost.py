"""`sync.by_cost`: what it needs, and the longest time without a publish."""

import pytest

from offbeat.config import examine, parse
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import Against, CentredBand, NoGate


def test_publishing_by_cost_needs_a_gate() -> None:
    for name, preset in PRESETS.items():
        gate, against = preset.objective.gate, preset.objective.against
        found = examine({"objective": {"preset": name}, "sync": {"by_cost": True, "every": 5}}).problems
        closed_by_lag = not isinstance(gate, NoGate | CentredBand) and against is Against.BEHAVIOR
        assert (closed_by_lag or preset.objective.reject is not None) == (not found), name
        assert all("has no gate that stops tokens because of lag" in line for line in found), name


@pytest.mark.parametrize("rule", [{"by_cost": True}, {"drift_budget": 0.05}])
def test_the_longest_time_without_a_publish_is_the_lag_limit_and_at_most_100_steps(rule: dict[str, object]) -> None:
    assert parse({"sync": rule}).longest == 100
    assert parse({"sync": rule, "objective": {"preset": "grpo"}}).longest == 21
    assert parse({"sync": {**rule, "every": 7}}).longest == 7


def test_two_rules_for_the_same_decision_are_refused() -> None:
    (found,) = examine({"sync": {"by_cost": True, "drift_budget": 0.05}}).problems
    assert "2 rules for the same decision" in found
