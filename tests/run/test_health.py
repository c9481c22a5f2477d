"""Health rules refer to declared metrics and fire when they should."""

from dataclasses import replace

import pytest

from offbeat.config import parse
from offbeat.metrics import METRICS
from offbeat.run.health import DEFAULT_RULES, Action, Health, Rule, rules_for
from offbeat.types import GroupDrift, Unscorable
from tests.reports.made_run import group


def test_every_rule_refers_to_a_declared_metric_and_gives_advice() -> None:
    assert {rule.metric for rule in DEFAULT_RULES} <= METRICS.keys()
    assert all(rule.advice for rule in DEFAULT_RULES)


def test_a_rule_with_a_mistyped_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="did you mean 'drift_tv_token'"):
        Rule("drift_tv_tokn", above=0.3)


def test_a_broken_scorer_pauses_the_run_with_the_groups_to_look_at() -> None:
    health = Health()
    failed = replace(
        group(8, 0, right=1),
        completions=tuple(replace(one, score=Unscorable("timeout")) for one in group(8, 0, right=1).completions),
    )
    found = [health.check({"unscorable_share": 0.5}, [group(7, 0, right=1), failed], {}) for _ in range(3)]
    assert [len(alarms) for alarms in found] == [0, 0, 1]
    assert found[2][0].rule.action is Action.PAUSE
    assert found[2][0].groups == ("g-8", "g-7")


def test_an_alarm_about_lag_names_the_number_of_steps_after_which_to_publish() -> None:
    far = parse({"sync": {"every": 200}, "optimizer": {"learning_rate": 1e-3}})
    health = Health(rules_for(far))
    alarms = [
        str(alarm)
        for step in range(1, 20)
        for alarm in health.check({"lag": step - 1.0, "gate_stopped_gradient": min(0.1 * step, 0.9)}, [], {})
    ]
    assert alarms == [
        "gate_stopped_gradient above 0.5 for 10 steps, now 0.9: the gate stops most of the gradient, so these steps "
        "hardly teach: publish more often (sync.every), or lower optimizer.learning_rate; at lag 14, so set "
        "sync.every = 5"
    ], "after five steps, at lag 4, the gate stopped half of it"
    ahead = rules_for(parse({"run": {"mode": "concurrent", "max_lag": 9}}))
    assert not any(rule.by_lag for rule in ahead), "groups of one batch have several lags"


def test_an_alarm_names_the_groups_to_look_at_and_the_command_that_shows_them() -> None:
    health = Health([Rule("ess", below=0.1), Rule("drift_tv_token", above=0.3)], run="runs/one")
    groups = [group(n, 0, right=1) for n in range(5)]
    drift = {f"g-{n}": GroupDrift(tv=n / 10, ess=n / 10) for n in range(1, 5)}  # g-0 was not measured
    ess, far = health.check({"ess": 0.05, "drift_tv_token": 0.4}, groups, drift)
    assert str(ess).endswith("; look at: offbeat view runs/one --group g-1 --group g-2 --group g-3")
    assert str(far).endswith("; look at: offbeat view runs/one --group g-4 --group g-3 --group g-2")
    assert ess.groups == ("g-1", "g-2", "g-3", "g-4", "g-0")
