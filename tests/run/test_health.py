"""Health rules refer to declared metrics and fire when they should."""

import pytest

from offbeat.metrics import METRICS
from offbeat.run.health import DEFAULT_RULES, Action, Health, Rule


def test_every_rule_refers_to_a_declared_metric_and_gives_advice() -> None:
    assert {rule.metric for rule in DEFAULT_RULES} <= METRICS.keys()
    assert all(rule.advice for rule in DEFAULT_RULES)


def test_a_rule_with_a_mistyped_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'drift_tv_token'"):
        Rule("drift_tv_tokn", above=0.3)


def test_a_broken_scorer_pauses_the_run_with_the_groups_to_look_at() -> None:
    health = Health()
    found = [health.check({"unscorable_share": 0.5}, ["g7", "g8"]) for _ in range(3)]
    assert [len(alarms) for alarms in found] == [0, 0, 1]
    assert found[2][0].rule.action is Action.PAUSE
    assert found[2][0].groups == ("g7", "g8")
