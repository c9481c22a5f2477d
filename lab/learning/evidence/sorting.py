"""Sorting six digits: a task of the evidence. The prompts of its pass rate are never trained on."""

import random
from typing import Final

from lab.learning.task import right
from offbeat.tasks.data import Example
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Task

TRAINED: Final = 4000
TESTED: Final = 500


def _example(digits: str) -> Example:
    return Example(digits, f"{digits}=", {"answer": "".join(sorted(digits))})


_DIGITS: Final = [f"{number:06}" for number in random.Random(6).sample(range(1_000_000), TRAINED + TESTED)]
EXAMPLES: Final = [_example(digits) for digits in _DIGITS[:TRAINED]]
TEST: Final = [_example(digits) for digits in _DIGITS[TRAINED:]]
task: Final = Task("sorting", EXAMPLES, (Reward(right),))
