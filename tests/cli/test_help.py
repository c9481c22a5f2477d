"""The help of every command has an example, and `explain` knows every metric and setting."""

import re
from collections.abc import Iterator

import pytest
import typer
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.config.knobs import knobs
from offbeat.events import EVENTS
from offbeat.metrics import METRICS
from offbeat.objective.presets import PRESETS

run = CliRunner(env={"COLUMNS": "200", "TERM": "dumb"}).invoke


def commands(group: typer.Typer = app, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the words of every command."""
    for command in group.registered_commands:
        assert command.callback is not None
        yield (*before, command.name or command.callback.__name__)
    for inner in group.registered_groups:
        assert inner.typer_instance is not None and inner.name is not None
        yield from commands(inner.typer_instance, (*before, inner.name))


def shows_itself(group: typer.Typer, words: tuple[str, ...]) -> bool:
    """Return True if the help of a command contains an example of that command below its usage line."""
    result = run(group, [*words, "--help"])
    below = re.sub(r"\s+", " ", result.output).partition("[OPTIONS]")[2]
    return result.exit_code == 0 and f"offbeat {' '.join(words)}" in below


COMMANDS = list(commands())


def test_the_commands_are_found() -> None:
    names = {" ".join(words) for words in COMMANDS}
    assert names >= {"quickstart", "init", "check", "doctor", "explain", "train", "resume", "log stats"}


def test_help_has_an_example_of_the_command_itself() -> None:
    assert [words for words in COMMANDS if not shows_itself(app, words)] == []


def test_a_command_without_an_example_is_detected() -> None:
    other = typer.Typer()
    other.command("silent")(lambda: None)
    other.command("speaking", help="As in `offbeat speaking`.")(lambda: None)
    assert not shows_itself(other, ("silent",)) and shows_itself(other, ("speaking",))


def unexplained(name: str, *parts: str) -> list[str]:
    """Return what `offbeat explain` should say of a name and does not."""
    result = run(app, ["explain", name])
    return [f"{name}: {part}" for part in parts if result.exit_code or part not in result.output]


def test_every_metric_is_explained() -> None:
    assert [
        gap for name, metric in METRICS.items() for gap in unexplained(name, metric.meaning, metric.formula, "high:")
    ] == []


def test_every_setting_is_explained() -> None:
    said = {key: (knob.meaning, f"{key}: {knob.kind}", knob.default) for key, knob in knobs().items()}
    assert [gap for key, parts in said.items() for gap in unexplained(key, *parts)] == []


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
