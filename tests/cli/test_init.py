"""`offbeat init`: recipes that parse, explain themselves, and overwrite nothing."""

import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli.init import OWN, PLACES, annotated, facts, next_commands, recipes
from offbeat.cli.main import app
from offbeat.config import parse
from offbeat.config.parsing import load
from offbeat.tasks.task import make
from tests.fixtures.commands import commands, faults
from tests.fixtures.tiny_model import save_model, save_tokenizer

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
    file, data = tmp_path / "my run.toml", tmp_path / "sums.jsonl"
    data.write_text('{"question": "1+1=", "answer": "2"}\n')
    written = run(app, ["init", name, "--out", str(file), *(["--data", str(data)] if name == OWN else [])])
    lines = [line.strip() for line in written.output.split("\n") if line.startswith("  ")]
    gpus = facts(recipes()[name]).get("hardware")
    assert lines[-2] == f"offbeat check '{file}'" + (f" --gpus {gpus}" if gpus else "")
    assert lines[-1].startswith(f"offbeat train '{file}'")
    assert [fault for line in commands("\n".join(lines)) for fault in faults(line)] == []


def test_a_recipe_for_existing_answers_begins_with_their_import() -> None:
    first = next_commands(recipes()["offline"], Path("run.toml"))[0]
    assert first.startswith("offbeat import answers.jsonl --into experience") and "--dry-run" not in first


def test_own_data_become_a_configuration_and_a_task_that_fit_the_model(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    save_tokenizer(tmp_path / "model", chat=True)
    (tmp_path / "sums.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n{"question": "2+2=", "answer": "4"}\n')
    out = tmp_path / "run.toml"
    options = ["--data", str(tmp_path / "sums.jsonl"), "--model", str(tmp_path / "model"), "--out", str(out)]
    written = run(app, ["init", "own-data", *options])
    assert written.exit_code == 0 and "prompt: question, as a user message: '1+1='" in written.output, written.output
    config = load(out)
    assert (config.engine.kind, config.sampling.max_tokens, config.engine.max_prompt_tokens) == ("hf", 32, 32)
    task = make(config.task.name)
    assert task.examples[0].prompt == ({"role": "user", "content": "1+1="},)
    assert [one("The answer is 2.", task.examples[0].record) for one in task.rewards] == [1.0]
    assert run(app, ["check", str(out)]).exit_code == 0
    again = run(app, ["init", "own-data", *options])
    assert again.exit_code == 2 and "already exists" in again.output


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["own-data"], "--data is the file with your prompts"),
        (["quickstart", "--data", "sums.jsonl"], "--data is the file with your prompts"),
        (["own-data", "--data", "nothing.jsonl"], "does not exist"),
        (["own-data", "--data", "rollouts.jsonl"], "offbeat import rollouts.jsonl"),
        (["own-data", "--data", "texts.jsonl"], "no column looks like a prompt among 'text'"),
    ],
)
def test_own_data_that_cannot_be_asked_get_a_sentence(
    options: list[str], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("rollouts.jsonl").write_text('{"prompt": "1+1=", "completion": "2", "reward": 1}\n')
    Path("texts.jsonl").write_text('{"text": "1+1=2"}\n')
    result = run(app, ["init", *options])
    assert result.exit_code == 2 and says in " ".join(result.output.replace("│", " ").split()), result.output
    assert not Path("run.toml").exists()
