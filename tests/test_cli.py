"""`offbeat explain`, `offbeat objectives`, and missing extras."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.imports import install_command
from offbeat.objective.presets import PRESETS
from tests.fixtures.watched import watch

run = CliRunner(env={"COLUMNS": "200"}).invoke


def test_every_objective_is_shown() -> None:
    shown = {name: run(app, ["objectives", name]) for name in PRESETS}
    assert [name for name, one in shown.items() if one.exit_code or PRESETS[name].equation not in one.output] == []


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
    assert done.returncode == 1 and install_command("train") in done.stderr


@pytest.mark.parametrize(("words", "code"), [(["explain", "ess"], 0), (["explain", "zzz"], 2), (["--help"], 0)])
def test_the_process_ends_with_the_code_of_its_command_after_what_libraries_registered(
    words: list[str], code: int
) -> None:
    program = (
        "import atexit\n"
        "from offbeat.cli import main\n"
        "def work(run=main.app):\n"
        "    atexit.register(print, 'closed', flush=True)\n"  # as a library does that a command loads
        "    run()\n"
        "main.app = work\n"
        "main.main()"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True)
    assert done.returncode == code and done.stdout.endswith("closed\n") and len(done.stdout + done.stderr) > 100


SILENT = """
import sys, time
import offbeat.cli.main as m
@m.app.command()
def silent() -> None:
    time.sleep(1.0)
    print("the result")
    time.sleep(1.0)
    print("the end", file=sys.stderr)
sys.argv = ["offbeat", "silent"]
m.main()
"""


@pytest.mark.parametrize("terminal", [False, True])
def test_a_silent_command_shows_that_it_works_until_its_first_output(terminal: bool, tmp_path: Path) -> None:
    done = watch([sys.executable, "-c", SILENT], tmp_path, terminal=terminal)
    before, _, after = done.output.partition("the result")
    assert done.code == 0 and "offbeat silent" in before
    assert after.split() == ["the", "end"], "nothing is shown once the command speaks for itself"
    assert before.endswith("\r\x1b[2K") if terminal else re.fullmatch(r"offbeat silent \.+\n", before)
