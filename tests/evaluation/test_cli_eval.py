"""`offbeat eval` and `offbeat score`: on stored groups, on a tiny model, and with a changed reward function."""

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.tasks.arithmetic import arithmetic
from offbeat.tasks.data import tokens
from offbeat.types import Completion, Group, Score, Unscorable, VersionSpan
from tests.fixtures.tiny_model import load_tokenizer, save_model, save_tokenizer

pytest.importorskip("lance")
transformers = pytest.importorskip("transformers")
run = CliRunner(env={"COLUMNS": "220"}).invoke

LENIENT = (
    "from offbeat.tasks.arithmetic import arithmetic\nfrom offbeat.tasks.rewards import Reward\nimport dataclasses\n"
)
LENIENT += "def lenient(text, columns):\n    if text == '13':\n        raise KeyError('unlucky')\n"
LENIENT += "    return float(abs(int(text) - int(columns['answer'])) <= 1)\n"
LENIENT += "task = dataclasses.replace(arithmetic(), rewards=(Reward(lenient),))\n"


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty groups of four: a right answer, one too high by 1, a wrong one, and one without a score."""
    from offbeat.experience.log import ExperienceLog

    place = tmp_path_factory.mktemp("run")
    save_tokenizer(place / "tokenizer")
    tokenizer = load_tokenizer(place / "tokenizer")
    task = arithmetic()
    with ExperienceLog.open(place / "experience") as opened:
        receipt = opened.append(_group(task, number, tokenizer) for number in range(30))
    assert len(receipt.accepted) == 30
    return place / "experience"


def _group(task: object, number: int, tokenizer: object) -> Group:
    example = task.examples[number]  # type: ignore[attr-defined]
    answer = int(str(example.columns["answer"]))
    given = [(str(answer), Score(1.0)), (str(answer + 1), Score(0.0)), ("13", Score(0.0)), ("7", Unscorable("timeout"))]
    completions = []
    for i, (text, score) in enumerate(given):
        ids = tokenizer.encode(text)  # type: ignore[attr-defined]
        span = (VersionSpan(number // 15, 0, len(ids)),)
        completions.append(Completion(f"g{number}/{i}", ids, [-0.5] * len(ids), span, score=score))
    prompt = task.prompt(example, tokens(example.prompt, tokenizer))  # type: ignore[attr-defined]
    return Group(f"g{number}", prompt, tuple(completions))


def test_stored_groups_are_evaluated_with_intervals_and_slices(log: Path) -> None:
    result = run(app, ["eval", str(log), "--task", "arithmetic", "--slice", "version", "--k", "2"])
    assert result.exit_code == 0, result.output
    everything = next(line for line in result.output.splitlines() if " all " in line)
    assert "0.333 [0.169, 0.601]" in everything and "0.667 [0.399, 0.900]" in everything  # pass@1 and pass@2 of 1 in 3
    assert everything.split("│")[2:5] == [" 30      ", " 120         ", " 30         "]
    assert "maj@2" in result.output and result.output.count("version ") == 2


def test_changed_scores_are_shown_and_nothing_is_written_by_default(log: Path, tmp_path: Path) -> None:
    file = tmp_path / "lenient.py"
    file.write_text(LENIENT)
    before = run(app, ["eval", str(log), "--task", "arithmetic"]).output
    result = run(app, ["score", str(log), "--task", "arithmetic"])
    assert result.exit_code == 0, result.output
    cells = [line.split("│")[1:-1] for line in result.output.splitlines() if "│" in line]
    table = {(before.strip(), now.strip()): int(count) for before, now, count in cells}
    assert table == {("unscorable (timeout)", "0"): 30, ("unchanged", ""): 90}
    assert (
        "nothing was written" in result.output and run(app, ["eval", str(log), "--task", "arithmetic"]).output == before
    )


def test_written_scores_replace_the_stored_ones_except_unscorable_ones(log: Path, tmp_path: Path) -> None:
    from offbeat.experience.log import ExperienceLog

    copy = tmp_path / "experience"
    shutil.copytree(log, copy)
    shutil.copytree(log.parent / "tokenizer", tmp_path / "tokenizer")
    file = tmp_path / "lenient.py"
    with ExperienceLog.open(copy) as opened:
        asked = {group.id: str(group.prompt.columns["answer"]) for group in opened.groups()}
    down = f"str(columns['answer']) == {asked['g3']!r}"  # for every answer to this prompt, so that none is to blame
    file.write_text(LENIENT.replace("text == '13'", down).replace("KeyError", "ConnectionError"))
    result = run(app, ["score", str(copy), "--task", str(file), "--write", "--max-failures", "0.5"])
    assert result.exit_code == 0, result.output
    assert "ConnectionError: unlucky" in result.output
    changed = 2 * sum(answer != asked["g3"] for answer in asked.values())
    assert f"{changed} late scores appended" in result.output
    with ExperienceLog.open(copy) as opened:
        down_group, group = opened.read(["g3", next(one for one in asked if asked[one] != asked["g3"])])
    assert group.completions[0].score == Score(1.0)
    assert group.completions[1].score == Score(1.0, {"lenient": 1.0})
    assert down_group.completions[0].score == Score(1.0)
    assert down_group.completions[3].score == Unscorable("timeout")


def test_an_answer_that_makes_the_reward_function_raise_is_wrong_and_its_error_is_shown(
    log: Path, tmp_path: Path
) -> None:
    file = tmp_path / "lenient.py"
    file.write_text(LENIENT.replace("'13'", "'7'"))
    result = run(app, ["score", str(log), "--task", str(file), "--max-failures", "0.01"])
    assert result.exit_code == 0, result.output
    cells = [line.split("│")[1:-1] for line in result.output.splitlines() if "│" in line]
    assert [" unscorable (timeout) ", " 0     ", " 30          "] in cells, cells
    why = "because the answer made its scoring fail (crash: lenient: KeyError: 'unlucky' (lenient.py, line 6))"
    assert why in result.output


def test_a_reward_function_that_always_fails_stops_with_examples(log: Path, tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text(LENIENT.replace("text == '13'", "True"))
    result = run(app, ["score", str(log), "--task", str(file)])
    assert result.exit_code == 1 and "could not be scored" in result.output and "unlucky" in result.output


def test_a_tiny_model_is_evaluated_with_intervals(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    command = ["eval", str(tmp_path / "model"), "--task", "arithmetic", "--set", "digits=1", "--set", 'operators="+"']
    command += ["--prompts", "6", "--samples", "4", "--max-tokens", "3"]
    first, again = run(app, command), run(app, command)
    assert first.exit_code == 0, first.output
    assert "pass@4" in first.output and "maj@4" in first.output and " 24 " in first.output
    assert first.stdout == again.stdout and "0.000 [0.000, " in first.stdout
    other = run(app, [*command, "--chat-template", "enable_thinking=false"])
    assert other.exit_code == 2 and "no chat template, so chat_template_kwargs has no effect" in other.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["eval", "LOG", "--task", "arithmetik"], "did you mean 'arithmetic'"),
        (["eval", "LOG", "--task", "arithmetic", "--set", "digits"], "need KEY=VALUE"),
        (["eval", "LOG", "--task", "none.py"], "does not exist"),
        (["eval", "./nowhere", "--task", "arithmetic"], "neither an experience log nor the directory of a model"),
        (["eval", "LOG", "--task", "OTHER"], "has no groups of task 'other'"),
        (["score", "nowhere", "--task", "arithmetic"], "no experience log at nowhere"),
        (["score", "LOG", "--task", "arithmetic", "--tokenizer", "nowhere"], "is not a directory"),
    ],
)
def test_a_wrong_argument_is_answered_with_the_right_one(
    arguments: list[str], message: str, log: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other.py"
    other.write_text("examples = [{'prompt': 'x'}]\ndef reward(text, columns):\n    return 1.0\n")
    replaced = [str(log) if a == "LOG" else str(other) if a == "OTHER" else a for a in arguments]
    result = run(app, replaced)
    assert result.exit_code in (1, 2) and message in " ".join(result.output.split()), result.output


def test_a_mistyped_path_is_an_error_at_once_and_never_looked_up_on_the_network(tmp_path: Path) -> None:
    result = run(app, ["eval", str(tmp_path / "nolog"), "--task", "arithmetic"])
    assert result.exit_code == 2 and "neither an experience log" in result.output
    result = run(app, ["eval", "nolog", "--task", "arithmetic"])
    assert result.exit_code == 2 and "owner/name" in result.output
