"""Pass rates beside a run: always the same prompts, answered by the policy as it is now."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Protocol

import typer
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from offbeat.config import Config
from offbeat.evaluation import Attempts, evaluate
from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.hf import HfEngine
from offbeat.scoring.pool import Outcome, ScoringPool
from offbeat.seeds import derive
from offbeat.tasks.data import prompt_at, tokens
from offbeat.tasks.rewards import Columns
from offbeat.tasks.task import Example, Task
from offbeat.types import Json, Score

HUB = "hf:"
_SCORING_SECONDS = 600.0


@dataclass(frozen=True)
class Sampled:
    """A model that answers, with every sampling parameter explicit."""

    engine: HfEngine
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling

    def answers(self, example: Example, samples: int, seed: int) -> list[str]:
        """Completions of one prompt."""
        request = Request(example.id, tokens(example.prompt, self.tokenizer), samples, self.sampling, seed)
        [written] = asyncio.run(self.engine.generate([request]))
        texts = self.tokenizer.batch_decode([one.token_ids for one in written], skip_special_tokens=True)
        return [str(text) for text in texts]


def _sampling(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, temperature: float, limit: int) -> Sampling:
    """Temperature 0 is greedy: always the likeliest token."""
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    stops = tuple(ends) if isinstance(ends, list) else () if ends is None else (ends,)
    return Sampling(limit, stops, temperature or 1.0, top_k=0 if temperature else 1)


def load_model(name: str, *, temperature: float, max_tokens: int) -> Sampled:
    """A model by directory, or by `hf:owner/name`: a mistyped path never reaches the network. Its code is not run."""
    if not name.startswith(HUB) and not Path(name).is_dir():
        raise typer.BadParameter(
            f"{name} is neither an experience log nor the directory of a model; a model of the hub is {HUB}owner/name"
        )
    place = name.removeprefix(HUB)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False)
        model = AutoModelForCausalLM.from_pretrained(place, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{name} is no experience log, nor a model that can be loaded: {error}") from error
    return Sampled(HfEngine(model), tokenizer, _sampling(model, tokenizer, temperature, max_tokens))


def attempts(
    sampled: Sampled, task: Task, column: str | None, *, prompts: int, samples: int, seed: int, workers: int
) -> Iterator[Attempts]:
    """Ask the first prompts of the task's order, each as often as asked for."""
    asked = islice(task.ordered(derive(seed, "eval")), min(prompts, len(task.examples)))
    with ScoringPool.of(task, workers=workers) as pool:
        waiting: list[tuple[Example, list[str], list[Future[Outcome]]]] = []
        for number, example in enumerate(asked):
            texts = sampled.answers(example, samples, derive(seed, "eval", "sampling", number))
            scores = [pool.score(text, example.record, of=f"{example.id}/{i}") for i, text in enumerate(texts)]
            waiting.append((example, texts, scores))
        for example, texts, scores in waiting:
            outcomes = [score.result(timeout=_SCORING_SECONDS) for score in scores]
            rewards = [outcome.reward if isinstance(outcome, Score) else None for outcome in outcomes]
            answers = None if task.answer is None else [task.answer(text) for text in texts]
            name = "all" if column is None else str(example.columns.get(column, f"no {column}"))
            yield Attempts(example.id, name, rewards, answers)


class Scoring(Protocol):
    """What `tasks.scoring.ScoringPool` is to an evaluation."""

    def score_all(self, items: Sequence[tuple[str, Columns]], /) -> list[Outcome]:
        """In order; blocks."""


@dataclass
class PolicyEvaluation:
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
