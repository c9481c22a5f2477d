"""`gsm8k`: grade-school word problems with one number as the answer, compared by `verify.numeric`."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Final

from offbeat.errors import TaskError
from offbeat.tasks.data import Deferred, Example, Row, evaluation_rows, rows
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Task
from offbeat.types import Json
from offbeat.verify import final_number, numeric

INSTRUCTION: Final = "Reason step by step, and end with the answer on a line of its own: #### <number>"


def correct(text: str, columns: Mapping[str, Json]) -> float:
    r"""Return 1 if the final answer is the reference number, in any spelling of docs/reference/tasks.md, else 0.

    >>> correct(r"9 eggs make \boxed{\$18.00}", {"answer": "18"}), correct("16, 17 or 18", {"answer": "18"})
    (1.0, 0.0)
    """
    return float(numeric(text, str(columns["answer"])))


def reference_answer(solution: str) -> str:
    """Return the number after '####' in a reference solution.

    >>> reference_answer("She makes 9 * 2 = $<<9*2=18>>18.\\n#### 18")
    '18'
    """
    _, mark, answer = solution.rpartition("####")
    if not mark:
        raise TaskError(f"a GSM8K solution ends in '#### <number>', but this one ends in {solution[-80:]!r}")
    return answer.strip()


def examples(found: Iterable[Row], instruction: str = INSTRUCTION, name: str = "gsm8k") -> Iterator[Example]:
    """Convert GSM8K rows, {question, answer}, to examples.

    >>> [example] = examples([{"question": "How much is 9 * 2?", "answer": "9 * 2 = 18\\n#### 18"}])
    >>> example.id, example.columns["answer"]
    ('gsm8k-0', '18')
    """
    for number, row in enumerate(found):
        content = f"{row['question']}\n\n{instruction}"
        columns: dict[str, Json] = {"answer": reference_answer(str(row["answer"]))}
        yield Example(f"{name}-{number}", ({"role": "user", "content": content},), columns)


def gsm8k(
    *, source: str = "openai/gsm8k", split: str = "train", subset: str = "main", instruction: str = INSTRUCTION
) -> Task:
    """Make the task from one split of GSM8K; evaluation asks the `test` split.

    >>> gsm8k(source="gsm8k/test.jsonl").name
    'gsm8k'

    `source`, `split` and `subset` are those of `data.load`; `instruction` follows each question.
    """
    found = Deferred(lambda: list(examples(rows(source, split=split, subset=subset), instruction)))
    task = Task("gsm8k", found, (Reward(correct),), answer=final_number)
    test = partial(evaluation_rows, source, split=split, subset=subset)
    return task.evaluated_on(lambda: list(examples(test(), instruction, "gsm8k-test")))
