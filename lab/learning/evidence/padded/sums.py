"""Sums whose answers have leading zeros: the same task at several lengths. A file of this folder is one length."""

from lab.learning.task import SUMS, right
from offbeat.tasks.data import Example
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Task


def padded(digits: int) -> Task:
    """Return the sums with answers of so many digits."""
    examples = [Example(one.id, one.prompt, {"answer": str(one.columns["answer"]).zfill(digits)}) for one in SUMS]
    return Task(f"padded-{digits}", examples, (Reward(right),))
