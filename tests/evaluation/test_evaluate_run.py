"""`offbeat eval RUN` and `offbeat.evaluate`: the prompts a run held out, before and after, side by side."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

import offbeat
from offbeat.cli.main import app
from tests.run.test_local import config, model, ran

pytestmark = pytest.mark.engine
__all__ = ["model"]
OWN = """
examples = [{"prompt": f"{n}+{m}="} for n in range(5) for m in range(5)]
def reward(text, columns):
    return float(any(character.isdigit() for character in text))
"""


@pytest.fixture(scope="module")
def trained(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    (place / "own.py").write_text(OWN)
    task = {"name": str(place / "own.py"), "scorers": 1}
    ran(config(model, steps=4, task=task, evaluation={"every": 4}), place / "run")
    ran(config(model, steps=1, task=task), place / "plain")
    return place


def test_a_run_and_its_base_model_answer_the_prompts_that_the_run_held_out(trained: Path) -> None:
    [row] = offbeat.evaluate(trained / "run", samples=4)
    assert row.held_out and row.prompts == 5 and row.completions == 5 * 16
    assert list(row.estimates) == list(row.before) == list(row.difference)
    assert {"pass@1", "pass@4", "greedy pass@1"} <= row.estimates.keys()
    change = row.estimates["pass@1"].value - row.before["pass@1"].value
    assert row.difference["pass@1"].value == pytest.approx(change)
    assert offbeat.evaluate(offbeat.Run(trained / "run"), samples=4) == [row]


def test_the_command_says_what_was_asked_and_shows_before_and_after(trained: Path) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["eval", str(trained / "run"), "--samples", "2"])
    assert result.exit_code == 0, result.output
    assert "5 distinct held-out prompts" in result.output
    for who in ("the policy", "the model before training"):
        assert f"{who}: 5 prompts × 17 = 85 answers of at most" in result.output, "announced before it is asked"
    assert all(word in result.output for word in ("before", "after", "difference", "greedy pass@1"))


def test_a_run_that_held_nothing_out_is_said_to_be_asked_training_prompts(trained: Path) -> None:
    arguments = ["eval", str(trained / "plain"), "--samples", "1", "--no-before", "--no-greedy", "--prompts", "9"]
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert (
        "9 distinct training prompts, because nothing was held out" in result.output and "before" not in result.output
    )


def test_another_task_is_asked_without_the_prompts_that_the_run_trained_on(trained: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.py"
    other.write_text(OWN.replace("range(5)]", "range(6)]"))
    [row] = offbeat.evaluate(trained / "run", str(other), samples=1, before=False, greedy=False)
    assert row.held_out and row.prompts == 5 + 5 and not row.before
    [row] = offbeat.evaluate(trained / "plain", str(trained / "own.py"), samples=1, before=False)
    assert row.held_out is False and row.prompts == 25
