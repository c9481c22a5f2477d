"""Pass rates: of the policy during a run (`PolicyEvaluation`), and of any model (`load_model`, `sample_attempts`)."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final, Protocol

from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from offbeat.config import Config
from offbeat.errors import ModelUnreadable
from offbeat.evaluation import Attempts, evaluate
from offbeat.hub import hub_name, model_directory
from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.hf import HfEngine
from offbeat.rollout.stopping import stop_tokens
from offbeat.scoring.pool import Outcome, ScoringPool
from offbeat.seeds import derive
from offbeat.tasks.data import Example, tokens
from offbeat.tasks.rewards import Columns
from offbeat.tasks.task import Task, prompt_at
from offbeat.types import Json, Score

_SCORING_SECONDS: Final = 600.0


class BatchScorer(Protocol):
    """The part of `ScoringPool` that `PolicyEvaluation` uses."""

    def score_all(self, items: Sequence[tuple[str, Columns]], /) -> list[Outcome]:
        """Score completions and return the outcomes in order; blocks."""


@dataclass
class PolicyEvaluation:
    """Evaluates the current policy, always on the same prompts. Call it with a step; the trainer waits for it."""

    config: Config
    task: Task
    tokenizer: PreTrainedTokenizerBase
    pool: BatchScorer
    model: PreTrainedModel
    """The trainer's own model, not a copy."""

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
        rewards = [_reward(outcome) for outcome in await asyncio.to_thread(self.pool.score_all, texts)]
        size = settings.samples
        attempts = [Attempts(p.id, "all", rewards[i * size : (i + 1) * size]) for i, p in enumerate(prompts)]
        [row] = evaluate(attempts)
        return {
            "prompts": row.prompts,
            "unscorable": row.unscorable,
            **{name: [one.value, one.low, one.high] for name, one in row.estimates.items()},
        }


def _reward(outcome: Outcome) -> float | None:
    return outcome.reward if isinstance(outcome, Score) else None


@dataclass(frozen=True)
class ModelSampler:
    """A model and every parameter it samples with."""

    engine: HfEngine
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling

    def answers(self, example: Example, samples: int, seed: int) -> list[str]:
        """Return the texts of `samples` completions of one prompt."""
        request = Request(example.id, tokens(example.prompt, self.tokenizer), samples, self.sampling, seed)
        [completions] = asyncio.run(self.engine.generate([request]))
        texts = self.tokenizer.batch_decode([one.token_ids for one in completions], skip_special_tokens=True)
        return [str(text) for text in texts]


def load_model(name: str, *, temperature: float, max_tokens: int) -> ModelSampler:
    """Load a model from a directory, or as `owner/name` from the hub. Code that the model brings is not run."""
    if hub_name(name) is None and not Path(name).is_dir():
        raise ModelUnreadable(
            f"{name} is neither an experience log nor the directory of a model; write a model of the hub as owner/name"
        )
    place = str(model_directory(name))
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ModelUnreadable(
            f"{name} is not an experience log, and no model can be loaded from it: {error}"
        ) from error
    return ModelSampler(HfEngine(model), tokenizer, sampling_for(model, tokenizer, temperature, max_tokens))


def sampling_for(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, temperature: float, max_tokens: int
) -> Sampling:
    """Return sampling parameters that stop at the model's end-of-text tokens. Temperature 0 is greedy."""
    stops = stop_tokens(model.generation_config, tokenizer)
    return Sampling(max_tokens, stops, temperature or 1.0, top_k=0 if temperature else 1)


def sample_attempts(
    model: ModelSampler, task: Task, column: str | None, *, prompts: int, samples: int, seed: int, workers: int
) -> Iterator[Attempts]:
    """Sample and score `samples` completions of each of the first prompts in the task's order.

    The value of `column` names the slice of a prompt; None puts all prompts into one slice.
    """
    examples = islice(task.ordered(derive(seed, "eval")), min(prompts, len(task.examples)))
    with ScoringPool.of(task, workers=workers) as pool:
        pending: list[tuple[Example, list[str], list[Future[Outcome]]]] = []
        for number, example in enumerate(examples):
            texts = model.answers(example, samples, derive(seed, "eval", "sampling", number))
            scores = [pool.score(text, example.record, of=f"{example.id}/{i}") for i, text in enumerate(texts)]
            pending.append((example, texts, scores))
        for example, texts, scores in pending:
            rewards = [_reward(score.result(timeout=_SCORING_SECONDS)) for score in scores]
            answers = None if task.answer is None else [task.answer(text) for text in texts]
            name = "all" if column is None else str(example.columns.get(column, f"no {column}"))
            yield Attempts(example.id, name, rewards, answers)
