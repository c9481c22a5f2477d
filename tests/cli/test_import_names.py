"""`offbeat import` names tasks and ends completions as a run does, and says what a tokenizer cannot encode."""

import json
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.config import parse
from offbeat.experience.log import ExperienceLog
from offbeat.run.build import make_task
from offbeat.run.quickstart import tokenizer
from tests.fixtures.tiny_model import load_tokenizer, save_tokenizer

TASK = "examples = [{'prompt': '1+1='}]\ndef reward(text, columns):\n    return float(text == '2')\n"
NAMED = (
    "from offbeat.tasks.data import Example\nfrom offbeat.tasks.rewards import Reward\n"
    "from offbeat.tasks.task import Task\ndef two(text, columns):\n    return float(text == '2')\n"
    "task = Task('sums', [Example('one', '1+1=', {})], (Reward(two),))\n"
)


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(app, [str(argument) for argument in arguments])


def rows(place: Path, *found: object) -> Path:
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in found))
    return place / "rows.jsonl"


@pytest.mark.parametrize(("source", "name"), [(TASK, "mine"), (NAMED, "sums")])
def test_a_task_file_has_one_name_in_import_score_and_runs(tmp_path: Path, source: str, name: str) -> None:
    (tmp_path / "mine.py").write_text(source)
    save_tokenizer(tmp_path / "tokenizer")
    file = rows(tmp_path, {"prompt": "1+1=", "responses": ["2", "3"], "rewards": [1, 1]})
    options = ("--task", tmp_path / "mine.py", "--source", "human", "--tokenizer", tmp_path / "tokenizer")
    assert run("import", file, "--into", tmp_path / "experience", *options).exit_code == 0
    with ExperienceLog.open(tmp_path / "experience") as log:
        assert log.read([0])[0].prompt.task == name
    assert make_task(parse({"task": {"name": str(tmp_path / "mine.py")}})).name == name
    scored = run("score", tmp_path / "experience", "--task", tmp_path / "mine.py")
    assert scored.exit_code == 0 and "nothing was written" in scored.output, scored.output


def test_a_task_without_groups_is_answered_with_the_tasks_of_the_log(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK)
    file = rows(tmp_path, {"prompt": [1], "responses": [[2], [3]], "rewards": [1, 0]})
    assert run("import", file, "--into", tmp_path / "log", "--task", "mine-2", "--source", "human").exit_code == 0
    missing = run("score", tmp_path / "log", "--task", tmp_path / "mine.py")
    assert missing.exit_code == 2
    assert "has no groups of task 'mine'; it has groups of: mine-2" in " ".join(missing.output.replace("│", "").split())


def test_a_task_file_that_is_missing_stops_the_import(tmp_path: Path) -> None:
    file = rows(tmp_path, {"prompt": [1], "responses": [[2]]})
    result = run("import", file, "--into", tmp_path / "log", "--task", tmp_path / "gone.py", "--source", "human")
    assert result.exit_code == 2 and "gone.py" in result.output and not (tmp_path / "log").exists()


def stop_at(place: Path, *tokens: str) -> list[int]:
    """Write a generation config that ends completions at these tokens, and return their ids."""
    ids: list[int] = load_tokenizer(place).convert_tokens_to_ids(list(tokens))
    (place / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return ids


def imported(place: Path, row: dict[str, object], *options: str) -> list[int]:
    """Import one row and return the tokens of its first completion."""
    chosen = ("--task", "t", "--source", "human", "--tokenizer", place, *options)
    result = run("import", rows(place, row), "--into", place / "log", *chosen)
    assert "imported     1 groups" in result.output, result.output
    with ExperienceLog.open(place / "log") as log:
        tokens: list[int] = log.read([0])[0].completions[0].token_ids.tolist()
    return tokens


def test_text_that_ends_with_a_stop_token_gets_no_second_one(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    [stop] = stop_at(tmp_path, "?")
    assert imported(tmp_path, {"prompt": "1+1=", "responses": ["2?"]})[-1] == stop


def test_the_stop_token_of_the_chat_template_ends_an_answer_in_a_chat(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, chat=True)  # its template ends every message with >
    _, turn = stop_at(tmp_path, "<end>", ">")
    two, end = load_tokenizer(tmp_path).convert_tokens_to_ids(["2", "<end>"])
    row: dict[str, object] = {"prompt": [{"role": "user", "content": "1+1"}], "responses": ["2"]}
    assert imported(tmp_path, row) == [two, turn] and turn != end


def test_a_variable_of_the_chat_template_is_set_for_prompts_in_messages(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if think %}?{% endif %}"
    tokenizer.save_pretrained(tmp_path)
    row: dict[str, object] = {"prompt": [{"role": "user", "content": "1+1"}], "responses": ["2"]}
    imported(tmp_path, row, "--chat-template", "think=true")
    with ExperienceLog.open(tmp_path / "log") as log:
        assert tokenizer.decode(log.read([0])[0].prompt.token_ids.tolist()) == "1+1?"


def test_text_outside_the_vocabulary_is_refused_and_not_stored_as_unknown_tokens(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    file = rows(tmp_path, {"prompt": "1+1=", "responses": ["2", "Zwei"]}, {"prompt": "1×1=", "responses": ["1"]})
    options = ("--task", "t", "--source", "human", "--tokenizer", tmp_path, "--dry-run")
    result = run("import", file, "--into", tmp_path / "log", *options)
    assert "imported     0 groups" in result.output and "unreadable: 2" in result.output
    assert "the tokenizer has no token for 'Z' in 'Zwei'" in result.output
    assert "the tokenizer has no token for '×' in '1×1='" in result.output


def test_the_tokenizer_of_the_quickstart_writes_no_pad_tokens_for_unknown_characters(tmp_path: Path) -> None:
    tokenizer().save_pretrained(tmp_path)  # its model replaces unknown characters by the pad token
    file = rows(tmp_path, {"prompt": "6 * 7 =", "responses": ["42"]}, {"prompt": "6+7=", "responses": ["13"]})
    options = ("--task", "t", "--source", "human", "--tokenizer", tmp_path, "--dry-run")
    result = run("import", file, "--into", tmp_path / "log", *options)
    assert "imported     1 groups" in result.output and "no token for ' ' in '6 * 7 ='" in result.output


def test_a_column_named_answers_holds_completions(tmp_path: Path) -> None:
    file = rows(tmp_path, {"prompt": [1], "answers": [[2], [3]], "scores": [1, 0]})
    result = run("import", file, "--into", tmp_path / "log", "--task", "t", "--source", "human", "--dry-run")
    assert "response  <- answers" in result.output and "imported     1 groups, 2 completions" in result.output
