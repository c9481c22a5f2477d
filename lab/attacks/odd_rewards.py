"""Reward functions with odd ranges and values, as people write them, and what each has to come to.

The answers are "4", which is right, and "five". `expected` are the rewards of both; None stands for no score, and a
text for the beginning of the sentence that ends the run.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from functools import partial

import numpy as np

from offbeat.tasks.rewards import Reward
from offbeat.types import Json, Score, Unscorable

ANSWERS = ("4", "five")
COLUMNS: dict[str, Json] = {"prompt": "2+2=", "answer": "4"}
Columns = dict[str, Json]


class SandboxError(RuntimeError):
    """The error of a sandbox that does not work."""


def right(text: str, columns: Columns) -> float:
    return float(text == columns["answer"])


def out_of_five(text: str, columns: Columns) -> float:
    return 5.0 * right(text, columns)


def penalty(text: str, columns: Columns) -> float:
    return 1.0 if right(text, columns) else -1.0


def boolean(text: str, columns: Columns) -> bool:
    return text == columns["answer"]


def integer(text: str, columns: Columns) -> int:
    return int(text == columns["answer"])


def numpy_bool(text: str, columns: Columns) -> object:
    return np.array([text == columns["answer"]]).all()


def torch_scalar(text: str, columns: Columns) -> object:
    import torch

    return torch.tensor(right(text, columns))


def decimal(text: str, columns: Columns) -> object:
    return Decimal("0.5") * int(right(text, columns))


def fraction(text: str, columns: Columns) -> object:
    return Fraction(1, 4) * int(right(text, columns))


def none_if_wrong(text: str, columns: Columns) -> float | None:
    return 1.0 if right(text, columns) else None


def no_return(text: str, columns: Columns) -> None:
    right(text, columns)


def nan_if_wrong(text: str, columns: Columns) -> float:
    return 1.0 if right(text, columns) else float("nan")


def always_nan(text: str, columns: Columns) -> float:
    return float("nan")


def infinite_if_wrong(text: str, columns: Columns) -> float:
    return 1.0 if right(text, columns) else -float("inf")


def huge_if_wrong(text: str, columns: Columns) -> float:
    return 1 if right(text, columns) else 10**400


def text_of_number(text: str, columns: Columns) -> object:
    return str(right(text, columns))


def one_in_a_list(text: str, columns: Columns) -> object:
    return [right(text, columns)]


def dictionary(text: str, columns: Columns) -> object:
    return {"score": right(text, columns)}


def complex_number(text: str, columns: Columns) -> object:
    return complex(right(text, columns))


def generator(text: str, columns: Columns) -> Iterator[float]:
    yield right(text, columns)


async def coroutine(text: str, columns: Columns) -> float:
    return right(text, columns)


def named_parts(text: str, columns: Columns) -> Score:
    return Score(0.75 * right(text, columns), {"digits": right(text, columns), "length": -0.25 * right(text, columns)})


def wrong_parts(text: str, columns: Columns) -> Score:
    return Score(1.0, {"digits": 0.5})


def unscorable(text: str, columns: Columns) -> object:
    return 1.0 if right(text, columns) else Unscorable("sandbox", "no sandbox here")


def of_array(completions: list[str], answer: list[str], **columns: object) -> object:
    return np.array(completions) == np.array(answer)


def of_tensor(completions: list[str], answer: list[str], **columns: object) -> object:
    import torch

    return torch.tensor([text == one for text, one in zip(completions, answer, strict=True)]).half()


def of_generator(completions: list[str], answer: list[str], **columns: object) -> Iterator[float]:
    return (float(text == one) for text, one in zip(completions, answer, strict=True))


def of_none_and_nan(completions: list[str], **columns: object) -> list[float | None]:
    return [None if text == "4" else float("nan") for text in completions]


def nested(completions: list[str], **columns: object) -> list[list[float]]:
    return [[1.0] for _ in completions]


def too_few(completions: list[str], **columns: object) -> list[float]:
    return [1.0]


def one_number(completions: list[str], **columns: object) -> float:
    return 1.0


def by_name(completions: list[str], **columns: object) -> dict[str, float]:
    return dict.fromkeys(completions, 1.0)


def raises(text: str, columns: Columns) -> float:
    raise KeyError("solution")


def raises_if_wrong(text: str, columns: Columns) -> float:
    return float(int(text) == 4)


def raises_for_a_group(completions: list[str], **columns: object) -> list[float]:
    return [float(int(text) == 4) for text in completions]


def needs_two(completions: list[str], **columns: object) -> list[float]:
    assert len(completions) > 3
    return [1.0 for _ in completions]


def sandbox_fails(text: str, columns: Columns) -> float:
    raise SandboxError("no namespaces here")


def service_fails(text: str, columns: Columns) -> float:
    raise ConnectionError("the service did not answer")


def act_if_wrong(text: str, columns: Columns, *, kind: str) -> float:
    """Do what makes a scoring process fail."""
    if right(text, columns):
        return 1.0
    match kind:
        case "spin":
            while True:
                pass
        case "sleep":
            time.sleep(60)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(3)
        case "eat":
            held = []
            while True:
                held.append(bytearray(1 << 24))
    return 1.0


Expected = list[float | None] | str


@dataclass(frozen=True)
class Odd:
    """A task of odd reward functions, and what has to become of the two answers."""

    name: str
    rewards: tuple[Callable[..., object] | Reward, ...]
    expected: Expected
    """A reward in it that is marked as the answer's fault is not a plain one: see `faults`."""
    reward_range: tuple[float, float] = (0.0, 1.0)
    faults: tuple[str, str] = ("", "")
    settings: dict[str, object] = field(default_factory=dict)


ODD = [
    Odd("above the range", (out_of_five,), "reward 5.0 is outside 0 to 1: set reward_range=(0, 5)"),
    Odd("within a wider range", (out_of_five,), [5.0, 0.0], (0, 5)),
    Odd("below the range", (penalty,), "reward -1.0 is outside 0 to 1: set reward_range=(-1, 1)"),
    Odd("a range below zero", (penalty,), [1.0, -1.0], (-1, 1)),
    Odd("a sum outside, parts within", (right, boolean), "reward 2.0 is outside 0 to 1: set reward_range=(0, 2)"),
    Odd("True and False", (boolean,), [1.0, 0.0]),
    Odd("integers", (integer,), [1.0, 0.0]),
    Odd("NumPy's own truth", (numpy_bool,), [1.0, 0.0]),
    Odd("a tensor without axes", (torch_scalar,), [1.0, 0.0], settings={"memory_mib": 4096}),
    Odd("decimals", (decimal,), [0.5, 0.0]),
    Odd("fractions", (fraction,), [0.25, 0.0]),
    Odd("None for some", (none_if_wrong,), [1.0, None]),
    Odd("NaN for some", (nan_if_wrong,), [1.0, 0.0], faults=("", "invalid")),
    Odd("a text", (text_of_number,), "reward 'text_of_number' returned '1.0', a str"),
    Odd("a list from a function of one text", (one_in_a_list,), "reward 'one_in_a_list' returned [1.0], a list"),
    Odd("an array from a TRL function", (of_array,), [1.0, 0.0]),
    Odd("None and NaN from a TRL function", (of_none_and_nan,), [None, None]),
    Odd("lists in a list", (nested,), "reward 'nested' returned [1.0], a list"),
    Odd("one reward for two completions", (too_few,), "reward 'too_few' returned 1 rewards for 2 completions"),
    Odd("a coroutine", (coroutine,), [1.0, 0.0]),
]
"""Twenty functions with odd ranges, types, None, NaN and lists."""

OTHERS = [
    Odd("nothing returned", (no_return,), [None, None]),
    Odd("NaN always", (always_nan,), [None, None]),
    Odd("minus infinity for some", (infinite_if_wrong,), [1.0, 0.0], faults=("", "invalid")),
    Odd("an integer that no float holds", (huge_if_wrong,), [1.0, 0.0], faults=("", "invalid")),
    Odd("a dictionary", (dictionary,), "reward 'dictionary' returned {'score': 1.0}, a dict"),
    Odd("a complex number", (complex_number,), "reward 'complex_number' returned (1+0j), a complex"),
    Odd("a generator from a function of one text", (generator,), "reward 'generator' returned <generator"),
    Odd("one number for a group", (one_number,), "reward 'one_number' returned 1.0 for 2 completions"),
    Odd("a dictionary for a group", (by_name,), "reward 'by_name' returned {'4': 1.0"),
    Odd("a tensor from a TRL function", (of_tensor,), [1.0, 0.0], settings={"memory_mib": 4096}),
    Odd("a generator from a TRL function", (of_generator,), [1.0, 0.0]),
    Odd("named parts", (named_parts,), [0.75, 0.0]),
    Odd("parts that do not sum to the reward", (wrong_parts,), "reward 'wrong_parts' returned Score(reward=1.0"),
    Odd("`Unscorable` returned", (unscorable,), [1.0, None]),
    Odd("None beside a reward", (right, no_return), [1.0, 0.0]),
    Odd("None beside a weight of 0", (none_if_wrong, Reward(right, weight=0.0)), [1.0, None]),
    Odd("weights of 0 only", (Reward(right, weight=0.0),), "task 'odd': every reward has weight 0"),
    Odd("an error for every answer", (raises,), [None, None]),
    Odd("an error for some", (raises_if_wrong,), [1.0, 0.0], faults=("", "crash")),
    Odd("an error in a group", (raises_for_a_group,), [1.0, 0.0], faults=("", "crash")),
    Odd("an error in every group", (needs_two,), [None, None]),
    Odd("a sandbox that fails", (sandbox_fails,), [None, None]),
    Odd("a service that fails", (service_fails,), [None, None]),
    *(
        Odd(
            f"a process that does: {kind}",
            (partial(act_if_wrong, kind=kind),),
            [1.0, None if ending is None else 0.0],
            faults=("", ending or ""),
            settings={"memory_mib": 512, "deadline": 0.5},
        )
        for kind, ending in {"spin": "timeout", "sleep": None, "kill": None, "exit": "crash", "eat": "crash"}.items()
    ),
    Odd(
        "a penalty for failures",
        (raises_if_wrong,),
        [1.0, -0.5],
        faults=("", "crash"),
        settings={"answer_fault": -0.5},
    ),
    Odd("no score for failures", (raises_if_wrong,), [1.0, None], settings={"answer_fault": "unscorable"}),
]
