"""`offbeat explain`, `offbeat objectives`, and missing extras."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.metrics import METRICS
from offbeat.objective.presets import PRESETS

run = CliRunner(env={"COLUMNS": "200"}).invoke


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_explained(name: str) -> None:
    result = run(app, ["explain", name])
    assert result.exit_code == 0 and METRICS[name].formula in result.output and "high:" in result.output


@pytest.mark.parametrize("name", PRESETS)
def test_every_objective_is_shown(name: str) -> None:
    result = run(app, ["objectives", name])
    assert result.exit_code == 0 and PRESETS[name].equation in result.output


def test_all_objectives_are_listed() -> None:
    result = run(app, ["objectives"])
    assert result.exit_code == 0 and all(name in result.output for name in PRESETS)


@pytest.mark.parametrize(("command", "wrong", "right"), [("explain", "es", "ess"), ("objectives", "grp", "grpo")])
def test_a_wrong_name_gets_a_suggestion(command: str, wrong: str, right: str) -> None:
    result = run(app, [command, wrong])
    assert result.exit_code == 2 and f"did you mean '{right}'?" in result.output


def test_a_missing_extra_prints_the_command_that_installs_it() -> None:
    code = (
        "import offbeat.cli.main as m\n"
        "@m.app.command()\n"
        "def heavy() -> None:\n    raise ModuleNotFoundError('No module named torch', name='torch')\n"
        "import sys; sys.argv = ['offbeat', 'heavy']; m.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and "pip install 'offbeat[train]'" in done.stderr
