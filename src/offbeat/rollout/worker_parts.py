"""The weight log as a worker sees it, what a worker counts, and how it runs its tasks."""

import asyncio
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from offbeat.errors import AdapterMismatch
from offbeat.weights.adapter import AdapterSpec
from offbeat.weights.probe import Probe

if TYPE_CHECKING:
    from torch import Tensor


class Policies(Protocol):
    """The part of `weights.subscriber.Subscription` that a worker uses."""

    def newest(self) -> int | None:
        """Return the newest complete version."""

    def fetch(self, version: int, *, from_anchor: bool = False) -> "Mapping[str, Tensor]":
        """Return the verified weights of a version."""

    def probe(self, version: int) -> Probe | None: ...

    def adapter(self, version: int) -> AdapterSpec | None: ...


@dataclass
class WorkerTally:
    """Counts of a worker's work so far."""

    groups: int = 0
    tokens: int = 0
    evaluated: int = 0
    """Evaluation prompts answered."""
    refused: int = 0
    """Groups that failed validation and are in quarantine."""
    discarded: int = 0
    """Groups generated between a load and its failed probe, or while an engine died."""
    loads: int = 0
    quarantines: int = 0
    starts: int = 0
    notices: list[str] = field(default_factory=list)
    """Error messages, in order."""


def require_same_adapter(published: AdapterSpec | None, own: AdapterSpec | None) -> None:
    """Raise `AdapterMismatch` if a worker's engine cannot serve what the run publishes.

    >>> spec = AdapterSpec(8, 32.0, ("q_proj",), base="1f" * 32)
    >>> require_same_adapter(spec, None)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    offbeat.errors.AdapterMismatch: the run publishes an adapter of rank 8, but this worker serves full weights: ...
    """
    if published == own:
        return
    if published is None:
        raise AdapterMismatch(
            "the run publishes full weights, but this worker serves adapters: start it without the [adapter] section"
        )
    theirs = f"the run publishes an adapter of rank {published.rank}"
    if own is None:
        raise AdapterMismatch(
            f"{theirs}, but this worker serves full weights: start it with the [adapter] section of the run's "
            "configuration"
        )
    published.require_base(own.base, "the model directory of this worker")
    raise AdapterMismatch(
        f"{theirs}, alpha {published.alpha:g}, targets {', '.join(published.targets)}, but this worker is set to rank "
        f"{own.rank}, alpha {own.alpha:g}, targets {', '.join(own.targets)}: give it the [adapter] section of the "
        "run's configuration"
    )


async def run_until(stopping: asyncio.Event, *works: Awaitable[None]) -> None:
    """Run all coroutines until one fails, all end, or `stopping` is set; then cancel the rest."""
    stopped: asyncio.Future[object] = asyncio.ensure_future(stopping.wait())
    tasks: list[asyncio.Future[object]] = [asyncio.ensure_future(work) for work in works]
    try:
        pending = {stopped, *tasks}
        while stopped in pending and len(pending) > 1:
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in (stopped, *tasks):
            task.cancel()
        await asyncio.gather(stopped, *tasks, return_exceptions=True)
