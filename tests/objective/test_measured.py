"""What our own runs say about lag, and what follows from it for limits and alarms."""

import json
from dataclasses import replace
from importlib.resources import files

import pytest

from lab.learning.evidence.limits import text
from offbeat.config import parse
from offbeat.objective import presets
from offbeat.objective.measured import MeasuredLag, failing_drift
from offbeat.objective.presets import PRESETS
from offbeat.run.health import DEFAULT_RULES, rules_for

FIVE = MeasuredLag("reinforce", "sums", 5, "tolerates", 0.0, -0.01, 0.01, rate=5e-4, drift=0.02, n=12, row="v5")
TWENTY = replace(FIVE, v=20, verdict="fails", difference=-0.1, low=-0.12, high=-0.08, drift=0.07, row="v20")


def test_the_packaged_file_is_what_the_cells_of_the_finished_blocks_give() -> None:
    packaged = files("offbeat.objective").joinpath("measured_lag.json").read_text(encoding="utf-8")
    assert packaged == text()
    assert {one["preset"] for one in json.loads(packaged)} <= PRESETS.keys()


def test_the_smallest_drift_of_a_failure_is_the_limit() -> None:
    assert failing_drift([FIVE]) is None
    assert failing_drift([FIVE, TWENTY, replace(TWENTY, task="sorting", drift=0.05)]) == 0.05
    assert failing_drift([replace(TWENTY, drift=None)]) is None
    assert failing_drift([replace(FIVE, drift=0.08), TWENTY]) is None, "another task tolerates more"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(presets, "measured_lags", lambda: {"reinforce": [FIVE, TWENTY]})


@pytest.mark.usefixtures("measured")
def test_a_run_warns_at_the_drift_at_which_its_objective_fails() -> None:
    def limit(settings: dict[str, object]) -> float | None:
        [rule] = [one for one in rules_for(parse(settings)) if one.metric == "drift_tv_token"]
        return rule.above

    [default] = [one.above for one in DEFAULT_RULES if one.metric == "drift_tv_token"]
    assert limit({"objective": {"preset": "reinforce"}, "sync": {"every": 1}}) == 0.07
    assert limit({"objective": {"preset": "grpo"}}) == default == 0.3
    # The groups of other models drift by nature.
    assert limit({"objective": {"preset": "reinforce"}, "sync": {"every": 1}, "run": {"experience": "log"}}) == default
