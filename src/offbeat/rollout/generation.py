"""From prompt leases to scored groups: generate the completions, then score each of them.

`GroupMaker` is what a worker calls. It generates all leases in one call of the engine.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from offbeat.rollout.engine import Engine, Request, Sampling
from offbeat.rollout.prompt_leases import PromptLease
from offbeat.scoring.pool import Outcome
from offbeat.tasks.rewards import Answers
from offbeat.types import Completion, Group


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

    async def make(self, engine: Engine, leases: Sequence[PromptLease]) -> list[Group]:
        """Make a whole group for every lease. A completion without a score is `Unscorable`, never left out."""
        requests = [self._request(lease) for lease in leases]
        generated = await engine.generate(requests)
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
