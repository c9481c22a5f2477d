"""`reasoning_gym`: any of reasoning-gym's generators, scored by its own `score_answer` in the pool."""

import re
from collections.abc import Mapping
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, cast

from offbeat.errors import TaskError, nearest
from offbeat.tasks.data import Deferred
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Example, Task
from offbeat.types import Json

_OPEN, _CLOSE = "<answer>", "</answer>"
SYSTEM: Final = (
    f"Think about the problem, then give the final answer between {_OPEN} and {_CLOSE}, "
    "in the form the problem asks for."
)


def answer_of(text: str) -> str | None:
    """What stands between the last <answer> and </answer>; the whole text where there are no tags.

    >>> answer_of("I think <answer> 7 </answer>"), answer_of(" 7 "), answer_of("<answer>7")
    ('7', '7', None)
    """
    if _OPEN not in text:
        return text.strip() or None
    inside, closed, _ = text.rpartition(_OPEN)[2].partition(_CLOSE)
    return inside.strip() or None if closed else None


@lru_cache(maxsize=8)
def _scoring(generator: str) -> Any:
    import reasoning_gym as gym  # not at the top: it takes a second

    return gym.get_score_answer_fn(generator)


def _packed(value: object) -> Json:
    """As JSON without loss: tuples and keys that are not text are marked, since some scorers compare types.

    >>> _packed({1: (2, 3)})
    {'items': [[1, {'tuple': [2, 3]}]]}
    """
    if isinstance(value, tuple):
        return {"tuple": [_packed(part) for part in value]}
    if isinstance(value, list):
        return [_packed(part) for part in value]
    if isinstance(value, Mapping):
        return {"items": [[_packed(key), _packed(part)] for key, part in value.items()]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TaskError(f"reasoning-gym gave {value!r:.80}, which is not JSON: this generator cannot be used")


def _unpacked(value: Json) -> Any:
    """The inverse of `_packed`.

    >>> _unpacked({'items': [[1, {'tuple': [2, 3]}]]})
    {1: (2, 3)}
    """
    if isinstance(value, list):
        return [_unpacked(part) for part in value]
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(_unpacked(value["tuple"]))
    return {_unpacked(key): _unpacked(part) for key, part in cast("list[list[Json]]", value["items"])}


def score(text: str, columns: Mapping[str, Json], *, generator: str) -> float:
    """reasoning-gym's score of the answer, 0 where the completion gives none."""
    answer = answer_of(text)
    return 0.0 if answer is None else float(_scoring(generator)(answer, _unpacked(columns["entry"])))


def _example(id_: str, entry: Mapping[str, object], chat: bool) -> Example:
    question = str(entry["question"])
    prompt = ({"role": "system", "content": SYSTEM}, {"role": "user", "content": question}) if chat else question
    return Example(id_, prompt, {"answer": cast("Json", entry["answer"]), "entry": _packed(entry)})


def examples(generator: str, size: int, seed: int, chat: bool, settings: Mapping[str, Json]) -> list[Example]:
    """Problems of one generator.

    >>> [example.id for example in examples("leg_counting", 2, 0, True, {})]
    ['leg_counting-0', 'leg_counting-1']
    """
    import reasoning_gym as gym  # not at the top: it takes a second

    made = gym.create_dataset(generator, size=size, seed=seed, **dict(settings))
    return [_example(f"{generator}-{number}", entry, chat) for number, entry in enumerate(made)]


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
    problems = Deferred(partial(examples, generator, size, seed, chat, settings or {}))
    return Task("reasoning_gym", problems, (Reward(partial(score, generator=generator)),), answer=answer_of)
