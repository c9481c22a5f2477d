"""From prompt leases to scored groups: generate the completions, then score each of them.

`GroupMaker` is what a worker calls. For tasks of one turn, it generates all leases in one call of the engine. For tasks
of several turns, `Episodes` plays each completion against an environment, in a thread.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from offbeat.rollout.engine import Engine, Request, Sampling
from offbeat.rollout.prompt_leases import PromptLease
from offbeat.scoring.pool import Outcome
from offbeat.seeds import derive
from offbeat.tasks.rewards import Answers
from offbeat.tasks.turns import Environment, Turn, play
from offbeat.types import UNKNOWN, Completion, Group, Prompt


class Scorer(Protocol):
    """The part of `ScoringPool` that a worker uses."""

    def score_group(self, answers: Answers, of: Sequence[str] = ()) -> "Future[list[Outcome]]":
        """Score completions of one prompt; `of` are their ids. The call blocks while the pool's queue is full."""


@dataclass(frozen=True)
class GroupMaker:
    """How a run makes groups: the same for every worker and every version."""

    size: int
    """G."""
    sampling: Sampling
    decode: Callable[[Sequence[int]], str]
    """Token ids to the text that the scorer sees."""
    scorer: Scorer
    episodes: "Episodes | None" = None
    """For tasks of several turns."""

    async def make(self, engine: Engine, leases: Sequence[PromptLease]) -> list[Group]:
        """Make a whole group for every lease. A completion without a score is `Unscorable`, never left out."""
        requests = [self._request(lease) for lease in leases]
        if self.episodes is None:
            generated = await engine.generate(requests)
        else:
            episodes = (self.episodes.play(engine, lease.prompt, r) for lease, r in zip(leases, requests, strict=True))
            generated = await asyncio.gather(*episodes)
        pairs = zip(leases, generated, strict=True)
        return await asyncio.gather(*(self._score(lease, completions) for lease, completions in pairs))

    def _request(self, lease: PromptLease) -> Request:
        size, sampling = self.size, self.sampling
        if lease.evaluation is not None:
            size, top_k = lease.evaluation.size, int(lease.evaluation.greedy)  # top_k = 1 is greedy
            sampling = replace(sampling, temperature=lease.evaluation.temperature, top_p=1.0, top_k=top_k)
        return Request(lease.group_id, lease.prompt.token_ids, size, sampling, lease.seed)

    async def _score(self, lease: PromptLease, completions: tuple[Completion, ...]) -> Group:
        future = await asyncio.to_thread(self._submit, lease, completions)
        outcomes = future.result() if future.done() else await asyncio.wrap_future(future)
        scored = [replace(one, score=outcome) for one, outcome in zip(completions, outcomes, strict=True)]
        return Group(lease.group_id, lease.prompt, tuple(scored))

    def _submit(self, lease: PromptLease, completions: tuple[Completion, ...]) -> "Future[list[Outcome]]":
        """Queue the completions for scoring. Runs in a thread, because the pool's queue may be full."""
        ids = [one.token_ids.tolist() for one in completions]
        step = Group(lease.group_id, lease.prompt, completions).oldest_version or 0
        answers = Answers([self.decode(one) for one in ids], lease.prompt.columns, ids, step)
        return self.scorer.score_group(answers, [one.id for one in completions])


@dataclass(frozen=True)
class Episodes:
    """How to play a task of several turns."""

    environment: Callable[[Prompt], Environment]
    """Makes a new environment for every completion."""
    encode: Callable[[str], Sequence[int]]
    """A reply of the environment to token ids."""
    decode: Callable[[Sequence[int]], str]
    max_turns: int = 8

    async def play(self, engine: Engine, prompt: Prompt, request: Request) -> tuple[Completion, ...]:
        """Play all completions of a group concurrently."""
        loop = asyncio.get_running_loop()
        with ThreadPoolExecutor(request.size, thread_name_prefix="episode") as threads:
            episodes = [
                loop.run_in_executor(threads, self._play_one, engine, prompt, request, index, loop)
                for index in range(request.size)
            ]
            return tuple(await asyncio.gather(*episodes))

    def _play_one(
        self, engine: Engine, prompt: Prompt, request: Request, index: int, loop: asyncio.AbstractEventLoop
    ) -> Completion:
        prompt_ids, max_tokens = request.prompt_ids.tolist(), request.sampling.max_tokens

        def generate(so_far: Sequence[int]) -> Turn:
            turn = Request(
                f"{request.completion_id(index)}@{len(so_far)}",
                [*prompt_ids, *so_far],
                size=1,
                sampling=replace(
                    request.sampling,
                    max_tokens=max_tokens - len(so_far),
                    min_tokens=max(0, request.sampling.min_tokens - len(so_far)),
                ),
                seed=derive(request.seed, "episode", index, len(so_far)),
            )
            [[completion]] = asyncio.run_coroutine_threadsafe(engine.generate([turn]), loop).result()
            return _to_turn(completion)

        environment = self.environment(prompt)
        episode = play(environment, generate, self.encode, self.decode, max_tokens=max_tokens, max_turns=self.max_turns)
        return episode.completion(request.completion_id(index))


def _to_turn(completion: Completion) -> Turn:
    assert completion.behavior_logprobs is not UNKNOWN  # an engine always returns them
    versions = [span.version for span in completion.versions for _ in range(span.start, span.end)]
    return Turn(completion.token_ids.tolist(), completion.behavior_logprobs.tolist(), versions, completion.finish)
