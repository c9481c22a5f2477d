"""Answers of another model to all sums, and what the arms of block e do with them.

The other model is wider than ours and makes other mistakes. It answers each of the hundred sums in eight groups of
eight: 800 groups. A step gets four groups of the policy and two groups of the other model for each of them.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

import torch
from torch.optim import AdamW
from transformers import PreTrainedTokenizerBase

from lab.learning.model import LESSONS, SUMS, answer_loss, directory
from lab.learning.task import right, task
from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.hf import HfEngine
from offbeat.seeds import derive
from offbeat.types import UNKNOWN, Completion, Group, Score
from tests.fixtures.tiny_model import load_tokenizer, save_tokenizer

PER_PROMPT: Final = 8
"""Groups of the other model for each prompt."""
PER_GROUP: Final = 2
"""How many of them accompany a group of ours. Each is used once in 100 steps of 4 groups."""
SIZE: Final = 8
SUPERVISED_ROWS: Final = 64
"""Right answers in a batch of supervised training. One pass over all of them."""


class Use(StrEnum):
    """What a step does with the other model's groups."""

    GROUPS = "groups without log-probs"
    LOGPROBS = "groups with log-probs"
    ONE_GROUP = "in one group with ours"
    SUPERVISED = "supervised training on the right ones, before the run"


@dataclass
class Others:
    """The other model's groups, taken prompt by prompt."""

    groups: Mapping[str, list[Group]]
    """Those that are left, by the id of their prompt."""
    use: Use

    @classmethod
    def of(cls, seed: int, use: Use) -> "Others":
        return cls(answers(seed), use)

    def beside(self, ours: Sequence[Group]) -> list[Group]:
        """Return our groups with those of the other model to the same prompts."""
        found: list[Group] = []
        for group in ours:
            left = self.groups[group.prompt.id]
            theirs = [left.pop() for _ in range(min(PER_GROUP, len(left)))]
            if self.use is not Use.LOGPROBS:
                theirs = [_without_logprobs(one) for one in theirs]
            if self.use is Use.ONE_GROUP:
                more = [completion for one in theirs for completion in one.completions]
                found.append(replace(group, completions=(*group.completions, *more)))
            else:
                found += [group, *theirs]
        return found


def answers(seed: int) -> dict[str, list[Group]]:
    """Let the other model answer every sum, and grade its answers."""
    place = directory(LESSONS["other-sums"])
    tokenizer, engine = load_tokenizer(place), HfEngine.start(place)
    sampling = Sampling(4, (tokenizer.eos_token_id,))
    prompts = {example.id: task.prompt(example, tokenizer.encode(str(example.prompt))) for example in task.examples}
    found: dict[str, list[Group]] = {name: [] for name in prompts}
    for repetition in range(PER_PROMPT):
        requests = [
            Request(f"theirs-{name}-{repetition}", prompt.token_ids, SIZE, sampling, derive(seed, name, repetition))
            for name, prompt in prompts.items()
        ]
        written = asyncio.run(engine.generate(requests))
        for request, (name, prompt), completions in zip(requests, prompts.items(), written, strict=True):
            graded = tuple(_graded(one, tokenizer, prompt.columns) for one in completions)
            found[name].append(Group(request.id, prompt, graded))
    return found


def _graded(one: Completion, tokenizer: PreTrainedTokenizerBase, columns: Mapping[str, object]) -> Completion:
    text = tokenizer.decode(one.token_ids.tolist(), skip_special_tokens=True)
    return replace(one, versions=(), source="theirs", score=Score(right(text, columns)))  # type: ignore[arg-type]


def _without_logprobs(group: Group) -> Group:
    completions = (replace(one, behavior_logprobs=UNKNOWN) for one in group.completions)
    return replace(group, completions=tuple(completions))


def supervised(seed: int, rate: float, place: Path) -> Path:
    """Train our model once over the right answers of the other one, and return where it is saved."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    model = LlamaForCausalLM.from_pretrained(directory(SUMS), dtype=torch.float32)
    rows = [
        (group.prompt.token_ids.tolist(), one.token_ids.tolist()[:-1])
        for groups in answers(seed).values()
        for group in groups
        for one in group.completions
        if isinstance(one.score, Score) and one.score.reward == 1
    ]
    optimizer = AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    for batch in torch.randperm(len(rows)).split(SUPERVISED_ROWS):
        optimizer.zero_grad()
        answer_loss(model, [rows[index] for index in batch.tolist()]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    save_tokenizer(place)
    model.save_pretrained(place)
    return place
