"""The task of the check `training`: the more even digits an answer has, the higher its reward.

A random model earns different rewards at once, so every batch has a gradient.
"""

from collections.abc import Mapping

from offbeat.tasks.data import Example
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Task
from offbeat.types import Json


def even_digits(text: str, columns: Mapping[str, Json]) -> float:
    """Return the share of even digits.

    >>> even_digits("1224", {})
    0.75
    """
    return sum(character in "02468" for character in text) / max(1, len(text))


task = Task("even-digits", [Example(f"sum-{n}", f"{n}+{n}=", {}) for n in range(10)], (Reward(even_digits),))
