"""A task: examples in a shuffled order, reward functions, and how you get one, by name or from your own file.

A reward function is a plain function

    def correct(text: str, columns: Mapping[str, Json]) -> float: ...

It receives the text of a completion and the columns of the example, and runs in a process that can be killed
(`scoring/`). It raises if it cannot grade: a reward of 0 means a wrong answer.
"""

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, cast

from numpy.typing import ArrayLike

from offbeat.errors import TaskError, suggest_nearest
from offbeat.imports import describe_error, load_file, resolve
from offbeat.seeds import derive
from offbeat.tasks.data import ColumnMap, Deferred, Example, Tokenizer, tokens, with_prompt
from offbeat.tasks.rewards import AnswerFault, Reward, fault_reward, reward_of
from offbeat.types import Json, Prompt

FACTORIES: Final[Mapping[str, str]] = {
    "arithmetic": "offbeat.tasks.arithmetic:arithmetic",
    "gsm8k": "offbeat.tasks.gsm8k:gsm8k",
    "reasoning_gym": "offbeat.tasks.reasoning_gym:reasoning_gym",
    "math": "offbeat.tasks.latex_math:latex_math",
    "python_code": "offbeat.tasks.python_code:python_code",
    "custom": "offbeat.tasks.task:custom",
}
"""Task name → module:function, imported on first use. A factory takes JSON keyword options and returns a `Task`."""

_ROUNDS: Final = 6
_PROMPTS_KEPT: Final = 4096
"""Prompts whose tokens are kept: small data sets are encoded once, not in every epoch."""
OF_EVERY_TASK: Final = ("reward_range", "answer_fault")
"""Options that `make` takes for every task."""
_SETTINGS: Final = ("reward_range", "answer_fault", "deadline", "answer", "slice_by")


@dataclass(frozen=True)
class Order:
    """An endless order of example indices; every `size` consecutive positions visit each index once.

    >>> order = Order(size=5, seed=7)
    >>> [order.index(position) for position in range(10)]
    [4, 0, 3, 2, 1, 4, 0, 1, 3, 2]
    >>> order.epoch(9)
    1
    """

    size: int
    seed: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"there are {self.size} examples, so nothing to visit; check the data and its filters")

    def epoch(self, position: int) -> int:
        """Return how many full passes come before this position."""
        return position // self.size

    def index(self, position: int) -> int:
        """Return the example at a position: a pure function of seed, epoch and position."""
        if position < 0:
            raise ValueError(f"position {position}: positions start at 0")
        epoch, place = divmod(position, self.size)
        key = derive(self.seed, "prompts", epoch).to_bytes(8, "big")
        return _permuted(place, self.size, key)


def _permuted(place: int, size: int, key: bytes) -> int:
    """Apply a keyed permutation of range(size): a Feistel network, repeated until the result is in the range."""
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


@dataclass(frozen=True)
class Task:
    """Examples in a deterministic shuffled order, and the reward functions for their completions.

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
    """Any sequence; `data.Deferred` loads on first use."""
    rewards: tuple[Reward, ...]
    reward_range: tuple[float, float] = (0.0, 1.0)
    """A weighted sum outside this range ends the run. None that a reward function returned is ever changed."""
    deadline: float = 5.0
    """Wall time in seconds for scoring one completion, without the time in which its process waited for a CPU."""
    answer: Callable[[str], str | None] | None = None
    """Extracts the final answer of a completion, for maj@k. It runs in the calling process, so it must be fast and
    safe on any text."""
    slice_by: str | None = None
    """The column that the evaluation table is split by, for instance a difficulty."""
    evaluation: "Task | None" = None
    """What evaluation asks instead of `examples`; without examples it does not count. `split.hold_out` makes sure that
    the two share no prompt. None: there is nothing for evaluation only."""
    answer_fault: AnswerFault = "floor"
    """What an answer gets that makes its own scoring fail, while controls have a score (`scoring/blame.py`): 'floor',
    the lower end of `reward_range`, or the lowest reward so far if there is no lower end; a number, for instance a
    penalty below it; or 'unscorable', no score. It counts as a wrong answer in evaluation. Failures of the grader
    itself, and right answers on which it fails, have no score in any case."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rewards", tuple(self.rewards))
        names = [reward.name for reward in self.rewards]
        if not names:
            raise TaskError(f"task {self.name!r} has no reward function; add at least one")
        if len(set(names)) < len(names):
            raise TaskError(f"task {self.name!r} has two rewards of one name: {names}; rename one with Reward(name=…)")
        if not any(reward.weight for reward in self.rewards):
            raise TaskError(f"task {self.name!r}: every reward has weight 0, so all would be 0; give one a weight")
        try:
            low, high = (float(end) for end in self.reward_range)
        except (TypeError, ValueError):
            raise TaskError(
                f"task {self.name!r}: reward_range = {self.reward_range!r:.80} must be two numbers"
            ) from None
        object.__setattr__(self, "reward_range", (low, high))
        if not low < high:
            raise TaskError(f"task {self.name!r}: reward_range = ({low}, {high}) is empty; put the lower end first")
        try:
            fault_reward(self.answer_fault, self.reward_range)
        except ValueError as error:
            raise TaskError(f"task {self.name!r}: {error}") from None

    def order(self, seed: int) -> Order:
        """Return the order of the examples under a run's seed."""
        return Order(len(self.examples), seed)

    def ordered(self, seed: int, start: int = 0) -> Iterator[Example]:
        """Yield examples without end from position `start`. To resume, a run stores only the next position."""
        order = self.order(seed)
        position = start
        while True:
            yield self.examples[order.index(position)]
            position += 1

    def evaluated_on(self, load_examples: Callable[[], Sequence[Example]]) -> "Task":
        """Return the task with other examples for evaluation, which load on first use."""
        return replace(self, evaluation=replace(self, examples=Deferred(load_examples)))

    def prompt(self, example: Example, token_ids: ArrayLike) -> Prompt:
        """Make the prompt that travels with a group: the example's record, and its prompt as tokens."""
        return Prompt(example.id, token_ids, self.name, example.record)  # type: ignore[arg-type]  # it freezes any array


def prompt_at(task: Task, tokenizer: Tokenizer, seed: int) -> Callable[[int], Prompt]:
    """Return a function from a position in the task's order to the prompt there, as tokens."""
    order = task.order(seed)

    @lru_cache(_PROMPTS_KEPT)
    def prompt(index: int) -> Prompt:
        example = task.examples[index]
        return task.prompt(example, tokens(example.prompt, tokenizer))

    return lambda position: prompt(order.index(position))


def make(name: str, options: Mapping[str, Json] | None = None) -> Task:
    """Make the task of that name. The path of your own file is short for `custom` with this path.

    >>> make("arithmetic", {"digits": 2}).name
    'arithmetic'
    >>> make("arithmetik")
    Traceback (most recent call last):
    ...
    offbeat.errors.TaskError: 'arithmetik' is not a task; did you mean 'arithmetic'?
    """
    if name.endswith(".py"):
        name, options = "custom", {**(options or {}), "path": name}
    if name not in FACTORIES:
        near = suggest_nearest(name, FACTORIES)
        own = "" if near.startswith("did") else "; for a task of your own, give the path of its Python file"
        raise TaskError(f"{name!r} is not a task; {near}{own}")
    factory = cast("Callable[..., Task]", resolve(FACTORIES[name]))
    chosen = dict(options or {})
    common = cast("Any", {name: chosen.pop(name) for name in OF_EVERY_TASK if name in chosen})
    try:
        task = factory(**chosen)
    except TypeError as error:
        raise TaskError(f"task {name!r}: {error}") from error
    evaluation = replace(task.evaluation, **common) if task.evaluation else None
    return replace(task, evaluation=evaluation, **common) if common else task


def stored_groups() -> Task:
    """Return the task of a run that trains on stored groups and asks nothing: one empty prompt, and no rewards."""
    return Task("stored groups", [Example("none", "")], (Reward(_unscored),), (-math.inf, math.inf))


def _unscored(text: str, columns: Mapping[str, Json]) -> None:
    """Give no reward."""


def custom(*, path: str) -> Task:
    """Load a task from your own Python file.

    The file defines `task`, a `Task`; or `examples` and `reward`, a list and a function:

        examples = [{"prompt": "1+1=", "answer": "2"}]

        def reward(text, columns):
            return float(text.strip() == columns["answer"])

    `examples` holds `Example`s or dictionaries with a 'prompt', or is a function that returns them. For several rewards
    define a list `rewards` of functions or `Reward(function, weight=…)`. A function with a parameter `completions`,
    `prompts` or `completion_ids` is called as TRL calls it, with all completions of a prompt. The names `reward_range`,
    `answer_fault`, `deadline`, `answer` and `slice_by` set the fields of `Task`. `evaluation_examples`, written like
    `examples`, are for evaluation only; without them, a run that evaluates holds some of `examples` out.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     file = Path(place, "shout.py")
    ...     _ = file.write_text(
    ...         "examples = [{'prompt': 'Say hello.'}]\\n"
    ...         "def reward(completions, **columns):\\n    return [float(c.isupper()) for c in completions]\\n"
    ...     )
    ...     task = custom(path=str(file))
    >>> task.name, task.examples[0].prompt, task.rewards[0].trl
    ('shout', 'Say hello.', True)
    """
    if not Path(path).is_file():
        raise TaskError(f"{path} does not exist; give the path of a Python file")
    try:
        module = load_file(Path(path))
    except ModuleNotFoundError as error:
        raise TaskError(f"{path} needs {error.name}, which is not installed: pip install {error.name}") from error
    except Exception as error:  # the file is yours, and may raise anything
        raise TaskError(f"{path} cannot be loaded: {describe_error(error, path)}; fix the file") from error
    if isinstance(task := getattr(module, "task", None), Task):
        return task
    defined = vars(module)
    rewards = defined.get("rewards", [defined["reward"]] if "reward" in defined else [])
    if "examples" not in defined or not rewards:
        missing = "examples" if "examples" not in defined else "reward"
        names = [name for name in defined if not name.startswith("_")]
        raise TaskError(f"{path} defines no {missing!r} (nor a `task`); {suggest_nearest(missing, names)}")
    settings: dict[str, Any] = {name: defined[name] for name in _SETTINGS if name in defined}
    name = Path(path).stem
    examples = Deferred(lambda: _custom_examples(module.examples, path, name))
    task = Task(name, examples, tuple(_custom_reward(r) for r in rewards), **settings)
    if "evaluation_examples" not in defined:
        return task
    return task.evaluated_on(lambda: _custom_examples(module.evaluation_examples, path, f"{name}-evaluation"))


def _custom_examples(given: Any, path: str, name: str) -> Sequence[Example]:
    try:
        entries = list(given() if callable(given) else given)
    except TaskError:
        raise
    except Exception as error:  # your function
        raise TaskError(f"the examples of {path} cannot be read: {describe_error(error, path)}; fix them") from error
    for number, entry in enumerate(entries):
        if not isinstance(entry, (Example, Mapping)):
            raise TaskError(
                f"{path}: example {number} is {entry!r:.80}; it must be an Example or a dictionary with 'prompt'"
            )
    columns, rows = ColumnMap(), with_prompt(entry for entry in entries if not isinstance(entry, Example))
    return [
        entry if isinstance(entry, Example) else columns.example(next(rows), f"{name}-{number}")
        for number, entry in enumerate(entries)
    ]


def _custom_reward(reward: object) -> Reward:
    if isinstance(reward, Reward):
        return reward
    if not callable(reward):
        raise TaskError(f"{reward!r:.80} is not a reward: it must be a function or a Reward")
    return reward_of(reward)
