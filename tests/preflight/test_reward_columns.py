"""`check` sees that a reward function names a column that the data does not have."""

from pathlib import Path

import pytest

from offbeat.preflight.checks import check_columns
from offbeat.tasks.task import custom

ROWS = 'examples = [{"prompt": "1+1=", "answer": "2", "level": 3}]\n'


@pytest.mark.parametrize(
    ("reward", "missing"),
    [
        ("def reward(completions, answr, **columns):\n    return [1.0]", "answr"),
        ("def reward(completions, answer, level, **columns):\n    return [1.0]", None),
        ("def reward(prompts, completions, completion_ids, solution=None):\n    return [1.0]", None),
        ("def reward(completions, **columns):\n    return [float(columns['solution'][0])]", "solution"),
        ("def reward(completions, **columns):\n    return [float(columns.get('solution') or 0)]", None),
        ("def reward(text, row):\n    return float(text == row['target'])", "target"),
        ("def reward(text, row):\n    other = {'target': 1}\n    return other['target'] + len(row['prompt'])", None),
    ],
)
def test_a_column_that_is_missing_is_found(reward: str, missing: str | None, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(ROWS + reward)
    found = check_columns(custom(path=str(file)), "mine.py")
    assert len(found) == (missing is not None), found
    assert missing is None or f"names the column {missing!r}, which the data does not have" in found[0]


def test_the_nearest_column_is_suggested(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(ROWS + "def reward(text, columns):\n    return float(text == columns['answers'])")
    assert "did you mean 'answer'?" in check_columns(custom(path=str(file)), "mine.py")[0]


def test_a_column_that_some_rows_lack_is_found(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    rows = 'examples = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "anwser": "3"}]\n'
    file.write_text(rows + "def reward(completions, answer, **columns):\n    return [1.0]")
    [found] = check_columns(custom(path=str(file)), "mine.py")
    assert "'answer', which 1 of the rows (mine-1) do not have; did you mean 'anwser'?" in found
