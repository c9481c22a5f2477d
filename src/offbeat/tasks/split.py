"""Which examples a run trains on and which it is evaluated on: no prompt is on both sides.

    task = hold_out(task)                            # task.examples to train on, task.evaluation to evaluate on
    asked = evaluation_set(task, count=64, seed=0)   # 64 distinct prompts, and whether they are held out

If a task has examples for evaluation (the `test` split of a dataset, `evaluation_examples` of your own file), those are
asked, and training leaves out what occurs among them. Otherwise the prompts with the smallest hashes are held out. The
hash is of the prompt's text alone: the policy sees nothing else of an example, so two examples with one prompt are on
the same side whatever their columns say, and an example stays where it is if others are added or the order changes.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Final, overload

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import TaskError
from offbeat.tasks.data import Deferred, Example
from offbeat.tasks.task import Task

SHARE: Final = 0.1
"""Held out of large data."""
FEWEST: Final = 20
"""Prompts that are held out of small data, but never more than `LARGEST_SHARE`. With fewer prompts than this in all,
nothing is."""
LARGEST_SHARE: Final = 0.2

logger = logging.getLogger(__name__)
Keys = NDArray[np.uint64]
Indices = NDArray[np.int64]


def prompt_hash(example: Example) -> int:
    """Return the hash that decides where an example goes. Case and white space of the prompt make no difference.

    >>> one, other = Example("a", "What is 1+1?", {"answer": "2"}), Example("b", "what is  1+1?", {"source": "web"})
    >>> prompt_hash(one) == prompt_hash(other)
    True
    """
    prompt = example.prompt
    text = prompt if isinstance(prompt, str) else " ".join(f"{m['role']} {m['content']}" for m in prompt)
    plain = " ".join(text.split()).casefold().encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(plain, digest_size=8).digest(), "big")


def held_out_count(prompts: int, share: float | None) -> int:
    """Return how many distinct prompts are held out, given how many there are.

    >>> [held_out_count(prompts, share=None) for prompts in (19, 20, 60, 100, 300, 7_473)]
    [0, 4, 12, 20, 30, 747]
    >>> held_out_count(19, share=0.5)
    10
    """
    if share is not None:
        return min(max(1, round(share * prompts)), prompts - 1) if share else 0
    if prompts < FEWEST:
        return 0
    return min(max(round(SHARE * prompts), FEWEST), int(LARGEST_SHARE * prompts))


def hold_out(task: Task, share: float | None = None, trained_before: Callable[[Example], bool] | None = None) -> Task:
    """Return the task with examples to train on and an `evaluation` that shares no prompt with them.

    Nothing is loaded until the examples are used. If the data are too few to hold any out, `evaluation` is empty.

    Args:
        task: Any task.
        share: The share of its distinct prompts to hold out, if it has no examples for evaluation. Default: a tenth,
            raised to 20 prompts or a fifth if there are few; nothing of fewer than 20.
        trained_before: Says of an example whether the run trains on it from elsewhere, such as a log of another run.
            Such examples are not asked in evaluation.
    """
    sides = _Sides(task, share, trained_before)
    evaluation = replace(task.evaluation or task, examples=Deferred(lambda: sides.evaluation), evaluation=None)
    return replace(task, examples=Deferred(lambda: sides.training), evaluation=evaluation)


def for_evaluation(task: Task) -> Task:
    """Return what evaluation asks of a task that a run does not train on: its test split, or else all of it."""
    separate = task.evaluation
    if separate is None:
        return task
    return replace(task, examples=Deferred(lambda: separate.examples if len(separate.examples) else task.examples))


@dataclass(frozen=True)
class Subset(Sequence[Example]):
    """Some examples of a sequence, by index."""

    examples: Sequence[Example]
    indices: Indices

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, at: int) -> Example: ...
    @overload
    def __getitem__(self, at: slice) -> list[Example]: ...
    def __getitem__(self, at: int | slice) -> Example | list[Example]:
        if isinstance(at, slice):
            return [self.examples[int(index)] for index in self.indices[at]]
        return self.examples[int(self.indices[at])]


@dataclass(frozen=True)
class _Sides:
    """Both sides of one task, computed together on first use."""

    task: Task
    share: float | None
    trained_before: Callable[[Example], bool] | None

    @cached_property
    def _both(self) -> tuple[Subset, Subset]:
        examples, separate = self.task.examples, self.task.evaluation
        keys = _hashes(examples)
        if separate is not None and len(separate.examples):
            held, first = np.unique(_hashes(separate.examples), return_index=True)
            training, asked = _without(examples, keys, held, self.task.name), Subset(separate.examples, first)
        else:
            distinct, first = np.unique(keys, return_index=True)
            count = held_out_count(len(distinct), self.share)
            if not count:
                logger.warning(
                    "task %r: %d distinct prompts are too few to hold any out, so evaluation asks training prompts",
                    self.task.name, len(distinct),
                )  # fmt: skip
            asked = Subset(examples, first[:count])
            training = Subset(examples, np.flatnonzero(~np.isin(keys, distinct[:count])))
        if self.trained_before is not None:
            keep = [not self.trained_before(example) for example in asked]
            asked = Subset(asked.examples, asked.indices[np.array(keep, np.bool_)])
        return training, asked

    @property
    def training(self) -> Subset:
        return self._both[0]

    @property
    def evaluation(self) -> Subset:
        return self._both[1]


def _without(examples: Sequence[Example], keys: Keys, held: Keys, name: str) -> Subset:
    """Return the examples whose prompts do not occur in the evaluation."""
    kept = np.flatnonzero(~np.isin(keys, held))
    dropped = len(keys) - len(kept)
    if not len(kept):
        raise TaskError(
            f"task {name!r}: all {dropped} training prompts also occur among the evaluation examples, so there is "
            "nothing to train on; give evaluation other examples, or set evaluation.hold_out = 0"
        )
    if dropped:
        logger.warning(
            "task %r: %d of %d examples also occur among the evaluation examples and are not trained on",
            name, dropped, len(keys),
        )  # fmt: skip
    return Subset(examples, kept)


def _hashes(examples: Iterable[Example]) -> Keys:
    return np.fromiter((prompt_hash(example) for example in examples), np.uint64)


@dataclass(frozen=True)
class EvaluationSet:
    """What an evaluation asks."""

    task: Task
    """Its reward functions score the answers."""
    examples: Sequence[Example]
    """Distinct prompts."""
    held_out: bool | None
    """Whether they are kept out of training; None if that is not known."""


def evaluation_set(task: Task, count: int, seed: int) -> EvaluationSet:
    """Return up to `count` prompts for a run on this task: held out, or training prompts in an order by `seed`."""
    if task.evaluation is not None and len(task.evaluation.examples):
        return EvaluationSet(task.evaluation, _distinct(task.evaluation.examples, count), held_out=True)
    return EvaluationSet(task, _distinct(islice(task.ordered(seed), len(task.examples)), count), held_out=False)


def evaluation_set_of_model(task: Task, count: int) -> EvaluationSet:
    """Return up to `count` prompts for a model whose training is not known.

    They are the task's examples for evaluation, if it has any. Otherwise the smallest hashes come first: if a run made
    the model, those are the prompts that it held out.
    """
    if task.evaluation is not None and len(task.evaluation.examples):
        return evaluation_set(task, count, seed=0)
    return EvaluationSet(task, in_hash_order(task.examples)[:count], held_out=None)


def in_hash_order(examples: Sequence[Example]) -> list[Example]:
    """Return one example for each distinct prompt, in the order of their hashes."""
    _, first = np.unique(_hashes(examples), return_index=True)
    return Subset(examples, first)[:]


def without_prompts(examples: Sequence[Example], trained: Sequence[Example]) -> list[Example]:
    """Return one example for each distinct prompt that does not occur in `trained`, in the order of their hashes."""
    seen = set(_hashes(trained).tolist())
    return [example for example in in_hash_order(examples) if prompt_hash(example) not in seen]


def _distinct(examples: Iterable[Example], count: int) -> list[Example]:
    found: dict[int, Example] = {}
    for example in examples:
        found.setdefault(prompt_hash(example), example)
        if len(found) == count:
            break
    return list(found.values())


def samples_for(samples: int, prompts: int, distinct: int) -> int:
    """Return the samples per prompt: more than asked for if there are fewer distinct prompts, at most 16.

    >>> samples_for(1, prompts=64, distinct=64), samples_for(1, prompts=64, distinct=20), samples_for(8, 64, 2)
    (1, 4, 16)
    """
    return max(samples, min(-(-samples * prompts // max(distinct, 1)), 16))
