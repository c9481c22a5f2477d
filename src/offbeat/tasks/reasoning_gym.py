"""`reasoning_gym`: any of reasoning-gym's generators, scored by its own `score_answer` in the pool."""

import re
from collections.abc import Mapping
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from offbeat.nearest import nearest
from offbeat.tasks.data import Deferred
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Task, TaskError
from offbeat.types import Json

_REGISTERED: Final = re.compile(r'^(?:DATASET_NAME = |register_dataset\()"(\w+)"', re.MULTILINE)


@cache
def generators() -> frozenset[str]:
    """The names of reasoning-gym's datasets, from its source: a wrong name is answered without importing it.

    >>> "leg_counting" in generators()
    True
    """
    package = find_spec("reasoning_gym")
    if package is None or package.origin is None:
        raise ModuleNotFoundError("reasoning_gym is not installed: pip install 'offbeat[math]'", name="reasoning_gym")
    files = Path(package.origin).parent.rglob("*.py")
    return frozenset(name for file in files for name in _REGISTERED.findall(file.read_text("utf-8")))


def reasoning_gym(
    *, generator: str, size: int = 500, seed: int = 0, chat: bool = True, settings: Mapping[str, Json] | None = None
) -> Task:
    """Problems of one generator.

    >>> task = reasoning_gym(generator="leg_counting", size=3)
    >>> len(task.examples), sorted(task.examples[0].columns)
    (3, ['answer', 'entry'])

    Args:
        generator: One of reasoning-gym's datasets, for example 'leg_counting'.
        size: Different problems.
        seed: Of the problems; their order comes from the run's seed.
        chat: With a system message about the form of the answer; otherwise the bare question.
        settings: The generator's own, as reasoning-gym documents them: its difficulty dials.
    """
    if generator not in generators():
        raise TaskError(
            f"{generator!r} is not a generator of reasoning-gym; {nearest(generator, sorted(generators()))}"
        )
    from offbeat.tasks.reasoning_gym_entries import answer_of, examples, score  # not at the top: it takes a second

    problems = Deferred(partial(examples, generator, size, seed, chat, settings or {}))
    return Task("reasoning_gym", problems, (Reward(partial(score, generator=generator)),), answer=answer_of)
