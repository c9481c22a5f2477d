"""Sums of two numbers of one digit, for the learning figures.

There are a hundred sums, and a completion is right only if it is exactly the answer. So the pass rate at temperature 1
needs no sampling: it is the mean probability of a hundred sequences, and a difference of a thousandth between two
versions is visible.
"""

from collections.abc import Mapping
from typing import Final

from offbeat.tasks.data import Example
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Task
from offbeat.types import Json


def right(text: str, columns: Mapping[str, Json]) -> float:
    """Return 1 for exactly the answer, otherwise 0.

    >>> right("42", {"answer": "42"}), right("042", {"answer": "42"})
    (1.0, 0.0)
    """
    return float(text == columns["answer"])


SUMS: Final = [Example(f"{a}+{b}", f"{a}+{b}=", {"answer": str(a + b)}) for a in range(10) for b in range(10)]
task: Final = Task("sums", SUMS, (Reward(right),))
