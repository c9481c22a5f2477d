"""The contract: a task is a sequence of examples and one or more reward functions.

A user's task is one file (`custom.py`): a dataset and a function. A scorer is a plain function

    def correct(text: str, columns: Mapping[str, Json]) -> float: ...

that sees a completion's text and the example's columns, runs in a process that can be killed (`scoring.py`), and raises
where it cannot grade: 0 is for wrong answers only.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from numpy.typing import ArrayLike

from offbeat.errors import TaskError
from offbeat.seeds import derive
from offbeat.tasks.rewards import Reward
from offbeat.tasks.turns import Environment
from offbeat.types import Json, Prompt

_ROUNDS: Final = 6


@dataclass(frozen=True)
class Order:
    """Positions 0, 1, 2, … without end; each run of `size` positions visits every index once.

    >>> order = Order(size=5, seed=7)
    >>> [order.index(position) for position in range(10)]
    [4, 0, 3, 2, 1, 4, 0, 1, 3, 2]
    >>> order.epoch(9)
    1
    """

    size: int
    seed: int
    name: str = "prompts"
    """The stream of the seed tree it draws from."""

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(
                f"an order of {self.size} examples: there is nothing to visit; check the data and its filters"
            )

    def epoch(self, position: int) -> int:
        """How often everything had been visited before this position."""
        return position // self.size

    def index(self, position: int) -> int:
        """Which example stands at a position: a pure function of (seed, epoch, position)."""
        if position < 0:
            raise ValueError(f"position {position}: positions start at 0")
        epoch, place = divmod(position, self.size)
        key = derive(self.seed, self.name, epoch).to_bytes(8, "big")
        return _permuted(place, self.size, key)


def _permuted(place: int, size: int, key: bytes) -> int:
    """A keyed permutation of range(size): a Feistel network, walked until it lands inside the range."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = place >> half, place & mask
        for round_ in range(_ROUNDS):
            mixed = hashlib.blake2b(right.to_bytes(8, "big") + bytes([round_]), digest_size=8, key=key).digest()
            left, right = right, left ^ (int.from_bytes(mixed, "big") & mask)
        place = left << half | right
        if place < size:
            return place


Messages = tuple[Mapping[str, str], ...]
"""A chat: `({"role": "user", "content": "1+1="},)`."""


@dataclass(frozen=True)
class Example:
    """One problem.

    >>> example = Example("add-7", "17+25=", {"answer": "42"})
    >>> example.record
    {'prompt': '17+25=', 'answer': '42'}
    """

    id: str
    prompt: str | Messages
    """Plain text, or chat messages for the tokenizer's template."""
    columns: Mapping[str, Json] = field(default_factory=dict)
    """What the scorer needs to know: the reference answer, tests, a difficulty. JSON, and without 'prompt'."""

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", tuple(dict(message) for message in self.prompt))
        if "prompt" in self.columns:
            raise TaskError(
                f"example {self.id!r}: the column 'prompt' is the prompt itself; call that column otherwise"
            )

    @property
    def record(self) -> dict[str, Json]:
        """What reward functions see as columns and the experience log keeps: the columns, and the prompt."""
        prompt: Json = self.prompt if isinstance(self.prompt, str) else [dict(m) for m in self.prompt]
        return {"prompt": prompt, **self.columns}


@dataclass(frozen=True)
class Task:
    """Examples in a deterministic shuffled order, and what scores their completions.

    >>> from offbeat.tasks.arithmetic import correct
    >>> sums = [Example("one", "1+1=", {"answer": 2}), Example("two", "2+3=", {"answer": 5})]
    >>> task = Task("tiny", sums, (Reward(correct),))
    >>> [example.id for _, example in zip(range(3), task.ordered(seed=0))]
    ['one', 'two', 'two']
    >>> [example.id for _, example in zip(range(2), task.ordered(seed=0, start=1))]
    ['two', 'two']
    """

    name: str
    examples: Sequence[Example]
    """Anything with a length and an index; `data.Deferred` loads when first touched."""
    rewards: tuple[Reward, ...]
    reward_range: tuple[float, float] = (0.0, 1.0)
    """A weighted sum outside it is `Unscorable("invalid")`."""
    deadline: float = 5.0
    """Seconds of wall time that scoring one completion may take."""
    answer: Callable[[str], str | None] | None = None
    """The final answer in a completion, for maj@k. Quick, and safe on any text: it runs in the calling process."""
    slice_by: str | None = None
    """The column evaluation makes its table by, for instance a difficulty."""
    environment: Callable[[Example], Environment] | None = None
    """For several turns: what answers the policy between generations."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rewards", tuple(self.rewards))
        names = [reward.name for reward in self.rewards]
        if not names:
            raise TaskError(f"task {self.name!r} has no reward function; give it at least one")
        if len(set(names)) < len(names):
            raise TaskError(f"task {self.name!r} has two rewards of one name: {names}; name them apart")
        low, high = self.reward_range
        if not low < high:
            raise TaskError(f"task {self.name!r}: reward_range = ({low}, {high}) is empty; the lower end comes first")

    def order(self, seed: int) -> Order:
        """The order of its examples under a run's seed."""
        return Order(len(self.examples), seed)

    def ordered(self, seed: int, start: int = 0) -> Iterator[Example]:
        """Examples from position `start` on, without end. A run's state is the next position, one integer."""
        order = self.order(seed)
        position = start
        while True:
            yield self.examples[order.index(position)]
            position += 1

    def prompt(self, example: Example, token_ids: ArrayLike) -> Prompt:
        """The carrier that travels with a group: the example, and its prompt as tokens."""
        return Prompt(example.id, token_ids, self.name, example.record)  # type: ignore[arg-type]  # it freezes any array
