"""A task file or data file that is broken is one sentence with the file, the line and what to do."""

from pathlib import Path

import pytest

from offbeat.errors import DataError, TaskError
from offbeat.tasks.data import rows
from offbeat.tasks.task import make


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("x = 1\ndef reward(:\n", ("SyntaxError", "(line 2)", "fix the file")),
        ("x = 1\n1 / 0\n", ("ZeroDivisionError: division by zero", "(line 2)")),
        ("import nowhere_at_all", ("needs nowhere_at_all, which is not installed", "pip install")),
        ("examples = 3\ndef reward(text, columns): return 0", ("the examples of", "TypeError")),
        ("def examples():\n    raise KeyError\ndef reward(text, columns): return 0", ("KeyError", "(line 2)")),
    ],
)
def test_a_broken_task_file_is_named_with_its_line(tmp_path: Path, source: str, words: tuple[str, ...]) -> None:
    file = tmp_path / "mine.py"
    file.write_text(source)
    with pytest.raises(TaskError) as caught:
        len(make(str(file)).examples)
    message = str(caught.value)
    assert str(file) in message and all(word in message for word in words) and "\n" not in message


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b'{"prompt": "1+1="', b"[" * 100_000])
def test_a_broken_line_of_data_is_named(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt": "1+1="}\n' + content)
    with pytest.raises(DataError, match=r"rows\.jsonl, line 2 is not JSON: .*; repair or remove the line"):
        list(rows(file))


def test_broken_parquet_and_a_broken_dataset_are_named(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"rows\.parquet cannot be read as Parquet: .*; write or copy it again"):
        list(rows(tmp_path / "rows.parquet"))
    (tmp_path / "saved").mkdir()
    with pytest.raises(DataError, match=r"datasets cannot load .*saved: .*; check the path or name"):
        list(rows(tmp_path / "saved"))
