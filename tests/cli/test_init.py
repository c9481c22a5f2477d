"""`offbeat init`: recipes that parse, explain themselves, and overwrite nothing."""

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lab.site.commands import commands, faults
from offbeat.cli.init import PLACES, annotated, facts, next_commands, recipes
from offbeat.cli.main import app
from offbeat.config import parse

run = CliRunner(env={"COLUMNS": "200"}).invoke
NAMES = list(recipes())


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_valid_and_says_where_it_was_run(name: str) -> None:
    text = recipes()[name]
    parse(tomllib.loads(text))
    assert text.startswith(f"# {name}: ") and ("\n# Run by us on " in text or "\n# Not run by us" in text)


@pytest.mark.parametrize("name", NAMES)
def test_comments_explain_every_setting_and_change_no_value(name: str) -> None:
    plain, written = recipes()[name], annotated(recipes()[name])
    assert tomllib.loads(written) == tomllib.loads(plain)
    lines = written.split("\n")
    settings = [at for at, line in enumerate(lines) if " = " in line and line[0].isalpha()]
    assert settings and all(lines[at - 1].startswith("# ") for at in settings)


def test_recipes_are_listed_and_an_existing_file_is_not_overwritten(tmp_path: Path) -> None:
    listed = run(app, ["init"])
    assert listed.exit_code == 0 and all(f"  {name} " in listed.output for name in NAMES)
    file = tmp_path / "run.toml"
    assert run(app, ["init", "quickstart", "--out", str(file)]).exit_code == 0
    assert "# v: publish every v steps" in file.read_text()
    again = run(app, ["init", "quickstart", "--out", str(file)])
    assert again.exit_code == 2 and "already exists" in again.output


def test_a_misspelled_recipe_gets_a_suggestion(tmp_path: Path) -> None:
    result = run(app, ["init", "quikstart", "--out", str(tmp_path / "run.toml")])
    assert result.exit_code == 2 and "did you mean 'quickstart'?" in result.output


def test_recipes_are_listed_by_what_a_user_has_with_memory_and_time() -> None:
    listed = run(app, ["init"]).output
    titles = [listed.index(f"{title}:") for title in PLACES.values()]
    assert titles == sorted(titles)
    for name, text in recipes().items():
        known = facts(text)
        group = listed.index(f"{PLACES[known['for']]}:")
        place = listed.index(f"  {name} ")
        assert group < place and not any(group < other < place for other in titles), name
        assert known["needs"] in listed[place:].split("\n")[1]


@pytest.mark.parametrize("name", NAMES)
def test_the_next_commands_are_those_for_the_hardware_of_the_recipe(name: str, tmp_path: Path) -> None:
    file = tmp_path / "my run.toml"
    written = run(app, ["init", name, "--out", str(file)])
    lines = [line.strip() for line in written.output.split("\n") if line.startswith("  ")]
    gpus = facts(recipes()[name]).get("hardware")
    assert lines[-2] == f"offbeat check '{file}'" + (f" --gpus {gpus}" if gpus else "")
    assert lines[-1].startswith(f"offbeat train '{file}'")
    assert [fault for line in commands("\n".join(lines)) for fault in faults(line)] == []


def test_a_recipe_for_existing_answers_begins_with_their_import() -> None:
    first = next_commands(recipes()["offline"], Path("run.toml"))[0]
    assert first.startswith("offbeat import answers.jsonl --into experience") and "--dry-run" not in first
