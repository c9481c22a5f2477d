"""From prompts on loan to scored groups: one call of the engine, texts to the scorers, scores into the groups."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from offbeat.rollout.engine import Engine, Request, Sampling
from offbeat.rollout.prompt_leases import PromptLease
from offbeat.scoring.pool import Outcome
from offbeat.seeds import derive
from offbeat.tasks.rewards import Columns
from offbeat.tasks.turns import Environment, Turn, play
from offbeat.types import UNKNOWN, Completion, Group, Prompt


@dataclass(frozen=True)
class Episodes:
    """How a task of several turns is played."""

    environment: Callable[[Prompt], Environment]
    """A fresh one for every completion."""
    encode: Callable[[str], Sequence[int]]
    """Tokens of a reply."""
    decode: Callable[[Sequence[int]], str]
    max_turns: int = 8

    async def play(self, engine: Engine, prompt: Prompt, request: Request) -> tuple[Completion, ...]:
        """All completions of a group, at the same time."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(request.size, thread_name_prefix="episode") as threads:
            played = [
                loop.run_in_executor(threads, self._one, engine, prompt, request, index, loop)
                for index in range(request.size)
            ]
            return tuple(await asyncio.gather(*played))

    def _one(
        self, engine: Engine, prompt: Prompt, request: Request, index: int, loop: asyncio.AbstractEventLoop
    ) -> Completion:
        start = request.prompt_ids.tolist()
        limit = request.sampling.max_tokens

        def generate(written: Sequence[int]) -> Turn:
            turn = Request(
                f"{request.completion_id(index)}@{len(written)}",
                [*start, *written],
                size=1,
                sampling=replace(request.sampling, max_tokens=limit - len(written)),
                seed=derive(request.seed, "episode", index, len(written)),
            )
            [[said]] = asyncio.run_coroutine_threadsafe(engine.generate([turn]), loop).result()
            return _turn(said)

        episode = play(
            self.environment(prompt), generate, self.encode, self.decode, max_tokens=limit, max_turns=self.max_turns
        )
        return episode.completion(request.completion_id(index))


def _turn(said: Completion) -> Turn:
    assert said.behavior_logprobs is not UNKNOWN  # an engine knows what it sampled from
    versions = [span.version for span in said.versions for _ in range(span.start, span.end)]
    return Turn(said.token_ids.tolist(), said.behavior_logprobs.tolist(), versions, said.finish)


class Scorer(Protocol):
    """What `tasks.scoring.ScoringPool` is to a worker."""

    def score(self, text: str, columns: Columns, *, of: str = "") -> "Future[Outcome]":
        """One completion; may block while others wait."""


@dataclass(frozen=True)
class GroupMaker:
    """How a run makes groups: the same for every worker and every version."""

    size: int
    """G."""
    sampling: Sampling
    decode: Callable[[Sequence[int]], str]
    """A completion's text, as its scorer sees it."""
    scorer: Scorer
    episodes: Episodes | None = None
    """For a task of several turns."""

    async def make(self, engine: Engine, leases: Sequence[PromptLease]) -> list[Group]:
        """A whole group for every lease: a completion without a score is `Unscorable`, never left out."""
        requests = [self._request(lease) for lease in leases]
        if self.episodes is None:
            answered = await engine.generate(requests)
        else:
            played = (self.episodes.play(engine, lease.prompt, r) for lease, r in zip(leases, requests, strict=True))
            answered = await asyncio.gather(*played)
        pairs = zip(leases, answered, strict=True)
        return await asyncio.gather(*(self._scored(lease, completions) for lease, completions in pairs))

    def _request(self, lease: PromptLease) -> Request:
        return Request(lease.group_id, lease.prompt.token_ids, self.size, self.sampling, lease.seed)

    async def _scored(self, lease: PromptLease, completions: tuple[Completion, ...]) -> Group:
        futures = await asyncio.to_thread(self._submit, lease, completions)
        scores = await asyncio.gather(*map(asyncio.wrap_future, futures))
        scored = [replace(one, score=score) for one, score in zip(completions, scores, strict=True)]
        return Group(lease.group_id, lease.prompt, tuple(scored))

    def _submit(self, lease: PromptLease, completions: tuple[Completion, ...]) -> "list[Future[Outcome]]":
        """In a thread, because the pool's line may be full."""
        return [
            self.scorer.score(self.decode(one.token_ids.tolist()), lease.prompt.columns, of=one.id)
            for one in completions
        ]
