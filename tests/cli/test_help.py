"""The help of every command has an example, and `explain` knows every metric and setting."""

import re

import pytest
import typer
from typer.testing import CliRunner

from lab.site.user_path import commands, shows_itself
from offbeat.cli.main import app
from offbeat.config.knobs import knobs
from offbeat.events import EVENTS
from offbeat.metrics import METRICS
from offbeat.objective.presets import PRESETS

run = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke


COMMANDS = list(commands())


def test_the_commands_are_found() -> None:
    names = {" ".join(words) for words in COMMANDS}
    assert names >= {"quickstart", "init", "check", "doctor", "explain", "train", "resume", "log stats"}


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_has_an_example_of_the_command_itself(words: tuple[str, ...]) -> None:
    assert shows_itself(app, words)


def test_a_command_without_an_example_is_detected() -> None:
    other = typer.Typer()
    other.command("silent")(lambda: None)
    other.command("speaking", help="As in `offbeat speaking`.")(lambda: None)
    assert not shows_itself(other, ("silent",)) and shows_itself(other, ("speaking",))


@pytest.mark.parametrize("name", METRICS)
def test_every_metric_is_explained(name: str) -> None:
    result = run(app, ["explain", name])
    assert result.exit_code == 0 and METRICS[name].meaning in result.output and "high:" in result.output


@pytest.mark.parametrize("key", knobs())
def test_every_setting_is_explained(key: str) -> None:
    result = run(app, ["explain", key])
    knob = knobs()[key]
    assert result.exit_code == 0 and knob.meaning in result.output and f"{key}: {knob.kind}" in result.output
    assert knob.default in result.output


def test_a_setting_is_found_without_its_section() -> None:
    result = run(app, ["explain", "every"])
    assert "sync.every:" in result.output and "evaluation.every:" in result.output


@pytest.mark.parametrize(("wrong", "right"), [("sync.evry", "sync.every"), ("drift_tv_tokn", "drift_tv_token")])
def test_a_misspelled_name_gets_a_suggestion(wrong: str, right: str) -> None:
    result = run(app, ["explain", wrong])
    assert result.exit_code == 2 and f"did you mean '{right}'" in result.output


def test_an_unknown_name_gets_the_command_that_lists_all() -> None:
    result = run(app, ["explain", "zzz"])
    assert result.exit_code == 2 and "list all with `offbeat explain`" in result.output


def test_without_a_name_everything_is_listed_by_group_and_can_be_explained() -> None:
    listed = run(app, ["explain"])
    names = re.findall(r"^  (\S.*?)  ", listed.output, re.M)
    assert listed.exit_code == 0 and set(names) == {*METRICS, *knobs(), *PRESETS, *EVENTS}
    assert max(map(len, listed.output.splitlines())) <= 200
    titles = [
        "metrics of a step",
        "settings at the top of the file",
        "settings in [sync]",
        "\nobjectives\n",
        "events of a run",
    ]
    places = [listed.output.index(title) for title in titles]
    assert places == sorted(places)
    for name in [*PRESETS, *EVENTS]:
        assert run(app, ["explain", name]).exit_code == 0, name
