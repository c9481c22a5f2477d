"""Measure the promised and the realized gain of publishes during a run, without changing the run.

`WatchedLearner` is a layer between the loop and its trainer. It computes the log-probs of a batch before and after the
policy trains on it, and the exact pass rate over all sums, as the mean probability of the right answer. It draws no
random numbers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lab.learning.rows import Promised, Published
from lab.learning.task import task
from offbeat.objective.bound import PAPER_FACTOR, TIGHT_FACTOR, group_bounds, normalized_gain, predicted_gain
from offbeat.run.learner import LocalLearner
from offbeat.tasks.data import Example
from offbeat.trainer.forward import sequence_logprobs
from offbeat.trainer.trainer import RefusedBatch, Trained
from offbeat.types import UNKNOWN, Group, Json, Score, StepContext

PLACES: Final = {example.id: place for place, example in enumerate(task.examples)}


@dataclass(frozen=True)
class ExactPassRate:
    """Prompts with their right answers, as tokens; without others, all sums."""

    sequences: list[list[int]]
    prompts: list[int]
    """Number of tokens of each prompt."""

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, examples: Sequence[Example] = task.examples) -> "ExactPassRate":
        """Encode all prompts with their answers, each with the end token."""
        prompts = [tokenizer.encode(str(example.prompt)) for example in examples]
        answers = [tokenizer.encode(str(example.columns["answer"])) for example in examples]
        ended = [[*prompt, *answer, tokenizer.eos_token_id] for prompt, answer in zip(prompts, answers, strict=True)]
        return cls(ended, [len(prompt) for prompt in prompts])

    def pass_rates(self, model: PreTrainedModel) -> Tensor:
        """Return the probability of the right answer to each prompt, [P]."""
        logprobs = sequence_logprobs(model, self.sequences)
        sums = [float(one[start - 1 :].sum()) for one, start in zip(logprobs, self.prompts, strict=True)]
        return torch.tensor(sums, dtype=torch.float64).exp()


def estimate(values: Tensor) -> list[float]:
    """Return the mean and the standard error of independent values.

    >>> [round(value, 3) for value in estimate(torch.tensor([1.0, 3.0]))]
    [2.0, 1.0]
    """
    return [float(values.mean()), float(values.std()) / len(values) ** 0.5]


def promised(model: PreTrainedModel, groups: Sequence[Group], realised_P: Tensor) -> Promised:
    """Return what `groups` promise of the model's policy π over α, the policy that generated them: gain and bound.

    The bound (docs/how-it-works/objective.md) is that of a publish, π against α itself, so its term TV(π_k, α) is 0.
    """
    rewards, ratios = _rewards_and_log_ratios(model, groups)
    scored, none = torch.ones_like(rewards, dtype=torch.bool), torch.zeros_like(ratios)
    return {
        "gain": estimate(predicted_gain(rewards, scored, ratios)),
        "normalized": estimate(normalized_gain(rewards, scored, ratios)),
        "bound_paper": estimate(group_bounds(rewards, scored, ratios, none, PAPER_FACTOR)),
        "bound_tight": estimate(group_bounds(rewards, scored, ratios, none, TIGHT_FACTOR)),
        "realised": estimate(realised_P),
        "own": estimate(realised_P[[PLACES[group.prompt.id] for group in groups]]),
    }


def _rewards_and_log_ratios(model: PreTrainedModel, groups: Sequence[Group]) -> tuple[Tensor, Tensor]:
    """Return rewards and log-ratios of whole completions, [B, G] each."""
    every = [(group, one) for group in groups for one in group.completions]
    sequences = [[*group.prompt.token_ids.tolist(), *one.token_ids.tolist()] for group, one in every]
    rewards, ratios = [], []
    for (group, one), logprobs in zip(every, sequence_logprobs(model, sequences), strict=True):
        if not isinstance(one.score, Score) or one.behavior_logprobs is UNKNOWN:
            raise ValueError(f"{one.id} lacks a score or log-probs: a promise needs both")
        rewards.append(one.score.reward)
        ratios.append(float(logprobs[len(group.prompt.token_ids) - 1 :].sum() - one.behavior_logprobs.sum()))
    shape = (len(groups), -1)
    return torch.tensor(rewards, dtype=torch.float64).view(shape), torch.tensor(ratios, dtype=torch.float64).view(shape)


@dataclass
class WatchedLearner(LocalLearner):
    """The trainer of a run, with the pass rate and the promises of its publishes."""

    pass_rate: ExactPassRate
    every: int
    """Steps between two points of the curve."""
    measured: Callable[[int], bool]
    """True if the promise of a publish after this step is computed. The batch must come from the last published
    version."""
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
        """Return the pass rates of the current policy, [P]. They are computed once per step."""
        if self.step not in self.curve:
            self._now = self.pass_rate.pass_rates(self._model)
            self.curve[self.step] = float(self._now.mean())
        return self._now

    async def train(self, groups: Sequence[Group], context: StepContext) -> Trained | RefusedBatch:
        self._batch = groups if self.measured(self.step + 1) else ()
        self._unseen = self._promise() if self._batch else None
        done = await super().train(groups, context)
        if self.step % self.every == 0:
            self._rates()
        return done

    async def publish(self, version: int) -> Mapping[str, Json]:
        fields = await super().publish(version)
        row: Published = {"step": version, "bytes": cast(int, fields["bytes"])}
        if self._unseen is not None:
            row["unseen"], row["seen"] = self._unseen, self._promise()
        self.published.append(row)
        self._serving = self._rates()
        return fields

    def _promise(self) -> Promised:
        """Return what the batch promises of the current policy over the served one, and the realized gain."""
        return promised(self._model, self._batch, self._rates() - self._serving)
