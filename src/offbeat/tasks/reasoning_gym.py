"""`reasoning_gym`: problems of any reasoning-gym generator, scored by its own `score_answer`."""

import re
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

from offbeat.errors import TaskError, suggest_nearest
from offbeat.imports import install_command
from offbeat.tasks.data import Deferred, Example
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Task
from offbeat.types import Json

_OPEN, _CLOSE = "<answer>", "</answer>"
SYSTEM: Final = (
    f"Think about the problem, then give the final answer between {_OPEN} and {_CLOSE}, "
    "in the form the problem asks for."
)
_REGISTERED: Final = re.compile(r'^(?:DATASET_NAME = |register_dataset\()"(\w+)"', re.MULTILINE)


def answer_of(text: str) -> str | None:
    """Return the text between the last <answer> and </answer>, or the whole text if there are no tags.

    >>> answer_of("I think <answer> 7 </answer>"), answer_of(" 7 "), answer_of("<answer>7")
    ('7', '7', None)
    """
    if _OPEN not in text:
        return text.strip() or None
    inside, closed, _ = text.rpartition(_OPEN)[2].partition(_CLOSE)
    return inside.strip() or None if closed else None


def score(text: str, columns: Mapping[str, Json], *, generator: str) -> float:
    """Return reasoning-gym's score of the answer, 0 if the completion has no answer."""
    answer = answer_of(text)
    return 0.0 if answer is None else float(_score_function(generator)(answer, _unpack(columns["entry"])))


@lru_cache(maxsize=8)
def _score_function(generator: str) -> Any:
    import reasoning_gym as gym  # not at the top: it takes a second

    return gym.get_score_answer_fn(generator)


def examples(generator: str, size: int, seed: int, chat: bool, settings: Mapping[str, Json]) -> list[Example]:
    """Generate problems.

    >>> [example.id for example in examples("leg_counting", 2, 0, True, {})]
    ['leg_counting-0', 'leg_counting-1']
    """
    import reasoning_gym as gym  # not at the top: it takes a second

    entries = gym.create_dataset(generator, size=size, seed=seed, **dict(settings))
    return [_example(f"{generator}-{number}", entry, chat) for number, entry in enumerate(entries)]


def _example(id_: str, entry: Mapping[str, object], chat: bool) -> Example:
    question = str(entry["question"])
    prompt = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": question}) if chat else question
    return Example(id_, prompt, {"answer": cast("Json", entry["answer"]), "entry": _pack(entry)})


def _pack(value: object) -> Json:
    """Convert an entry to JSON without loss: tuples and non-string keys get a tag, since some scorers compare types.

    >>> _pack({1: (2, 3)})
    {'items': [[1, {'tuple': [2, 3]}]]}
    """
    if isinstance(value, tuple):
        return {"tuple": [_pack(part) for part in value]}
    if isinstance(value, list):
        return [_pack(part) for part in value]
    if isinstance(value, Mapping):
        return {"items": [[_pack(key), _pack(part)] for key, part in value.items()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TaskError(f"reasoning-gym returned {value!r:.80}, which is not JSON; choose another generator")


def _unpack(value: Json) -> Any:
    """Invert `_pack`."""
    if isinstance(value, list):
        return [_unpack(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_unpack(value["tuple"]))
    return {_unpack(key): _unpack(part) for key, part in cast("list[list[Json]]", value["items"])}


@cache
def generators() -> frozenset[str]:
    """Read the names of reasoning-gym's generators from its source, without importing it.

    >>> "leg_counting" in generators()
    True
    """
    package = find_spec("reasoning_gym")
    if package is None or package.origin is None:
        raise ModuleNotFoundError(f"reasoning_gym is not installed: {install_command('math')}", name="reasoning_gym")
    files = Path(package.origin).parent.rglob("*.py")
    return frozenset(name for file in files for name in _REGISTERED.findall(file.read_text("utf-8")))


def reasoning_gym(
    *, generator: str, size: int = 500, seed: int = 0, chat: bool = True, settings: Mapping[str, Json] | None = None
) -> Task:
    """Make the task from one generator.

    >>> task = reasoning_gym(generator="leg_counting", size=3)
    >>> len(task.examples), sorted(task.examples[0].columns)
    (3, ['answer', 'entry'])

    Args:
        generator: The name of a reasoning-gym dataset, for example 'leg_counting'.
        size: Number of different problems.
        seed: Seed of the problems; their order comes from the run's seed.
        chat: Add a system message about the form of the answer; otherwise the prompt is the bare question.
        settings: The generator's own settings, such as its difficulty; see the documentation of reasoning-gym.
    """
    if generator not in generators():
        raise TaskError(
            f"{generator!r} is not a generator of reasoning-gym; {suggest_nearest(generator, sorted(generators()))}"
        )
    problems = Deferred(partial(examples, generator, size, seed, chat, settings or {}))
    return Task("reasoning_gym", problems, (Reward(partial(score, generator=generator)),), answer=answer_of)
