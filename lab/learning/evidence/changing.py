"""A task that changes: sums in the first half of a run, differences in the second."""

from dataclasses import dataclass
from typing import Final

from lab.learning.task import SUMS, right
from offbeat.tasks.data import Example
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Order, Task

HALF: Final = 100
"""Steps before the change."""
DIFFERENCES: Final = [
    Example(f"{a}-{b}", f"{a}-{b}=", {"answer": str(abs(a - b))}) for a in range(10) for b in range(10)
]


@dataclass(frozen=True)
class ChangingOrder(Order):
    """Sums up to a position of the order, differences from there on."""

    change: int = 0

    def index(self, position: int) -> int:
        if position < self.change:
            return Order(len(SUMS), self.seed).index(position)
        return len(SUMS) + Order(len(DIFFERENCES), self.seed).index(position - self.change)


@dataclass(frozen=True)
class ChangingTask(Task):
    """Examples whose order has a change."""

    change: int = 0

    def order(self, seed: int) -> ChangingOrder:
        return ChangingOrder(len(self.examples), seed, self.change)


def changing(prompts_per_step: int) -> ChangingTask:
    """Return the task for runs with so many prompts in a step."""
    return ChangingTask("changing", SUMS + DIFFERENCES, (Reward(right),), change=HALF * prompts_per_step)


task: Final = changing(16)
