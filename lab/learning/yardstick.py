"""What a publish was expected to bring, and what it brought: measured beside a run, without changing it.

`Watched` stands between the loop and its trainer. It scores a batch before and after it is trained on, and computes the
pass rate over all sums exactly, as the mean probability of the right answer. Nothing here draws a random number.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lab.learning.rows import Promised, Published
from lab.learning.task import task
from offbeat.objective.bound import PAPER_FACTOR, TIGHT_FACTOR, group_bounds, predicted_gain
from offbeat.rollout.hf import sequence_logprobs
from offbeat.run.learner import LocalLearner
from offbeat.trainer.trainer import RefusedBatch, Trained
from offbeat.types import UNKNOWN, Group, Json, Score


@dataclass(frozen=True)
class Yardstick:
    """All sums with their answers, as tokens."""

    sequences: list[list[int]]
    prompts: list[int]
    """Tokens of each prompt."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> "Yardstick":
        """As `tokenizer` writes them, each ended."""
        asked = [tokenizer.encode(str(example.prompt)) for example in task.examples]
        answers = [tokenizer.encode(str(example.columns["answer"])) for example in task.examples]
        ended = [[*prompt, *answer, tokenizer.eos_token_id] for prompt, answer in zip(asked, answers, strict=True)]
        return cls(ended, [len(prompt) for prompt in asked])

    def pass_rates(self, model: PreTrainedModel) -> Tensor:
        """The probability of the right answer to each sum, [P]."""
        scored = sequence_logprobs(model, self.sequences)
        sums = [float(one[start - 1 :].sum()) for one, start in zip(scored, self.prompts, strict=True)]
        return torch.tensor(sums, dtype=torch.float64).exp()


def estimate(values: Tensor) -> list[float]:
    """Mean and standard error of independent values.

    >>> [round(value, 3) for value in estimate(torch.tensor([1.0, 3.0]))]
    [2.0, 1.0]
    """
    return [float(values.mean()), float(values.std()) / len(values) ** 0.5]


def promised(model: PreTrainedModel, groups: Sequence[Group], realised_P: Tensor) -> Promised:
    """What `groups` promise of the model's policy π over the one that wrote them, α: the gain, and the bound on it.

    The bound of docs/objectives.md is asked about a publish, π against α itself, so that its term TV(π_k, α) is 0.
    """
    rewards, ratios = _rewards_and_log_ratios(model, groups)
    scored, none = torch.ones_like(rewards, dtype=torch.bool), torch.zeros_like(ratios)
    return {
        "gain": estimate(predicted_gain(rewards, scored, ratios)),
        "normalised": estimate((ratios.softmax(-1) * rewards).sum(-1) - rewards.mean(-1)),
        "bound_paper": estimate(group_bounds(rewards, scored, ratios, none, PAPER_FACTOR)),
        "bound_tight": estimate(group_bounds(rewards, scored, ratios, none, TIGHT_FACTOR)),
        "realised": estimate(realised_P),
    }


def _rewards_and_log_ratios(model: PreTrainedModel, groups: Sequence[Group]) -> tuple[Tensor, Tensor]:
    """[B, G] each, the second of whole completions."""
    every = [(group, one) for group in groups for one in group.completions]
    scored = sequence_logprobs(model, [[*g.prompt.token_ids.tolist(), *one.token_ids.tolist()] for g, one in every])
    rewards, ratios = [], []
    for (group, one), logprobs in zip(every, scored, strict=True):
        if not isinstance(one.score, Score) or one.behavior_logprobs is UNKNOWN:
            raise ValueError(f"{one.id} has no score or no log-probs: a promise needs both")
        rewards.append(one.score.reward)
        ratios.append(float(logprobs[len(group.prompt.token_ids) - 1 :].sum() - one.behavior_logprobs.sum()))
    shape = (len(groups), -1)
    return torch.tensor(rewards, dtype=torch.float64).view(shape), torch.tensor(ratios, dtype=torch.float64).view(shape)


@dataclass
class Watched(LocalLearner):
    """The trainer of a run, watched."""

    yardstick: Yardstick
    every: int
    """Steps between two points of the curve."""
    asked: Callable[[int], bool]
    """Whether the publish that may come with this step is to be asked for its promise. The batch must be by the version
    published last."""
    curve: dict[int, float] = field(default_factory=dict)
    """Pass rate of the policy by step."""
    published: list[Published] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._serving = self._rates()
        self._batch: Sequence[Group] = ()
        self._unseen: Promised | None = None

    @property
    def _model(self) -> PreTrainedModel:
        return self.rank.trainer.policy_model.model

    def _rates(self) -> Tensor:
        """Of the policy as it is now, [P]; computed once a step."""
        if self.step not in self.curve:
            self._now = self.yardstick.pass_rates(self._model)
            self.curve[self.step] = float(self._now.mean())
        return self._now

    async def train(self, groups: Sequence[Group]) -> Trained | RefusedBatch:
        """See `Learner`."""
        self._batch = groups if self.asked(self.step + 1) else ()
        self._unseen = self._ask() if self._batch else None
        done = await super().train(groups)
        if self.step % self.every == 0:
            self._rates()
        return done

    async def publish(self, version: int) -> Mapping[str, Json]:
        """See `Learner`."""
        said = await super().publish(version)
        row: Published = {"step": version, "bytes": cast(int, said["bytes"])}
        if self._unseen is not None:
            row["unseen"], row["seen"] = self._unseen, self._ask()
        self.published.append(row)
        self._serving = self._rates()
        return said

    def _ask(self) -> Promised:
        """What the batch promises of the policy as it is now over the one served, and what is true."""
        return promised(self._model, self._batch, self._rates() - self._serving)
