"""`gsm8k`: grade-school word problems whose answer is one number. Scored by `verify.numeric`."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Final

from offbeat.errors import TaskError
from offbeat.tasks.data import Deferred, Row, rows
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Example, Task
from offbeat.types import Json
from offbeat.verify import final_number, numeric

INSTRUCTION: Final = "Reason step by step, and end with the answer on a line of its own: #### <number>"


def correct(text: str, columns: Mapping[str, Json]) -> float:
    r"""1 where the final answer is the reference number, in any spelling of docs/tasks.md.

    >>> correct(r"9 eggs make \boxed{\$18.00}", {"answer": "18"}), correct("16, 17 or 18", {"answer": "18"})
    (1.0, 0.0)
    """
    return float(numeric(text, str(columns["answer"])))


def reference_answer(solution: str) -> str:
    """The number after '####' in a reference solution.

    >>> reference_answer("She makes 9 * 2 = $<<9*2=18>>18.\\n#### 18")
    '18'
    """
    _, mark, answer = solution.rpartition("####")
    if not mark:
        raise TaskError(f"a GSM8K solution ends in '#### <number>', and this one does not: {solution[-80:]!r}")
    return answer.strip()


def examples(found: Iterable[Row], instruction: str = INSTRUCTION) -> Iterator[Example]:
    """Rows of GSM8K's own form, {question, answer}, as examples.

    >>> [example] = examples([{"question": "How much is 9 * 2?", "answer": "9 * 2 = 18\\n#### 18"}])
    >>> example.id, example.columns["answer"]
    ('gsm8k-0', '18')
    """
    for number, row in enumerate(found):
        content = f"{row['question']}\n\n{instruction}"
        columns: dict[str, Json] = {"answer": reference_answer(str(row["answer"]))}
        yield Example(f"gsm8k-{number}", ({"role": "user", "content": content},), columns)


def gsm8k(
    *, source: str = "openai/gsm8k", split: str = "train", subset: str = "main", instruction: str = INSTRUCTION
) -> Task:
    """The problems of one split.

    >>> gsm8k(source="gsm8k/test.jsonl").name
    'gsm8k'

    Args:
        source: A .jsonl or .parquet file, a saved dataset, or a name on the hub.
        split: Of a dataset that has splits.
        subset: Its configuration on the hub.
        instruction: What follows the question.
    """
    found = Deferred(lambda: list(examples(rows(source, split=split, subset=subset), instruction)))
    return Task("gsm8k", found, (Reward(correct),), answer=final_number)
