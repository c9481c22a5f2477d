"""Which runs hold prompts out, and that runs of earlier releases, which held nothing out, still resume."""

import json
from pathlib import Path
from typing import Any

import pytest

from offbeat.config import Config, parse
from offbeat.errors import ConfigError
from offbeat.run.build import make_task
from offbeat.run.directory import RunDirectory
from offbeat.run.learner import fixed_settings, recorded_settings
from offbeat.trainer.checkpoint import differences

NEW = ("greedy", "hold_out", "task", "options")


def as_saved_before(config: Config) -> dict[str, Any]:
    """The configuration as releases without these settings saved it."""
    saved: dict[str, Any] = config.model_dump(mode="json")
    for name in NEW:
        del saved["evaluation"][name]
    return saved


@pytest.mark.parametrize("every", [0, 2])
def test_a_run_of_an_earlier_release_keeps_its_training_prompts_and_its_checkpoints(every: int, tmp_path: Path) -> None:
    begun = parse({"evaluation": {"every": every, "hold_out": 0.0}, "task": {"options": {"digits": 1, "size": 50}}})
    (tmp_path / "config.json").write_text(json.dumps(as_saved_before(begun)))
    resumed = RunDirectory(tmp_path).config()
    task = make_task(resumed)
    assert len(task.examples) == 50 and task.evaluation is None
    in_checkpoint: Any = fixed_settings(begun)
    for name in NEW:
        del in_checkpoint["evaluation"][name]
    assert list(differences(fixed_settings(resumed), recorded_settings(in_checkpoint))) == []


@pytest.mark.parametrize(
    ("evaluation", "examples"),
    [({}, 50), ({"every": 5}, 40), ({"hold_out": 0.5}, 25), ({"every": 5, "hold_out": 0.0}, 50)],
)
def test_a_run_holds_out_if_it_evaluates_or_is_told_to(
    evaluation: dict[str, Any], examples: int, tmp_path: Path
) -> None:
    own = tmp_path / "own.py"
    own.write_text("examples = [{'prompt': f'q{n}'} for n in range(50)]\ndef reward(text, columns): return 1.0\n")
    config = parse({"evaluation": evaluation, "task": {"name": str(own)}})
    assert len(make_task(config).examples) == examples
    RunDirectory(tmp_path / "run").create(config)
    assert len(make_task(RunDirectory(tmp_path / "run").config()).examples) == examples, "the same after a resume"


def test_options_of_evaluation_without_a_task_are_a_problem() -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.options has no effect without evaluation\.task"):
        parse({"evaluation": {"options": {"digits": 3}}})
