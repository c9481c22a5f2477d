"""A task that a random character model sometimes solves: write at least two digits."""

import dataclasses

from offbeat.tasks.arithmetic import arithmetic
from offbeat.tasks.rewards import Reward


def two_digits(text: str, columns: object) -> float:
    return float(sum(character.isdigit() for character in text) >= 2)


task = dataclasses.replace(arithmetic(), rewards=(Reward(two_digits),))
