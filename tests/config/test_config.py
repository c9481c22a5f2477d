"""All problems of a configuration are reported at once, each with a fix."""

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from offbeat.config import Config, parse
from offbeat.config.toml_file import load
from offbeat.errors import ConfigError
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import KL, CentredBand, Importance, Need, OneSide


def problems(data: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        parse(data)
    return error.value.problems


def test_defaults_are_valid_and_have_a_plan() -> None:
    assert parse({}).plan == "32 prompts × 8 = 256 completions a step → 1 update; sync every step: lag 0"
    assert parse({"updates_per_batch": 4, "sync": {"every": 2}}).plan.endswith(
        "→ 4 updates; sync every 2 steps: lag 0 to 1, in updates up to 7"
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_accepted_at_its_reported_lag(preset: str) -> None:
    every = int(min(PRESETS[preset].lag_limit, 50)) + 1
    assert (
        parse({"objective": {"preset": preset}, "sync": {"every": every}}).objective.resolve()
        == PRESETS[preset].objective
    )


def test_all_problems_are_reported_at_once_with_the_nearest_valid_name() -> None:
    found = problems(
        {"group_sise": 8, "prompts_per_step": 0, "sync": {"evry": 3}, "objective": {"aggregate": "token-men"}}
    )
    assert len(found) == 4
    assert "group_sise is not a setting; did you mean 'group_size'?" in found
    assert "sync.evry is not a setting; did you mean 'every'?" in found
    assert any("prompts_per_step = 0" in p and "greater than or equal to 1" in p for p in found)
    assert "objective.aggregate = 'token-men' is not a choice; did you mean 'token-mean'?" in found


def test_an_unknown_preset_is_refused_with_the_nearest() -> None:
    assert problems({"objective": {"preset": "rec-oneside-noi"}}) == [
        "objective.preset = 'rec-oneside-noi' is not a preset; did you mean 'rec-oneside-nois'?"
    ]


def test_more_lag_than_reported_is_refused_with_three_fixes() -> None:
    (problem,) = problems({"objective": {"preset": "reinforce"}, "sync": {"every": 10}})
    assert "set sync.every = 1" in problem and "rec-oneside-nois" in problem and "untested_lag" in problem
    assert "cispo" not in problem, "it is reported for less lag than asked for"
    parse({"objective": {"preset": "reinforce", "untested_lag": True}, "sync": {"every": 10}})


def test_truncated_sampling_is_refused_if_the_objective_needs_the_whole_distribution() -> None:
    (problem,) = problems({"objective": {"preset": "grpo"}, "sampling": {"top_p": 0.9}})
    assert "top_p = 0.9" in problem and "set top_p = 1.0" in problem
    parse({"objective": {"preset": "red-weight"}, "sampling": {"top_p": 0.9}})


@pytest.mark.parametrize(
    ("objective", "message"),
    [
        ({"preset": "reinforce", "clip": [0.2, 0.2]}, "has no gate"),
        ({"preset": "grpo-off-policy", "clip": [0.2, 0.3]}, "one width"),
        ({"preset": "grpo", "clip": [1.5, 0.2]}, "0 ≤ ε_lo ≤ 1"),
        ({"preset": "red-drop", "weight_cap": 2.0}, "no importance weight"),
    ],
)
def test_changes_that_conflict_with_the_preset_are_refused(objective: dict[str, Any], message: str) -> None:
    (problem,) = problems({"objective": objective})
    assert message in problem


def test_a_reference_that_nothing_uses_is_refused() -> None:
    (problem,) = problems({"reference": {"refresh_every": 5}})
    assert "kl_coefficient" in problem
    parse({"reference": {"refresh_every": 5}, "objective": {"kl_coefficient": 0.01}})


def test_changes_reach_the_objective() -> None:
    changed = {
        "preset": "grpo",
        "clip": [0.6, 2.0],
        "weight_cap": 5.0,
        "kl_coefficient": 0.01,
        "zero_variance_mask": True,
    }
    objective = parse({"objective": changed}).objective.resolve()
    assert objective.gate == OneSide(0.6, 2.0) and objective.weight == Importance(5.0)
    assert objective.regularizers == (KL(0.01, weighted=True),) and objective.zero_variance_mask
    assert Need.REFERENCE in objective.needs
    band = parse({"objective": {"preset": "grpo-off-policy", "clip": [0.1, 0.1]}}).objective.resolve()
    assert band.gate == CentredBand(0.1)


def test_a_file_is_read_and_a_broken_one_is_explained(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("group_size = 4\n[sync]\nevery = 3\n")
    assert load(file).group_size == 4
    file.write_text("group_size = \n")
    with pytest.raises(ConfigError, match="is not TOML"):
        load(file)
    with pytest.raises(ConfigError, match="is not a file; `offbeat init`"):
        load(tmp_path / "missing.toml")


def sections(model: type[BaseModel]) -> list[type[BaseModel]]:
    nested = [f.annotation for f in model.model_fields.values()]
    return [model] + [s for n in nested if isinstance(n, type) and issubclass(n, BaseModel) for s in sections(n)]


def test_every_setting_has_a_docstring() -> None:
    for section in sections(Config):
        assert section.__doc__
        for name, field in section.model_fields.items():
            is_section = isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
            assert field.description or is_section, f"{section.__name__}.{name} has no docstring under it"
