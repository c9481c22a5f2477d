"""Reward functions as users write them for TRL, in the patterns of its documentation.

Each has a batch as TRL passes it. The checks call a function both ways: like TRL, with the whole batch, and through the
scoring pool, with one completion at a time.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass

from offbeat.types import Json


def many_letters(completions: list[str], **kwargs: object) -> list[float]:
    """Score plain text without columns."""
    return [min(1.0, len(set(text)) / 10) for text in completions]


def think_format(completions: list[list[dict[str, str]]], **kwargs: object) -> list[float]:
    """Score chats, where each completion is a list of messages."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think>.+$", content, re.DOTALL) else 0.0 for content in contents]


def boxed(completions: list[list[dict[str, str]]], ground_truth: list[str], **kwargs: object) -> list[float]:
    """Score with a column of the dataset."""
    found = [re.search(r"\\boxed\{(.*?)\}", completion[0]["content"]) for completion in completions]
    return [float(match is not None and match[1] == truth) for match, truth in zip(found, ground_truth, strict=True)]


def sums_only(prompts: list[str], completions: list[str], task: list[str], **kwargs: object) -> list[float | None]:
    """Score one of several tasks in a dataset: None if a completion belongs to another task."""
    return [
        (1.0 if len(completion) <= len(prompt) else 0.0) if kind == "sum" else None
        for prompt, completion, kind in zip(prompts, completions, task, strict=True)
    ]


def brief(completion_ids: list[list[int]], **kwargs: object) -> list[float]:
    """Score token ids."""
    return [1.0 if len(ids) <= 3 else 0.5 for ids in completion_ids]


async def patient(prompts: list[str], completions: list[str], **kwargs: object) -> list[float]:
    """Score in a coroutine, as for rewards that come over the network."""
    return [float(prompt[0] == completion[0]) for prompt, completion in zip(prompts, completions, strict=True)]


@dataclass(frozen=True)
class Case:
    """A function and a batch to call it with."""

    function: Callable[..., object]
    texts: list[str]
    records: list[dict[str, Json]]
    """The columns of each completion, including the prompt."""

    def batch(self) -> dict[str, list[object]]:
        """Return the keyword arguments that TRL passes."""
        names = [name for name in self.records[0] if name != "prompt"]
        chat = not isinstance(self.records[0]["prompt"], str)
        completions: list[object] = [[{"role": "assistant", "content": t}] if chat else t for t in self.texts]
        columns: dict[str, list[object]] = {name: [record[name] for record in self.records] for name in names}
        return {"prompts": [record["prompt"] for record in self.records], "completions": completions, **columns}


def _chat(question: str) -> Json:
    return [{"role": "user", "content": question}]


CASES = [
    Case(many_letters, ["hello", "aaaa", "0123456789x"], [{"prompt": "x"}] * 3),
    Case(think_format, ["<think>2+2</think>4", "4", "<think>"], [{"prompt": _chat("2+2?")}] * 3),
    Case(
        boxed,
        [r"so \boxed{4}", r"so \boxed{5}", "5"],
        [{"prompt": _chat("2+2?"), "ground_truth": "4"}, *[{"prompt": _chat("2+3?"), "ground_truth": "5"}] * 2],
    ),
    Case(sums_only, ["42", "a long story", "7"], [{"prompt": "17+25=", "task": t} for t in ("sum", "sum", "essay")]),
    Case(brief, ["a", "b"], [{"prompt": "x", "completion_ids": [1, 2]}, {"prompt": "x", "completion_ids": [1] * 9}]),
    Case(patient, ["abc", "xyz"], [{"prompt": "a"}, {"prompt": "b"}]),
]
