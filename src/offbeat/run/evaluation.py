"""Pass rates of the policy during a run. `evaluation_model.py` evaluates any model.

`evaluation_prompts` is what a run asks. Its workers answer (`evaluation_rounds.py`); in a run without workers,
`PolicyEvaluation` asks the trainer's own model.
"""

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from offbeat.config import Config
from offbeat.errors import PromptTooLong
from offbeat.experience.lance_table import exists
from offbeat.experience.schema import Tables
from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.generation import Scorer
from offbeat.rollout.hf import HfEngine
from offbeat.rollout.stopping import stop_tokens
from offbeat.run.evaluation_leases import EvaluationPrompt, pass_rates
from offbeat.run.fitting_prompts import prompt_limit
from offbeat.scoring.pool import Outcome
from offbeat.seeds import derive
from offbeat.tasks.data import Example, tokens
from offbeat.tasks.rewards import FOR_EVALUATION, Answers
from offbeat.tasks.split import evaluation_set, samples_for
from offbeat.tasks.task import Task
from offbeat.types import Json


def evaluation_prompts(
    config: Config, task: Task, tokenizer: PreTrainedTokenizerBase, version: int
) -> list[EvaluationPrompt]:
    """Return what is asked of a version: always the same prompts, each version with its own random streams.

    No entry has more completions than a group, so an engine needs no more memory for it than for training prompts.
    Prompts over the limit are left out, as in training.
    """
    settings, size, seed = config.evaluation, config.group_size, derive(config.seed, "evaluation")
    asked, found = evaluation_set(task, settings.prompts, seed), []
    texts = ((example, tokens(example.prompt, tokenizer)) for example in asked.examples)
    limit = prompt_limit(config)
    fitting = [(example, token_ids) for example, token_ids in texts if len(token_ids) <= limit]
    if not fitting:
        raise PromptTooLong(
            f"all {len(asked.examples)} prompts for evaluation have more than {limit} tokens; raise "
            "engine.max_prompt_tokens"
        )
    samples = samples_for(settings.samples, settings.prompts, len(fitting))
    for place, (example, token_ids) in enumerate(fitting):
        prompt = asked.task.prompt(example, token_ids)
        if asked.task.rewards != task.rewards:
            prompt = replace(prompt, columns={**prompt.columns, FOR_EVALUATION: True})
        for first in range(0, samples, size):
            stream = derive(seed, version, place, *([first] if first else []))
            one = EvaluationPrompt(
                place, prompt, min(size, samples - first), stream, settings.temperature, False, asked.held_out,
                settings.samples,
            )  # fmt: skip
            found.append(one)
        if settings.greedy:
            found.append(replace(one, size=1, greedy=True))
    return found


@dataclass(frozen=True)
class LoggedPrompts:
    """Says of an example whether its prompt is in an experience log that the run also trains on."""

    uri: str
    load_tokenizer: Callable[[], PreTrainedTokenizerBase]

    @cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return self.load_tokenizer()

    @cached_property
    def _seen(self) -> set[bytes]:
        if not exists(f"{self.uri.rstrip('/')}/groups.lance"):
            return set()
        groups = Tables.open(self.uri, create=False).groups
        rows = groups.scan(0, groups.rows(), ["prompt_token_ids"])
        return {np.asarray(one, np.int32).tobytes() for one in rows["prompt_token_ids"].to_pylist()}

    def __call__(self, example: Example) -> bool:
        return np.asarray(tokens(example.prompt, self._tokenizer), np.int32).tobytes() in self._seen


@dataclass
class PolicyEvaluation:
    """Evaluates the trainer's current policy at a step, for runs without workers. The trainer waits for it."""

    config: Config
    task: Task
    tokenizer: PreTrainedTokenizerBase
    pool: Scorer
    model: PreTrainedModel
    """The trainer's own model, not a copy."""

    async def __call__(self, step: int) -> Mapping[str, Json]:
        asked = evaluation_prompts(self.config, self.task, self.tokenizer, step)
        engine, at_once = HfEngine(self.model), self.config.workers.groups_at_once
        scored: list[Future[list[Outcome]]] = []
        for start in range(0, len(asked), at_once):
            batch = asked[start : start + at_once]
            requests = [
                Request(f"evaluation-{step}-{start + i}", one.prompt.token_ids, one.size, self._sampling(one), one.seed)
                for i, one in enumerate(batch)
            ]
            for one, completions in zip(batch, await engine.generate(requests), strict=True):
                ids = [answer.token_ids.tolist() for answer in completions]
                answers = Answers(
                    self.tokenizer.batch_decode(ids, skip_special_tokens=True), one.prompt.columns, ids, step
                )
                scored.append(await asyncio.to_thread(self.pool.score_group, answers))
        await asyncio.gather(*map(asyncio.wrap_future, scored))
        return pass_rates(asked, [outcomes.result() for outcomes in scored])

    def _sampling(self, asked: EvaluationPrompt) -> Sampling:
        settings = self.config.sampling
        stops = () if settings.ignore_eos else stop_tokens(self.model.generation_config, self.tokenizer)
        return Sampling(
            settings.max_tokens, stops, asked.temperature, top_k=int(asked.greedy), min_tokens=settings.min_tokens
        )
