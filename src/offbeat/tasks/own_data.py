"""A task file for data of your own: which column is the prompt, which the right answer, and how answers are compared.

`offbeat init own-data` writes it; from then on it is the user's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

from offbeat.tasks.data import Row, prompt_column
from offbeat.verify import chosen
from offbeat.verify.extract import boxed
from offbeat.verify.numbers import quantity

ANSWERS: Final = (
    *("answer", "solution", "ground_truth", "final_answer", "reference_answer", "correct_answer", "reference"),
    *("expected", "target", "gold", "label", "output", "response", "completion"),
)
"""Names of the column with the right answer, the most reliable first."""
LONGEST: Final = 80
"""Characters of an answer that another one can equal word by word."""
_UNKNOWN: Final = 'raise NotImplementedError("say here what an answer is worth: return a number from 0 to 1")'
_FILE: Final = '''"""What is asked, and what an answer is worth. From `offbeat init own-data`; change it as you like."""

from pathlib import Path

from offbeat.tasks.data import ColumnMap, load
{imports}

def examples():
    return load({source}{columns}).examples


def reward(text, columns):
    """{meaning}. `columns` has the other columns of the row."""
    {body}
'''


def own_task(data: str, rows: Sequence[Row], *, beside: Path, chat: bool) -> tuple[str, str]:
    """Return the task file for data of which `rows` are the first, and what its reward is, in words.

    `beside` is the directory that the file will be in.

    >>> own_task("sums.jsonl", [{"question": "2+3=", "answer": "5"}], beside=Path(), chat=True)[1]
    '1 if the final answer is the number in answer, else 0'
    """
    prompt, path, source = prompt_column(rows[0]), Path(data), repr(data)
    column = next((name for name in ANSWERS if name != prompt and name in rows[0]), "")
    answers, cell = [row.get(column) for row in rows], f"columns[{column!r}]"
    if not column and isinstance(rows[0][prompt], list):  # of a conversation, the last message is the answer
        column, cell = prompt, f"columns[{prompt!r}][-1]['content']"
        answers = [cast(Any, row[prompt])[-1].get("content") for row in rows if row.get(prompt)]
    meaning, imports, body = _comparison(column, [str(answer).strip() for answer in answers], f"str({cell})")
    if path.exists():
        near = path.resolve().parent == beside.resolve()
        source = f"Path(__file__).with_name({path.name!r})" if near else repr(str(path.resolve()))
    columns = f", ColumnMap(prompt={prompt!r}, chat={chat})" if isinstance(rows[0][prompt], str) else ""
    return _FILE.format(source=source, columns=columns, imports=imports, meaning=meaning, body=body), meaning


def _comparison(column: str, answers: Sequence[str], cell: str) -> tuple[str, str, str]:
    """Return how completions are compared with a column: in words, an import, and a statement.

    >>> [_comparison("gold", [right], "")[0].split(" the ")[2] for right in ("#### 18", "B", "x^2", "Paris")]
    ['number after #### in gold, else 0', 'option in gold, else 0', 'formula in gold, else 0', 'text in gold, else 0']
    """
    for kind, fits, names, call in (
        (
            "number after #### in",
            lambda text: "####" in text,
            "numeric",
            f"numeric(text, {cell}.rpartition('####')[2])",
        ),
        ("number in", quantity, "numeric", f"numeric(text, {cell})"),
        ("option in", lambda text: chosen(text, "ABCDE") == text, "choice", f"choice(text, {cell})"),
        ("last formula in a box in", boxed, "extract, latex", f"latex.equivalent(text, extract.boxed({cell})[-1])"),
        ("formula in", lambda text: {"\\", "^"} & {*text}, "latex", f"latex.equivalent(text, {cell})"),
        ("text in", lambda text: 0 < len(text) <= LONGEST, "exact", f"exact(text, {cell})"),
    ):
        if column and all(map(fits, answers)):
            meaning = f"1 if the final answer is the {kind} {column}, else 0"
            return meaning, f"from offbeat.verify import {names}\n", f"return float({call})"
    why = f"the answers in {column} are too long to be compared" if column else "no column looks like the right answer"
    return f"Not written yet: {why}", "", _UNKNOWN
