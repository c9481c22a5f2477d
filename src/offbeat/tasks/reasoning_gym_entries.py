"""reasoning-gym's entries as examples, and its own score of an answer; importing it takes a second."""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, cast

import reasoning_gym as gym

from offbeat.tasks.task import Example, TaskError
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
    made = gym.create_dataset(generator, size=size, seed=seed, **dict(settings))
    return [_example(f"{generator}-{number}", entry, chat) for number, entry in enumerate(made)]
