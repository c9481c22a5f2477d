"""`arithmetic`: generated sums of adjustable difficulty. Needs no data.

The plain form "17+25=" suits a character-level model; `chat=True` asks a chat model in words.
"""

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, overload

from offbeat.errors import TaskError
from offbeat.seeds import derive
from offbeat.tasks.data import Example
from offbeat.tasks.rewards import Reward
from offbeat.tasks.task import Task
from offbeat.types import Json

_NUMBER: Final = re.compile(r"(?<![\w.])[-−]?\d[\d,]*(?:\.0+)?(?![\w]|\.\d)")
_LONGEST: Final = 64
"""Characters; no sum here has a longer result."""


@dataclass(frozen=True)
class Sums(Sequence[Example]):
    """Sums as examples. Example n is a pure function of (seed, n), so nothing is stored.

    >>> Sums(seed=0, size=10, digits=2, terms=2, operators="+")[3].prompt
    '69+60='
    """

    seed: int
    size: int
    digits: int
    terms: int
    operators: str
    chat: bool = False

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, at: int) -> Example: ...
    @overload
    def __getitem__(self, at: slice) -> list[Example]: ...
    def __getitem__(self, at: int | slice) -> Example | list[Example]:
        if isinstance(at, slice):
            return [self._example(n) for n in range(*at.indices(self.size))]
        if not -self.size <= at < self.size:
            raise IndexError(f"example {at} is out of range: there are {self.size}")
        return self._example(at % self.size)

    def _example(self, number: int) -> Example:
        rng = random.Random(derive(self.seed, "arithmetic", number))
        values = [_number(rng, self.digits) for _ in range(self.terms)]
        operators = [rng.choice(self.operators) for _ in range(self.terms - 1)]
        text = str(values[0]) + "".join(f"{op}{value}" for op, value in zip(operators, values[1:], strict=True))
        columns: dict[str, Json] = {"answer": str(_value(values, operators)), "difficulty": self._difficulty(operators)}
        if not self.chat:
            return Example(f"arithmetic-{number}", f"{text}=", columns)
        question = f"What is {text}? Think if you need to, and end with the answer as a number."
        return Example(f"arithmetic-{number}", ({"role": "user", "content": question},), columns)

    def _difficulty(self, operators: Sequence[str]) -> str:
        return f"{self.digits} digits, {self.terms} terms" + (", ×" if "*" in operators else "")


def _number(rng: random.Random, digits: int) -> int:
    """Draw a number with exactly that many digits."""
    return rng.randrange(0 if digits == 1 else 10 ** (digits - 1), 10**digits)


def _value(values: Sequence[int], operators: Sequence[str]) -> int:
    """Calculate × before + and −."""
    products = [values[0]]
    for operator, value in zip(operators, values[1:], strict=True):
        if operator == "*":
            products[-1] *= value
        else:
            products.append(value if operator == "+" else -value)
    return sum(products)


def final_number(text: str) -> str | None:
    """Return the last whole number in a text without separators, or None if there is none.

    >>> final_number("17+25 is 1,042."), final_number("no idea"), final_number("-3.00")
    ('1042', None, '-3')
    """
    found = [match for match in _NUMBER.findall(text[-4096:]) if len(match) <= _LONGEST]
    if not found:
        return None
    return str(int(found[-1].split(".")[0].replace(",", "").replace("−", "-")))


def correct(text: str, columns: Mapping[str, Json]) -> float:
    """Return 1 if the last number of the completion is the answer, else 0.

    >>> correct("42", {"answer": "42"}), correct("41", {"answer": "42"})
    (1.0, 0.0)
    """
    return float(final_number(text) == str(int(str(columns["answer"]))))


def arithmetic(
    *,
    digits: int = 2,
    terms: int = 2,
    operators: str = "+",
    size: int = 10_000,
    seed: int = 0,
    chat: bool = False,
) -> Task:
    """Make the task; `digits`, `terms` and `operators` set the difficulty.

    >>> arithmetic(digits=3, operators="+-").examples[0].columns["difficulty"]
    '3 digits, 2 terms'

    Args:
        digits: Digits of every number, 1 to 9.
        terms: Numbers in a sum, 2 to 6.
        operators: The operators to draw from: any of +, - and *.
        size: Number of different examples.
        seed: Seed of the examples; their order comes from the run's seed.
        chat: Ask in words, as a chat message.
    """
    if not operators or set(operators) - set("+-*"):
        raise TaskError(f"operators = {operators!r} is not allowed; use any of + - and *, for instance '+-'")
    if not 1 <= digits <= 9 or not 2 <= terms <= 6 or size < 1:
        raise TaskError(
            f"digits = {digits} (1 to 9), terms = {terms} (2 to 6) or size = {size} (at least 1) is out of range"
        )
    return Task(
        "arithmetic",
        Sums(seed, size, digits, terms, operators, chat),
        (Reward(correct),),
        answer=final_number,
        slice_by="difficulty",
    )
