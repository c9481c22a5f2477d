"""Pass rates of any model: of a directory, of the hub, or of a run, whose base model answers the same prompts."""

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from offbeat.config import Config
from offbeat.config.sections import TaskConfig
from offbeat.errors import ModelUnreadable, TaskError
from offbeat.evaluation import Attempts, EvaluationRow, evaluate
from offbeat.hub import hub_name, model_directory
from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.generation import GroupMaker
from offbeat.rollout.hf import HfEngine
from offbeat.run.build import logged_prompts, make_task
from offbeat.run.directory import RunDirectory
from offbeat.run.evaluation.leases import EvaluationPrompt
from offbeat.run.evaluation.rates import ask
from offbeat.scoring.pool import ScoringPool
from offbeat.seeds import derive
from offbeat.tasks.data import Example, tokens
from offbeat.tasks.split import (
    EvaluationSet,
    evaluation_set,
    evaluation_set_of_model,
    for_evaluation,
    in_hash_order,
    samples_for,
    without_prompts,
)
from offbeat.tasks.task import Task, make
from offbeat.tasks.tokenizer import decoder, read_tokenizer, stop_tokens
from offbeat.trainer.export import load_policy
from offbeat.trainer.loading import read_model, read_rounded
from offbeat.types import Completion, Json, Prompt

_PROMPTS: Final = 64
_MAX_TOKENS: Final = 256


@dataclass(frozen=True)
class ModelSampler:
    """A model and every parameter it samples with."""

    engine: HfEngine
    tokenizer: PreTrainedTokenizerBase
    sampling: Sampling

    def texts(self, example: Example, samples: int, seed: int) -> list[str]:
        """Return `samples` completions of one prompt."""
        request = Request(example.id, tokens(example.prompt, self.tokenizer), samples, self.sampling, seed)
        [completions] = asyncio.run(self.engine.generate([request]))
        decode = decoder(self.tokenizer)
        return [decode(one.token_ids.tolist()) for one in completions]


def load_model(
    name: str, *, temperature: float, max_tokens: int, chat_template_kwargs: Mapping[str, Json] | None = None
) -> ModelSampler:
    """Load a model from a directory, or as `owner/name` from the hub. Code that the model brings is not run."""
    if hub_name(name) is None and not Path(name).is_dir():
        raise ModelUnreadable(
            f"{name} is neither an experience log nor the directory of a model; write a model of the hub as owner/name"
        )
    place = model_directory(name)
    return policy_sampler(read_model(place), read_tokenizer(place, chat_template_kwargs), temperature, max_tokens)


def policy_sampler(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, temperature: float, max_tokens: int
) -> ModelSampler:
    """Return a sampler that stops at the model's end-of-text tokens. Temperature 0 is greedy."""
    stops = stop_tokens(model.generation_config, tokenizer)
    sampling = Sampling(max_tokens, stops, temperature or 1.0, top_k=0 if temperature else 1)
    return ModelSampler(HfEngine(model), tokenizer, sampling)


def attempts(
    model: ModelSampler,
    asked: EvaluationSet,
    column: str | None,
    *,
    samples: int,
    greedy: bool = False,
    seed: int = 0,
    workers: int = 2,
    answered: Callable[[int], None] = lambda count: None,
) -> list[Attempts]:
    """Sample and score `samples` completions of each prompt, and a greedy one beside them if wanted.

    The value of `column` names the slice of a prompt; None puts all prompts into one slice. `answered` is called with
    the number of prompts that have their scores, a greedy completion counted as a prompt.
    """
    task, sampling = asked.task, model.sampling
    decode = decoder(model.tokenizer)
    prompts = []
    for place, example in enumerate(asked.examples):
        prompt, stream = (
            task.prompt(example, tokens(example.prompt, model.tokenizer)),
            derive(seed, "eval", "sampling", place),
        )
        one = EvaluationPrompt(place, prompt, samples, stream, sampling.temperature, greedy=sampling.top_k == 1)
        prompts += [one, *([replace(one, size=1, greedy=True, beside=True)] if greedy else [])]

    def slice_of(prompt: Prompt) -> str:
        return "all" if column is None else str(prompt.columns.get(column, f"no {column}"))

    def final_answer(completion: Completion) -> str | None:
        assert task.answer is not None
        return task.answer(decode(completion.token_ids.tolist()))

    with ScoringPool.of(replace(task, evaluation=None), workers=workers) as pool:
        maker = GroupMaker(samples, sampling, decode, pool)
        leases = asyncio.run(ask(model.engine, maker, prompts, at_once=1, answered=answered))
    return leases.attempts(slice_of, None if task.answer is None else final_answer)


def evaluation_set_of_run(config: Config, other: Task | None, count: int) -> EvaluationSet:
    """Return up to `count` prompts to ask a run's policy: of its own task, or of another one.

    They are prompts that the run does not train on, if there are any, and the same ones that it asks while it trains.
    """
    if other is None and not config.asks and config.task == TaskConfig():
        raise TaskError("the run trained on stored groups and has no task; say what to ask: --task gsm8k")
    own, logged = make_task(config), logged_prompts(config)
    if other is None and own.evaluation is None:
        other = make(config.task.name, config.task.options).evaluation
    part = None if other is None else for_evaluation(other)
    if part is None or not len(part.examples):
        return evaluation_set(own, count, derive(config.seed, "evaluation"))
    unseen = without_prompts(part.examples, own.examples)
    if logged is not None:
        unseen = [example for example in unseen if not logged(example)]
    return EvaluationSet(part, (unseen or in_hash_order(part.examples))[:count], held_out=bool(unseen))


@dataclass(frozen=True)
class EvaluationSettings:
    """How a model is evaluated; `offbeat.evaluate` describes each of them."""

    prompts: int | None = None
    samples: int = 8
    ks: tuple[int, ...] = ()
    temperature: float = 1.0
    greedy: bool = True
    before: bool = True
    max_tokens: int | None = None
    seed: int = 0
    slice_by: str | None = None
    correct_at: float = 1.0
    workers: int = 2
    chat_template_kwargs: Mapping[str, Json] | None = None
    say: Callable[[str], None] = lambda line: None
    """Called with what is asked, before a model is."""
    doing: Callable[[Callable[[], str]], None] = lambda label: None
    """Called with a function that says how far it is, in tenths."""

    def attempts(self, model: ModelSampler, asked: EvaluationSet, wanted: int, who: str) -> list[Attempts]:
        """Ask a model. `wanted` is how many prompts there should be: if there are fewer, each gets more samples."""
        samples = samples_for(self.samples, wanted, len(asked.examples)) if self.temperature else 1
        greedy = self.greedy and self.temperature > 0
        count, done = len(asked.examples), 0

        def answered(entries: int) -> None:
            nonlocal done
            done = entries

        self.say(
            f"{who}: {count} prompts × {samples + greedy} = {count * (samples + greedy)} answers of at most "
            f"{model.sampling.max_tokens} tokens"
        )
        self.doing(lambda: f"{who} has answered {done * 10 // max(count * (1 + greedy), 1) * 10} % of the prompts")
        return attempts(
            model, asked, self.slice_by or asked.task.slice_by, samples=samples, greedy=greedy, seed=self.seed,
            workers=self.workers, answered=answered,
        )  # fmt: skip

    def table(self, now: list[Attempts], asked: EvaluationSet, before: Iterable[Attempts] = ()) -> list[EvaluationRow]:
        """Make the table of these attempts."""
        ks = self.ks or ((self.samples,) if self.temperature else ())
        return evaluate(now, ks, before=before, correct_at=self.correct_at, held_out=asked.held_out)


def evaluate_model(name: str, task: Task, settings: EvaluationSettings) -> list[EvaluationRow]:
    """Evaluate a model of a directory or of the hub."""
    longest, variables = settings.max_tokens or _MAX_TOKENS, settings.chat_template_kwargs
    model = load_model(name, temperature=settings.temperature, max_tokens=longest, chat_template_kwargs=variables)
    wanted = settings.prompts or _PROMPTS
    asked = evaluation_set_of_model(task, wanted)
    return settings.table(settings.attempts(model, asked, wanted, "the model"), asked)


def evaluate_run(directory: RunDirectory, other: Task | None, settings: EvaluationSettings) -> list[EvaluationRow]:
    """Evaluate the newest policy of a run, and the model that it started from on the same prompts.

    Both have the values that engines serve, and compute in float32.
    """
    config = directory.config()
    if settings.before:
        config.model.directory()  # refused before the policy has answered, not after
    wanted, longest = settings.prompts or config.evaluation.prompts, settings.max_tokens or config.sampling.max_tokens
    asked = evaluation_set_of_run(config, other, wanted)
    tokenizer = read_tokenizer(directory.tokenizer, settings.chat_template_kwargs)
    policy = policy_sampler(load_policy(directory.path, dtype=torch.float32), tokenizer, settings.temperature, longest)
    now = settings.attempts(policy, asked, wanted, "the policy")
    if not settings.before:
        return settings.table(now, asked)
    compute, serve = getattr(torch, config.model.compute), getattr(torch, config.model.serve)
    dtypes = (serve,) if config.adapter.rank else (compute, serve)  # the trainer does not serve an adapter's base
    first = read_rounded(config.model.directory(), *dtypes)
    base = policy_sampler(first, tokenizer, settings.temperature, longest)
    return settings.table(now, asked, settings.attempts(base, asked, wanted, "the model before training"))
