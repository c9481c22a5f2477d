"""From prompts on loan to scored groups: one call of the engine, texts to the scorers, scores into the groups."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Protocol

from offbeat.rollout.engine import Engine, Request, Sampling
from offbeat.rollout.episodes import Episodes
from offbeat.rollout.leases import Lease
from offbeat.tasks.rewards import Columns
from offbeat.tasks.scoring import Outcome
from offbeat.types import Completion, Group


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

    async def make(self, engine: Engine, leases: Sequence[Lease]) -> list[Group]:
        """A whole group for every lease: a completion without a score is `Unscorable`, never left out."""
        requests = [self._request(lease) for lease in leases]
        if self.episodes is None:
            answered = await engine.generate(requests)
        else:
            played = (self.episodes.play(engine, lease.prompt, r) for lease, r in zip(leases, requests, strict=True))
            answered = await asyncio.gather(*played)
        pairs = zip(leases, answered, strict=True)
        return await asyncio.gather(*(self._scored(lease, completions) for lease, completions in pairs))

    def _request(self, lease: Lease) -> Request:
        return Request(lease.group_id, lease.prompt.token_ids, self.size, self.sampling, lease.seed)

    async def _scored(self, lease: Lease, completions: tuple[Completion, ...]) -> Group:
        futures = await asyncio.to_thread(self._submit, lease, completions)
        scores = await asyncio.gather(*map(asyncio.wrap_future, futures))
        scored = [replace(one, score=score) for one, score in zip(completions, scores, strict=True)]
        return Group(lease.group_id, lease.prompt, tuple(scored))

    def _submit(self, lease: Lease, completions: tuple[Completion, ...]) -> "list[Future[Outcome]]":
        """In a thread, because the pool's line may be full."""
        return [
            self.scorer.score(self.decode(one.token_ids.tolist()), lease.prompt.columns, of=one.id)
            for one in completions
        ]
