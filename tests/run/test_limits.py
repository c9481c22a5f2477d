"""The limits that a configuration gives to the sampler, and what a step event counts."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from offbeat.config import examine, parse
from offbeat.experience.sampler import Draw
from offbeat.objective.presets import PRESETS
from offbeat.run.build import _sampler_limits
from offbeat.run.protocols import StepOutcome
from offbeat.types import Group

OFFLINE: dict[str, Any] = {"run": {"mode": "offline", "experience": "log"}, "sampler": {"mode": "offline"}}


def test_no_preset_refills_by_itself() -> None:
    for preset in PRESETS:
        asked = {"objective": {"preset": preset, "zero_variance_mask": True}}
        assert not _sampler_limits(parse(asked)).drop_zero_variance, preset
        assert _sampler_limits(parse({**asked, "sampler": {"refill": True}})).drop_zero_variance, preset


def test_replayed_groups_have_limits_of_their_own() -> None:
    limits = _sampler_limits(parse({"sampler": {"mode": "replay"}, "sync": {"every": 4}}))
    assert (limits.max_lag, limits.retire_drift, limits.retire_ess, limits.retire_age) == (3, 0.2, None, 200)


def test_offline_there_are_no_limits_except_those_that_are_set() -> None:
    limits = _sampler_limits(parse(OFFLINE))
    assert (limits.max_lag, limits.retire_drift, limits.retire_ess, limits.retire_age) == (None, None, None, None)
    set_ = parse({**OFFLINE, "sampler": {"mode": "offline", "retire_drift": 0.1}})
    assert (_sampler_limits(set_).retire_drift, _sampler_limits(set_).retire_age) == (0.1, None)


@pytest.mark.parametrize("name", ["retire_drift", "retire_ess", "retire_age"])
def test_a_limit_of_reuse_that_cannot_act_is_refused(name: str) -> None:
    value = 9 if name == "retire_age" else 0.5
    [problem] = examine({"sampler": {name: value}}).problems
    assert problem.startswith(f"sampler.{name} = ") and "uses each group once" in problem
    found = examine({**OFFLINE, "sampler": {"mode": "offline", name: value}}).problems
    assert bool(found) == (name == "retire_age")
    assert examine({"sampler": {"mode": "replay", name: value}}).problems == []


def test_a_step_counts_only_the_groups_that_were_trained_on() -> None:
    groups = [cast(Group, SimpleNamespace(id=name)) for name in ("a", "b", "c", "d")]
    draw = Draw(9, (0, 1, 2, 3), (False, False, True, True), lags=(0, 1, 5, None), dropped=())
    trained = SimpleNamespace(groups=("a", "c"))
    outcome = StepOutcome(cast(Any, trained), draw, groups)
    assert outcome.trained_lags == [0, 5] and outcome.trained_replays == 1


def outcome_of(lag: int | None, /, **metrics: float) -> StepOutcome:
    """A step that trained one group of this lag."""
    draw = Draw(9, (0,), (False,), lags=(lag,), dropped=())
    trained = SimpleNamespace(metrics=metrics, groups=("a",))
    return StepOutcome(cast(Any, trained), draw, [cast(Group, SimpleNamespace(id="a"))])


def test_the_throughput_of_a_step_is_left_out_if_it_is_unknown() -> None:
    step = outcome_of(0, trained_tokens=600.0)
    assert step.metrics(2.0) == {"trained_tokens": 600.0, "tokens_per_second": 300.0}
    assert step.metrics(0.0) == {"trained_tokens": 600.0} and outcome_of(0).metrics(2.0) == {}


def test_the_lag_of_a_step_is_left_out_if_it_is_unknown() -> None:
    assert outcome_of(3, lag=3.0).metrics(0.0) == {"lag": 3.0} and outcome_of(None, lag=3.0).metrics(0.0) == {}
