"""The plan of a run, what the loop needs from log and trainer, what it prepares, and the outcome of a step."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from offbeat.experience.index import Columns
from offbeat.experience.ledger import Ledger, LedgerEvent
from offbeat.experience.sampler import Draw
from offbeat.experience.schema import Snapshot
from offbeat.run.journal import rewards_by_version
from offbeat.trainer.trainer import RefusedBatch, Trained
from offbeat.types import Group, Json, StepContext

REPAIRED: Final = "repaired"
"""The entry of a restored state with the fields of a `weights repaired` event; not in a checkpoint."""


@dataclass(frozen=True)
class RunPlan:
    """The numbers the loop works with."""

    steps: int
    batch: int
    """B, the groups in a batch."""
    fresh: int
    """New groups in a batch: fewer than B if the sampler replays past groups."""
    refill: int = 4
    """After `refill` × B prompts were admitted for one batch, a smaller batch is enough."""
    save_every: int = 50
    patience: float = 3600.0
    """Seconds without a new group after which the run ends with an error."""
    pause_seconds: float = 24 * 3600.0
    """Seconds that a paused run waits for a person before it ends."""
    generates: bool = True
    """False offline: the versions in the log are of other runs, and no worker has the version published last."""
    waits_for_scores: bool = False
    """True: a run that does not generate waits for groups in the log that have no score yet."""
    offset: int = 0
    """Batches of fresh groups that must wait in the log behind the one that is drawn."""
    poll_seconds: float = 0.5
    """Seconds between reads of the log, for groups that other processes append."""


class PauseControl(Protocol):
    """How a run waits for a person."""

    def pause(self) -> None:
        """Ask the person to look at the run."""

    def is_released(self) -> bool:
        """Return True once the run may continue."""


class Learner(Protocol):
    """The trainer of a run: in this process, or behind Ray actors."""

    @property
    def step(self) -> int:
        """k, the steps done."""

    def check(self) -> None:
        """Raise if the trainer is lost or its last checkpoint could not be written."""

    async def train(self, groups: Sequence[Group], context: StepContext) -> Trained | RefusedBatch:
        """Train one step. Raises `NoGradient` if no token of the batch would move the policy."""

    async def publish(self, version: int) -> Mapping[str, Json]:
        """Write the current policy to the weight log; return fields for the `published` event."""

    async def save(self, state: Mapping[str, Json]) -> None:
        """Start to write a checkpoint that also holds `state`, the loop's own state."""

    async def finish(self) -> None:
        """Wait until the last checkpoint is on disk."""


class Log(Protocol):
    """The part of the experience log that the loop uses. See `LogReader` and `ExperienceLog`."""

    def index_since(self, cursor: Snapshot | None, until: Snapshot | None = None) -> tuple[Columns, Snapshot]: ...

    def read(self, which: Sequence[int]) -> list[Group]: ...

    def record(self, events: Sequence[LedgerEvent]) -> None: ...

    def ledger(self) -> Ledger: ...


def make_step_context(draw: Draw, groups: Sequence[Group], published: int | None) -> StepContext:
    """Return what the trainer needs to know of a batch besides its groups."""
    return StepContext(
        published,
        frozenset(group.id for group, past in zip(groups, draw.replayed, strict=True) if past),
        dict(zip((group.id for group in groups), draw.priors, strict=True)) if draw.priors else {},
    )


@dataclass(frozen=True)
class StepOutcome:
    """A finished step: what was drawn, and what training it reported."""

    trained: Trained
    draw: Draw
    groups: Sequence[Group]
    """As drawn: also those without a forward pass, and those that the trainer refused."""

    def metrics(self, seconds: float) -> dict[str, Json]:
        """Return the metrics of the step, which took `seconds` since the one before.

        The trainer counts lag from the versions in the groups; offline, those are of other runs, and lag is unknown.
        """
        found: dict[str, Json] = dict(self.trained.metrics)
        tokens = self.trained.metrics.get("trained_tokens")
        if tokens and seconds > 0:
            found["tokens_per_second"] = tokens / seconds
        if not self.trained_lags:
            found.pop("lag", None)
        return found

    @property
    def trained_lags(self) -> list[int]:
        """The lags of the groups that were trained on, without those that have none."""
        lags = dict(zip((group.id for group in self.groups), self.draw.lags, strict=True))
        return [lag for one in self.trained.groups if (lag := lags[one]) is not None]

    @property
    def trained_replays(self) -> int:
        """How many of the groups that were trained on come from the past."""
        replayed = dict(zip((group.id for group in self.groups), self.draw.replayed, strict=True))
        return sum(replayed[one] for one in self.trained.groups)

    def rewards_by_version(self) -> dict[str, Json]:
        """Map each oldest version of fresh groups to their mean reward and number, to show later what was gained."""
        return rewards_by_version(
            [group for group, replayed in zip(self.groups, self.draw.replayed, strict=True) if not replayed]
        )


@dataclass
class Preparation:
    """One piece of work that a run starts early and waits for late.

    >>> async def run() -> str:
    ...     async def work() -> None:
    ...         done.append("checked")
    ...     done: list[str] = []
    ...     preparation = Preparation(work)
    ...     await preparation.begin(alone=False)
    ...     await preparation.finish()
    ...     return done[0]
    >>> asyncio.run(run())
    'checked'
    """

    work: Callable[[], Coroutine[None, None, None]] | None = None
    """None: there is nothing to prepare."""
    _task: "asyncio.Task[None] | None" = None

    async def begin(self, *, alone: bool) -> None:
        """Start the work. With `alone`, wait for its end: the trainer's model may be needed for an evaluation."""
        if self.work is not None:
            self._task = asyncio.create_task(self.work())
            if alone:
                await self._task

    def check(self) -> None:
        """Raise the error of the work if it has failed."""
        if self._task is not None and self._task.done():
            self._task.result()

    async def finish(self) -> None:
        """Wait for the end of the work; raise its error if it fails."""
        if self._task is not None:
            await self._task

    async def settle(self) -> None:
        """Wait for the end of the work, for a run that ends before its first step."""
        if self._task is not None:
            await asyncio.wait([self._task])
