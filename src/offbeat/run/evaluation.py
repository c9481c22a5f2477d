"""Pass rates: of the policy during a run, and of any model (`load_model`, `sample_attempts`).

`evaluation_prompts` is what a run asks. Its workers answer (`evaluation_rounds.py`); in a run without workers,
`PolicyEvaluation` asks the trainer's own model.
"""

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
from offbeat.evaluation import Attempts
from offbeat.hub import hub_name, model_directory
from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.hf import HfEngine
from offbeat.rollout.stopping import stop_tokens
from offbeat.run.evaluation_leases import EvaluationPrompt, pass_rates
from offbeat.scoring.pool import Outcome, ScoringPool
from offbeat.seeds import derive
from offbeat.tasks.data import Example, tokens
from offbeat.tasks.rewards import Columns
from offbeat.tasks.task import Task, prompt_at
from offbeat.types import Completion, Json, Score

_SCORING_SECONDS: Final = 600.0


class BatchScorer(Protocol):
    """The part of `ScoringPool` that `PolicyEvaluation` uses."""

    def score_all(self, items: Sequence[tuple[str, Columns]], /) -> list[Outcome]:
        """Score completions and return the outcomes in order; blocks."""


def evaluation_prompts(
    config: Config, task: Task, tokenizer: PreTrainedTokenizerBase, version: int
) -> list[EvaluationPrompt]:
    """Return what is asked of a version: always the same prompts, each version with its own random streams.

    No entry has more completions than a group, so an engine needs no more memory for it than for training prompts.
    """
    settings, size, seed = config.evaluation, config.group_size, derive(config.seed, "evaluation")
    order, found = prompt_at(task, tokenizer, seed), []
    for place in range(settings.prompts):
        prompt = order(place)
        for first in range(0, settings.samples, size):
            stream = derive(seed, version, place, *([first] if first else []))
            found.append(
                EvaluationPrompt(place, prompt, min(size, settings.samples - first), stream, settings.temperature)
            )
    return found


@dataclass
class PolicyEvaluation:
    """Evaluates the trainer's current policy at a step, for runs without workers. The trainer waits for it."""

    config: Config
    task: Task
    tokenizer: PreTrainedTokenizerBase
    pool: BatchScorer
    model: PreTrainedModel
    """The trainer's own model, not a copy."""

    async def __call__(self, step: int) -> Mapping[str, Json]:
        asked = evaluation_prompts(self.config, self.task, self.tokenizer, step)
        stops = stop_tokens(self.model.generation_config, self.tokenizer)
        engine, at_once = HfEngine(self.model), self.config.workers.groups_at_once
        texts: list[tuple[str, Columns]] = []
        for start in range(0, len(asked), at_once):
            batch = asked[start : start + at_once]
            requests = [
                Request(f"evaluation-{step}-{start + i}", one.prompt.token_ids, one.size,
                        Sampling(self.config.sampling.max_tokens, stops, one.temperature), one.seed)
                for i, one in enumerate(batch)
            ]  # fmt: skip
            for one, completions in zip(batch, await engine.generate(requests), strict=True):
                texts += [(self._decode(answer), one.prompt.columns) for answer in completions]
        outcomes = iter(await asyncio.to_thread(self.pool.score_all, texts))
        return pass_rates(asked, [list(islice(outcomes, one.size)) for one in asked])

    def _decode(self, completion: Completion) -> str:
        return str(self.tokenizer.decode(completion.token_ids.tolist(), skip_special_tokens=True))


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
