"""`offbeat init`: recipes that parse, explain themselves, and overwrite nothing."""

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli.init import annotated, recipes
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
    assert listed.exit_code == 0 and all(f"{name}: " in listed.output for name in NAMES)
    file = tmp_path / "run.toml"
    assert run(app, ["init", "quickstart", "--out", str(file)]).exit_code == 0
    assert "# v: publish every v steps" in file.read_text()
    again = run(app, ["init", "quickstart", "--out", str(file)])
    assert again.exit_code == 2 and "already exists" in again.output


def test_a_misspelled_recipe_gets_a_suggestion(tmp_path: Path) -> None:
    result = run(app, ["init", "quikstart", "--out", str(tmp_path / "run.toml")])
    assert result.exit_code == 2 and "did you mean 'quickstart'?" in result.output
