"""What is known about a run's lag: what loses needs consent, what nobody has shown is a warning."""

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any, Literal

import pytest

from offbeat.config import known, parse
from offbeat.config.known import Doubt, LagEvidence
from offbeat.objective.measured import MeasuredLag
from offbeat.objective.presets import PRESETS

SMOLLM2 = 135e6
TINY = 1e5
LOST = MeasuredLag(
    "rec-oneside-nois", "SmolLM2-135M", 10, "fails", -0.24, -0.28, -0.2, 5e-6, 0.024, 5, "lost", int(SMOLLM2)
)
KEPT = MeasuredLag("rec-oneside-nois", "sums", 5, "tolerates", -0.01, -0.02, 0.01, 5e-4, 0.027, 12, "kept")
OFFLINE = {"run": {"mode": "offline", "experience": "log"}, "sampler": {"mode": "offline"}}


@pytest.fixture(autouse=True)
def rows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    listed = {"rec-oneside-nois": [KEPT, LOST], "reinforce": [replace(LOST, preset="reinforce", row="collapsed")]}
    monkeypatch.setattr(known, "measured_lags", lambda: listed)
    yield


def level(settings: dict[str, Any], rate: float, parameters: float = SMOLLM2) -> Doubt | None:
    config = parse({**settings, "optimizer": {"learning_rate": rate}})
    finding = LagEvidence(config, parameters).finding()
    return finding and finding.level


def every(v: int, **more: Any) -> dict[str, Any]:
    return {"sync": {"every": v}, **more}


@pytest.mark.parametrize(
    ("settings", "rate", "parameters", "expected"),
    [
        (every(1), 1e-3, SMOLLM2, None),
        (every(10), 1e-6, SMOLLM2, None),  # as P1 reports it
        (every(10), 5e-6, SMOLLM2, Doubt.LOSES),
        (every(200), 1e-3, 7e9, Doubt.LOSES),
        (every(200), 1e-3, inf, Doubt.LOSES),  # a model whose files are not here
        (every(200), 1e-3, TINY, Doubt.UNSHOWN),  # the row is about larger models
        (every(5), 5e-6, SMOLLM2, Doubt.UNSHOWN),
        (every(5), 5e-4, TINY, None),  # tolerated there
        (every(5), 1e-3, TINY, Doubt.UNSHOWN),  # at no higher rate
        (every(5, updates_per_batch=2), 5e-4, TINY, Doubt.UNSHOWN),
        (every(5, updates_per_batch=2), 5e-6, SMOLLM2, Doubt.LOSES),  # lag in updates
        (every(10, objective={"clip": [0.6, 2.0]}), 5e-6, SMOLLM2, Doubt.UNSHOWN),  # another objective
        (every(10, objective={"zero_variance_mask": True, "truncated": "mask"}), 5e-6, SMOLLM2, Doubt.LOSES),
        (every(10, adapter={"rank": 8}), 1e-5, SMOLLM2, None),  # drifts as full training at 1e-6
        (every(10, adapter={"rank": 8}), 5e-5, SMOLLM2, Doubt.LOSES),
        ({"sync": {"every": 10, "drift_budget": 0.05}}, 5e-6, SMOLLM2, Doubt.LOSES),  # a budget it never reaches
        ({"sync": {"every": 10, "drift_budget": 0.02}}, 5e-6, SMOLLM2, Doubt.UNSHOWN),
        ({"run": {"mode": "concurrent", "max_lag": 9}}, 5e-6, SMOLLM2, Doubt.LOSES),
        ({"sync": {"offset": 9}}, 5e-6, SMOLLM2, Doubt.LOSES),
        ({"sampler": {"mode": "replay"}}, 5e-6, SMOLLM2, Doubt.LOSES),  # replayed groups lag further
        ({"sampler": {"mode": "replay", "retire_age": 5}}, 5e-6, SMOLLM2, Doubt.UNSHOWN),
        ({"sampler": {"mode": "replay", "retire_drift": 0.02}}, 5e-6, SMOLLM2, Doubt.UNSHOWN),
        ({"sampler": {"mode": "replay"}}, 5e-4, TINY, Doubt.UNSHOWN),  # nobody replayed there
        ({**OFFLINE}, 1e-6, SMOLLM2, None),
        ({**OFFLINE}, 5e-6, SMOLLM2, Doubt.UNSHOWN),
        ({**OFFLINE, "objective": {"preset": "red-drop"}}, 1e-6, SMOLLM2, Doubt.UNSHOWN),
        ({**OFFLINE, "objective": {"preset": "reinforce"}}, 1e-6, SMOLLM2, Doubt.LOSES),  # as P1 reports it
        (every(10, objective={"preset": "reinforce"}), 1e-6, SMOLLM2, Doubt.LOSES),
        (every(1, objective={"preset": "reinforce"}), 1e-3, SMOLLM2, None),
        (every(50, objective={"preset": "grpo"}), 1e-6, SMOLLM2, Doubt.UNSHOWN),
    ],
)
def test_rows_and_reports_decide(
    settings: dict[str, Any], rate: float, parameters: float, expected: Doubt | None
) -> None:
    assert level(settings, rate, parameters) is expected


def test_what_loses_is_shown_with_its_figure_and_with_ways_out_against_which_nothing_speaks() -> None:
    config = parse(every(10, optimizer={"learning_rate": 5e-6}))
    finding = LagEvidence(config, SMOLLM2).finding()
    assert finding is not None and finding.row == "lost"
    assert finding.text.startswith("sync.every = 10 gives lag up to 9, which is known to lose: in our runs")
    assert "-0.240 [-0.280, -0.200]" in finding.text and "(SmolLM2-135M, lost)" in finding.text
    assert "; set optimizer.learning_rate = 1e-06, or set accept = true" in finding.text.replace(
        "set sync.every = 1, or ", ""
    )
    assert level(every(1), 5e-6) is None and level(every(10), 1e-6) is None


def test_a_row_that_tolerates_a_lag_ends_its_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = MeasuredLag(
        "grpo-off-policy", "SmolLM2-135M", 10, "tolerates", 0, 0, 0, 5e-6, 0.05, 5, "shown", int(SMOLLM2)
    )
    settings = every(10, objective={"preset": "grpo-off-policy"})
    assert level(settings, 5e-6) is Doubt.UNSHOWN
    monkeypatch.setattr(known, "measured_lags", lambda: {"grpo-off-policy": [shown]})
    assert level(settings, 5e-6) is None
    assert level(settings, 1e-5) is Doubt.UNSHOWN


@pytest.mark.parametrize(("verdict", "expected"), [("fails", Doubt.LOSES), ("undecided", Doubt.UNSHOWN)])
def test_a_row_about_replay_decides_instead_of_those_about_fresh_lag(
    verdict: Literal["fails", "undecided"], expected: Doubt, monkeypatch: pytest.MonkeyPatch
) -> None:
    replayed = replace(LOST, v=1, verdict=verdict, row="replayed", replay=True)
    monkeypatch.setattr(known, "measured_lags", lambda: {"rec-oneside-nois": [LOST, replayed]})
    assert level({"sampler": {"mode": "replay"}}, 5e-6) is expected
    assert level(every(1), 5e-6) is None


def test_a_replay_that_loses_is_told_to_train_on_fresh_groups_or_to_retire_them_sooner() -> None:
    finding = LagEvidence(
        parse({"sampler": {"mode": "replay"}, "optimizer": {"learning_rate": 5e-6}}), SMOLLM2
    ).finding()
    assert finding is not None and "set sampler.mode = 'fresh', or " in finding.text
    assert finding.text.startswith("sampler.retire_age = 200 gives lag up to 200, which is known to lose")


def test_groups_without_a_version_may_have_any_age() -> None:
    config = parse({"objective": {"preset": "grpo"}, "run": {"experience": "log"}})
    assert LagEvidence(config, SMOLLM2).finding() is None
    finding = LagEvidence(config, SMOLLM2, any_age=True).finding()
    assert finding is not None and finding.level is Doubt.UNSHOWN and "reported for lag up to 20" in finding.text


def test_every_preset_is_shown_at_its_reported_lag_and_rate_and_on_fresh_data() -> None:
    for name, preset in PRESETS.items():
        v = int(min(preset.reported_lag, 50)) + 1
        assert level(every(v, objective={"preset": name}), 1e-6) is None, name
        assert level(every(1, objective={"preset": name}), 1e-3) is None, name


def test_the_shipped_rows_know_that_the_default_objective_loses_on_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    finding = LagEvidence(parse(every(200, optimizer={"learning_rate": 1e-3})), SMOLLM2).finding()
    assert finding is not None and finding.level is Doubt.LOSES and finding.row == "evidence.smollm2.v10-loss"
