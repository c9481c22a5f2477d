"""`math`: problems with a formula as the answer, from any dataset with LaTeX answers, compared by math-verify."""

from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Final, cast

from offbeat.errors import TaskError
from offbeat.tasks.data import Deferred, Example, Row, evaluation_rows, rows
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Task
from offbeat.types import Json
from offbeat.verify.extract import boxed
from offbeat.verify.latex import equivalent, final_formula

INSTRUCTION: Final = r"Reason step by step, and put your final answer within \boxed{}."
DEADLINE: Final = 0.9
"""Seconds of CPU for one completion; an ordinary answer takes a few hundredths of a second. An answer that fails is
graded twice, and both times together stay below two seconds."""


def correct(text: str, columns: Mapping[str, Json]) -> float:
    r"""Return 1 if the final answer equals the reference as a formula, else 0.

    >>> correct(r"Hence \boxed{(x-1)(x+1)}.", {"answer": "x^2 - 1"}), correct(r"\boxed{x-1}", {"answer": "x^2 - 1"})
    (1.0, 0.0)
    """
    return float(equivalent(text, str(columns["answer"])))


def reference_answer(row: Row) -> str:
    r"""Return the column 'answer', or else the last \boxed{…} of the column 'solution'.

    >>> reference_answer({"problem": "1+1?", "solution": r"It is \boxed{2}."})
    '2'
    """
    if row.get("answer") is not None:
        return str(row["answer"])
    found = boxed(str(row.get("solution", "")))
    if not found:
        raise TaskError(f"a row needs a column 'answer', or 'solution' with \\boxed{{…}}; this one has {sorted(row)}")
    return found[-1]


def examples(
    found: Iterable[Row], instruction: str = INSTRUCTION, slice_by: str | None = None, name: str = "math"
) -> Iterator[Example]:
    r"""Convert rows {problem or question, answer or solution} to examples.

    >>> [example] = examples([{"problem": "Solve $2x = 1$.", "answer": r"\frac12", "level": 1}], slice_by="level")
    >>> example.columns
    {'answer': '\\frac12', 'level': 1}
    """
    for number, row in enumerate(found):
        problem = row["problem"] if "problem" in row else row["question"]
        columns: dict[str, Json] = {"answer": reference_answer(row)}
        if slice_by is not None:
            columns[slice_by] = cast("Json", row[slice_by])
        yield Example(f"{name}-{number}", ({"role": "user", "content": f"{problem}\n\n{instruction}"},), columns)


def latex_math(
    *,
    source: str,
    split: str = "train",
    subset: str | None = None,
    slice_by: str | None = None,
    instruction: str = INSTRUCTION,
) -> Task:
    """Make the task from one split of a dataset; evaluation asks its `test` split, if it has one.

    >>> latex_math(source="math.jsonl", slice_by="level").deadline
    0.9

    `source`, `split` and `subset` are those of `data.load`; `instruction` follows each problem. `slice_by` is the
    column that the evaluation table is split by, for instance 'level'.
    """
    found = Deferred(lambda: list(examples(rows(source, split=split, subset=subset), instruction, slice_by)))
    task = Task("math", found, (Reward(correct),), deadline=DEADLINE, answer=final_formula, slice_by=slice_by)
    test = partial(evaluation_rows, source, split=split, subset=subset)
    return task.evaluated_on(lambda: list(examples(test(), instruction, slice_by, "math-test")))
