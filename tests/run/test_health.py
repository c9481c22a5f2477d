"""A rule that looks at a metric nobody emits is no rule."""

from offbeat.metrics import METRICS
from offbeat.run.health import DEFAULT_RULES, Action, Health


def test_every_rule_looks_at_a_metric_that_exists() -> None:
    assert {rule.metric for rule in DEFAULT_RULES} <= METRICS.keys()
    assert all(rule.advice for rule in DEFAULT_RULES)


def test_a_broken_scorer_pauses_the_run_with_the_groups_to_look_at() -> None:
    health = Health()
    found = [health.look({"unscorable_share": 0.5}, ["g7", "g8"]) for _ in range(3)]
    assert [len(alarms) for alarms in found] == [0, 0, 1]
    assert found[2][0].rule.action is Action.PAUSE
    assert found[2][0].groups == ("g7", "g8")
