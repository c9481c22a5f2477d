"""Sums of two numbers of one digit, for the learning figures.

There are a hundred, and a completion is right where it is exactly the answer. So the pass rate at temperature 1 need
not be sampled: it is the mean probability of a hundred sequences, and versions that differ by a thousandth can be told
apart.
"""

from collections.abc import Mapping
from typing import Final

from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Example, Task
from offbeat.types import Json


def right(text: str, columns: Mapping[str, Json]) -> float:
    """1 for the answer and nothing beside it.

    >>> right("42", {"answer": "42"}), right("042", {"answer": "42"})
    (1.0, 0.0)
    """
    return float(text == columns["answer"])


SUMS: Final = [Example(f"{a}+{b}", f"{a}+{b}=", {"answer": str(a + b)}) for a in range(10) for b in range(10)]
task: Final = Task("sums", SUMS, (Reward(right),))
