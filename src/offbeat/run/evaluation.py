"""Pass rates beside a run: always the same prompts, answered by the policy as it is now."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from offbeat.config import Config
from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.hf import HfEngine
from offbeat.seeds import derive
from offbeat.tasks.data import prompt_at
from offbeat.tasks.evaluation import Attempts, evaluate
from offbeat.tasks.rewards import Columns
from offbeat.tasks.scoring import Outcome
from offbeat.tasks.task import Task
from offbeat.types import Json, Score


class Scoring(Protocol):
    """What `tasks.scoring.ScoringPool` is to an evaluation."""

    def score_all(self, items: Sequence[tuple[str, Columns]], /) -> list[Outcome]:
        """In order; blocks."""


@dataclass
class Evaluation:
    """Called with a step; the trainer stands still meanwhile."""

    config: Config
    task: Task
    tokenizer: PreTrainedTokenizerBase
    pool: Scoring
    model: PreTrainedModel
    """The trainer's own."""

    async def __call__(self, step: int) -> Mapping[str, Json]:
        settings, seed = self.config.evaluation, derive(self.config.seed, "evaluation")
        order = prompt_at(self.task, self.tokenizer, seed)
        prompts = [order(place) for place in range(settings.prompts)]
        sampling = Sampling(self.config.sampling.max_tokens, (self.tokenizer.eos_token_id,), settings.temperature)
        requests = [
            Request(f"evaluation-{place}", prompt.token_ids, settings.samples, sampling, derive(seed, step, place))
            for place, prompt in enumerate(prompts)
        ]
        answered = await HfEngine(self.model).generate(requests)
        texts = [
            (self.tokenizer.decode(one.token_ids.tolist(), skip_special_tokens=True), prompt.columns)
            for prompt, group in zip(prompts, answered, strict=True)
            for one in group
        ]
        scores = await asyncio.to_thread(self.pool.score_all, texts)
        rewards = [score.reward if isinstance(score, Score) else None for score in scores]
        size = settings.samples
        attempts = [Attempts(p.id, "all", rewards[i * size : (i + 1) * size]) for i, p in enumerate(prompts)]
        [row] = evaluate(attempts)
        return {
            "prompts": row.prompts,
            "unscorable": row.unscorable,
            **{name: [one.value, one.low, one.high] for name, one in row.estimates.items()},
        }
