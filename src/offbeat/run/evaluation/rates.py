"""Pass rates of the policy during a run. `model.py` evaluates any model.

`evaluation_prompts` is what a run asks. Its workers answer (`EngineEvaluation`); in a run without workers,
`PolicyEvaluation` asks the trainer's own model. `EvaluationRounds` starts what is due, one evaluation after the other.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from offbeat.config import Config
from offbeat.errors import PromptTooLong, WaitExpired
from offbeat.events import EventKind
from offbeat.experience.lance_table import exists
from offbeat.experience.schema import Tables
from offbeat.rollout.engine import Engine, Sampling
from offbeat.rollout.generation import GroupMaker, Scorer
from offbeat.rollout.hf import HfEngine
from offbeat.run.desk import Desk, prompt_limit
from offbeat.run.evaluation.leases import EvaluationLeases, EvaluationPrompt, EvaluationSchedule
from offbeat.run.journal import Journal
from offbeat.seeds import derive
from offbeat.tasks.data import Example, tokens
from offbeat.tasks.rewards import FOR_EVALUATION
from offbeat.tasks.split import evaluation_set, samples_for
from offbeat.tasks.task import Task
from offbeat.tasks.tokenizer import decoder, stop_tokens
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
                place, prompt, min(size, samples - first), stream, settings.temperature, held_out=asked.held_out,
                k=settings.samples,
            )  # fmt: skip
            found.append(one)
        if settings.greedy:
            found.append(replace(one, size=1, greedy=True, beside=True))
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


async def ask(
    engine: Engine,
    maker: GroupMaker,
    prompts: Sequence[EvaluationPrompt],
    *,
    at_once: int,
    answered: Callable[[int], None] = lambda count: None,
) -> EvaluationLeases:
    """Ask an engine that nobody else uses, and return the leases with all answers.

    It generates the answers to `at_once` entries in one call, and the next ones while those are scored. `answered` is
    called with the number of entries that have their scores.
    """
    leases = EvaluationLeases(engine.version or 0, prompts, seconds=inf)

    async def lane() -> None:
        while taken := leases.take(at_once, 0.0, "evaluation", leases.version):
            leases.answer(await maker.make(engine, taken))
            answered(leases.answered)

    await asyncio.gather(lane(), lane())
    return leases


@dataclass
class PolicyEvaluation:
    """Evaluates the trainer's current policy at a step, for runs without workers. The trainer waits for it."""

    config: Config
    task: Task
    tokenizer: PreTrainedTokenizerBase
    pool: Scorer
    model: PreTrainedModel
    """The trainer's own model, not a copy."""
    rounded: Callable[[], AbstractContextManager[None]] = nullcontext
    """Gives the model the weights that are served, for the length of a block."""

    async def __call__(self, step: int) -> Mapping[str, Json]:
        settings, tokenizer = self.config.sampling, self.tokenizer
        stops = () if settings.ignore_eos else stop_tokens(self.model.generation_config, tokenizer)
        sampling = Sampling(settings.max_tokens, stops, min_tokens=settings.min_tokens)
        maker = GroupMaker(self.config.group_size, sampling, decoder(tokenizer), self.pool)
        asked = evaluation_prompts(self.config, self.task, tokenizer, step)
        engine = HfEngine(self.model, version=step)
        with self.rounded():
            return (await ask(engine, maker, asked, at_once=self.config.workers.groups_at_once)).rates()


@dataclass(frozen=True)
class EngineEvaluation:
    """Measures the pass rates of a published version: the run's workers answer, on the engines that serve it."""

    desk: Desk
    prompts: Callable[[int], Sequence[EvaluationPrompt]]
    """What is asked of a version."""
    lease_seconds: float
    patience: float
    """Seconds without an answer after which the run ends with an error."""
    clock: Callable[[], float]

    async def __call__(self, version: int) -> Mapping[str, Json]:
        """Return the pass rates. The version must stay the newest until then."""
        leases = EvaluationLeases(version, self.prompts(version), self.lease_seconds)
        answered, last_answer = 0, self.clock()
        await self.desk.evaluate(leases)
        try:
            while leases.missing:
                waited = self.clock() - last_answer
                if waited > self.patience:
                    raise WaitExpired(f"{_describe_wait(leases, waited)}; check the workers, or raise run.patience")
                await self.desk.wait_for_change(self.patience - waited + 0.1)
                if leases.answered > answered:
                    answered, last_answer = leases.answered, self.clock()
        finally:
            await self.desk.evaluate(None)
        return leases.rates()


def _describe_wait(leases: EvaluationLeases, waited: float) -> str:
    in_flight = ", ".join(f"{lease.group_id} by {lease.by}" for lease in leases.out[:5]) or "none"
    return (
        f"waited {waited:.0f} s for {leases.missing} answers to evaluation prompts by version {leases.version}; in "
        f"flight: {in_flight}"
    )


@dataclass
class EvaluationRounds:
    """Starts evaluations that are due, at most one at a time."""

    rates: Callable[[int], Awaitable[Mapping[str, Json]]]
    """Measures a version: `EngineEvaluation`, or the trainer with its own model."""
    schedule: EvaluationSchedule
    journal: Journal
    on_engines: bool = True
    """False: the trainer's model is evaluated, published or not."""
    overlap: bool = False
    """True: training continues meanwhile, until the next publish."""
    _running: asyncio.Task[None] | None = None

    def begin(self, published: int, step: Callable[[], int]) -> None:
        """Start an evaluation if one is due. Its event carries the step at which it ends."""
        version = self.schedule.begin(published if self.on_engines else step())
        if version is not None:
            self._running = asyncio.create_task(self._evaluate(version, step))

    async def _evaluate(self, version: int, step: Callable[[], int]) -> None:
        rates = await self.rates(version)
        self.schedule.end()
        self.journal.write(EventKind.EVALUATED, step(), version=version, **rates)

    async def finish(self, keep_waiting: Callable[[], bool], poll_seconds: float) -> None:
        """Wait for the running evaluation as long as `keep_waiting` returns True."""
        while self._running is not None and keep_waiting():
            await asyncio.wait([self._running], timeout=poll_seconds)
            if self._running.done():
                running, self._running = self._running, None
                running.result()

    async def cancel(self) -> None:
        """End the running evaluation without a result. A resumed run repeats it."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
