"""Your own task is one file: the documented ones run in the pool, by path."""

import re
from pathlib import Path

import pytest

from offbeat.errors import TaskError
from offbeat.scoring.pool import ScoringPool
from offbeat.tasks.task import custom, make
from offbeat.types import Score

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "bring-a-reward.md"


def documented(name: str) -> str:
    """Return the file of that name from the docs: a block that begins with a comment with the name."""
    found = re.search(rf"```py\n# {re.escape(name)}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found, f"docs/how-to/bring-a-reward.md shows no {name}"
    return found[1]


def test_the_documented_task_is_short_and_runs_in_the_pool(tmp_path: Path) -> None:
    source = documented("rhymes.py")
    assert len(source.splitlines()) <= 30
    file = tmp_path / "rhymes.py"
    file.write_text(source)
    task = make("custom", {"path": str(file)})
    assert task.name == "rhymes" and len(task.examples) >= 3
    example = task.examples[0]
    with ScoringPool.of(task, workers=1) as pool:
        good, bad = pool.score_all([("night", example.record), ("house of cards and so on", example.record)])
    assert isinstance(good, Score) and isinstance(bad, Score) and good.reward > bad.reward
    assert set(good.breakdown) == {reward.name for reward in task.rewards}


def test_the_documented_trl_function_runs_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "boxed.py"
    file.write_text(documented("boxed.py"))
    task = custom(path=str(file))
    assert task.rewards[0].trl
    with ScoringPool.of(task, workers=1) as pool:
        right = pool.score(r"so \boxed{4}", task.examples[0].record).result(timeout=60)
        wrong = pool.score(r"so \boxed{5}", task.examples[0].record).result(timeout=60)
    assert (right, wrong) == (Score(1.0, {"reward": 1.0}), Score(0.0, {"reward": 0.0}))


def test_a_file_may_define_the_task_itself(tmp_path: Path) -> None:
    file = tmp_path / "whole.py"
    file.write_text("from offbeat.tasks.arithmetic import arithmetic\ntask = arithmetic(digits=1)\n")
    assert custom(path=str(file)).examples[0].columns["difficulty"] == "1 digits, 2 terms"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("example = []\ndef reward(text, columns): return 1.0", "defines no 'examples'.*did you mean 'example'"),
        ("examples = [{'prompt': 'x'}]", "defines no 'reward'"),
        ("examples = ['x']\ndef reward(text, columns): return 1.0", "example 0 is 'x'"),
        ("examples = [{'prompt': 'x'}]\nrewards = [7]", "7 is not a reward"),
    ],
)
def test_a_file_that_defines_no_task_is_refused_with_what_is_missing(source: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(TaskError, match=message):
        len(custom(path=str(file)).examples)


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="give the path of a Python file"):
        custom(path=str(tmp_path / "none.py"))
