"""Which runs hold prompts out."""

from pathlib import Path
from typing import Any

import pytest

from offbeat.config import parse
from offbeat.errors import ConfigError
from offbeat.run.build import make_task
from offbeat.run.directory import RunDirectory


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
