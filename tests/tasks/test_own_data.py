"""Data of your own: the task file finds prompt and answer, and compares answers as what they are."""

import json
from pathlib import Path

import pytest

from offbeat.cli.init import own_task
from offbeat.preflight.checks import check_columns
from offbeat.tasks.task import Task, make

ASKED = {"role": "user", "content": "1+1?"}


def own(place: Path, row: dict[str, object]) -> Task:
    """Return the task of the file that is written for data of one row."""
    data = place / "data.jsonl"
    data.write_text(json.dumps(row) + "\n", encoding="utf-8")
    file = place / "data_task.py"
    file.write_text(own_task(str(data), [row], beside=place, chat=True)[0], encoding="utf-8")
    return make(str(file))


@pytest.mark.parametrize(
    ("row", "right", "wrong"),
    [
        ({"question": "1+1?", "answer": "2"}, "It is 2.", "It is 3."),
        ({"question": "1+1?", "answer": 2}, "2", "12"),
        ({"question": "1+1?", "answer": "1+1 = <<1+1=2>>2\n#### 2"}, "#### 2", "#### 1"),
        ({"problem": "Which?", "label": "B"}, "The answer is (B).", "The answer is (A)."),
        ({"problem": "Factor.", "solution": r"So \boxed{(x-1)(x+1)}."}, r"\boxed{x^2-1}", r"\boxed{x-1}"),
        ({"problem": "Half?", "ground_truth": r"\frac12"}, r"\boxed{0.5}", r"\boxed{0.6}"),
        ({"instruction": "Where?", "output": "New York"}, "The answer is **New York**.", "The answer is Boston."),
        ({"prompt": [ASKED], "target": "2"}, "2", "3"),
        ({"messages": [ASKED, {"role": "assistant", "content": "2"}]}, "2", "3"),
    ],
)
def test_right_and_wrong_answers_are_told_apart(row: dict[str, object], right: str, wrong: str, tmp_path: Path) -> None:
    pytest.importorskip("math_verify")
    task = own(tmp_path, row)
    [example] = task.examples
    assert isinstance(example.prompt, tuple) and len(example.prompt) == 1 and example.prompt[0]["role"] == "user"
    assert [task.rewards[0](text, example.record) for text in (right, wrong)] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"prompt": "Write."}, "no column looks like the right answer"),
        ({"prompt": "Write.", "answer": "a " * 99}, "long"),
    ],
)
def test_a_reward_that_is_not_known_says_so_and_gives_no_number(
    row: dict[str, object], why: str, tmp_path: Path
) -> None:
    task = own(tmp_path, row)
    assert why in (tmp_path / "data_task.py").read_text(encoding="utf-8")
    with pytest.raises(NotImplementedError, match="say here what an answer is worth"):
        task.rewards[0]("text", task.examples[0].record)
    [problem] = check_columns(task, "data_task.py")
    assert "reward 'reward' is not written yet" in problem
