"""A worker: reads policies from the weight log, turns prompts into scored groups, appends them to the experience log.

    start ── an engine ── its tolerance, on version 0 ── load the newest version ── probe ── READY
                ▲                                                                              │
                │ EngineDead, or stuck beyond the lease                   lanes: take prompts, generate, score, append
                └──────────────────────────────────────────────────────── watch: a newer version? fetch, load, probe

A worker is STALE until it has loaded and proven a version. A failed probe quarantines it: what it wrote since the load
is discarded, it loads the version again from an anchor, and if that fails too it gives up with an error. Whatever ends
a lane, its prompts go back. The same class runs in one process, in a Ray actor, or alone on another machine.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from offbeat.errors import DeadlinePassed, EngineDead, ProbeFailed, WorkerFailed
from offbeat.experience.ledger import LedgerEvent, LedgerEventKind
from offbeat.experience.log import ExperienceLog, Receipt
from offbeat.rollout.engine import Engine
from offbeat.rollout.generation import GroupMaker
from offbeat.rollout.parity import Prober, ProbeVerdict
from offbeat.rollout.prompt_leases import PromptLease, Prompts
from offbeat.rollout.waits import uninterrupted, within
from offbeat.types import Group
from offbeat.weights.probe import Probe

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

FRUITLESS_STARTS: Final = 3
"""Engines in a row that die without a single group before the worker gives up."""


class Status(StrEnum):
    """What a worker is good for at the moment."""

    STALE = "stale"
    """No engine, or one whose weights are not proven yet."""
    READY = "ready"
    QUARANTINED = "quarantined"
    """Its engine failed the probe and loads again from an anchor."""
    STOPPED = "stopped"


class Policies(Protocol):
    """What `weights.subscription.Subscription` is to a worker."""

    def newest(self) -> int | None:
        """The newest complete version."""

    def fetch(self, version: int, *, from_anchor: bool = False) -> "Mapping[str, Tensor]":
        """Its weights, verified."""

    def probe(self, version: int) -> Probe | None:
        """Its probe."""


@dataclass(frozen=True)
class Pace:
    """How much a worker does at once, and how long it waits."""

    lanes: int = 1
    """Calls of the engine that overlap: many for an engine that batches them itself, one for any other."""
    groups_per_call: int = 1
    poll_seconds: float = 1.0
    """Between two looks for a newer version, or for prompts where there were none."""
    call_seconds: float = 600.0
    """An engine that takes longer for one call is stuck."""
    start_seconds: float = 600.0
    """For the first version to appear, and for an engine to start."""


@dataclass
class WorkerTally:
    """What a worker has done."""

    groups: int = 0
    tokens: int = 0
    refused: int = 0
    """Groups that the door of the experience log turned away."""
    discarded: int = 0
    """Groups written between a load and its failed probe, or while an engine died."""
    loads: int = 0
    quarantines: int = 0
    starts: int = 0
    notices: list[str] = field(default_factory=list)
    """What went wrong, in order."""


class _Tainted(Exception):
    """The call ran on weights that failed their probe."""


class Worker:
    """See the module. One event loop; `stop` may be called from within it."""

    def __init__(
        self,
        name: str,
        start_engine: Callable[[], Awaitable[Engine]],
        policies: Policies,
        prompts: Prompts,
        maker: GroupMaker,
        log: ExperienceLog,
        pace: Pace | None = None,
    ) -> None:
        """Make a worker; it does nothing yet.

        Args:
            name: In events and rows; unique among workers.
            start_engine: Makes an engine that serves version 0, the model the run began with.
            policies: The weight log.
            prompts: Where leases come from.
            maker: How groups are made.
            log: Where they go.
            pace: How much at once.
        """
        self.name, self.status, self.tally = name, Status.STALE, WorkerTally()
        self.verdict: ProbeVerdict | None = None
        self._start_engine, self._policies, self._prompts = start_engine, policies, prompts
        self._maker, self._log, self._pace = maker, log, pace or Pace()
        self._engine: Engine | None = None
        self._prober: Prober | None = None
        self._proven = asyncio.Event()
        self._stopping = asyncio.Event()
        self._nudged = asyncio.Event()
        self._taints = 0

    @property
    def version(self) -> int | None:
        """The version it serves, if it is proven."""
        return self._engine.version if self._engine and self.status is Status.READY else None

    def nudge(self) -> None:
        """There is a newer version: do not wait for the next look."""
        self._nudged.set()

    def stop(self) -> None:
        """Give back what is on loan and end `run`."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until told to stop."""
        fruitless, groups = 0, -1
        try:
            while not self._stopping.is_set():
                fruitless = 0 if self.tally.groups > groups else fruitless + 1
                groups = self.tally.groups
                try:
                    await self._until_stopped(self.start())
                    await self._until_stopped(self._watch(), *(self._lane() for _ in range(self._pace.lanes)))
                except EngineDead as dead:
                    self.tally.notices.append(f"engine died: {dead}")
                    await self.close()
                    if fruitless + 1 >= FRUITLESS_STARTS:
                        raise WorkerFailed(
                            f"worker {self.name}: {FRUITLESS_STARTS} engines died in a row without a group, the last "
                            f"one: {dead}"
                        ) from dead
        finally:
            await self.close()
            self.status = Status.STOPPED

    async def start(self) -> None:
        """An engine that serves the newest version, proven."""
        self.status = Status.STALE
        self._proven.clear()
        newest = await self._first_version()
        self.tally.starts += 1
        what = f"an engine of worker {self.name} to start"
        self._engine = await self._promptly(self._pace.start_seconds, what, self._start_engine())
        self._prober = await Prober.calibrated(self._engine, await self._probe(0))
        await self.sync(newest)

    async def close(self) -> None:
        """End the engine."""
        self.status = Status.STALE
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def sync(self, version: int) -> None:
        """Load a version and prove it; nothing that may have been written with unproven weights gets into the log."""
        engine, prober = self._serving()
        probe = await self._probe(version)
        weights = await asyncio.to_thread(self._policies.fetch, version)
        self._proven.clear()
        await engine.load(version, weights.items())
        self.verdict = await prober.check(engine, probe)
        if not self.verdict.passed:
            self.status = Status.QUARANTINED
            self._taints += 1
            self.tally.quarantines += 1
            self.tally.notices.append(f"version {version} failed its probe: {self.verdict}")
            weights = await asyncio.to_thread(self._policies.fetch, version, from_anchor=True)
            await engine.load(version, weights.items())
            self.verdict = await prober.check(engine, probe)
        if not self.verdict.passed:
            raise ProbeFailed(
                f"worker {self.name} does not serve version {version}, also after a reload from an anchor: "
                f"{self.verdict}. Its engine computes something else than the trainer: compare versions and dtypes"
            )
        self.tally.loads += 1
        self.status = Status.READY
        self._proven.set()
        await self._prompts.serving(self.name, version)

    async def rollout(self, leases: Sequence[PromptLease]) -> list[Group]:
        """Groups for these prompts, in the log. Whatever goes wrong, the prompts are given back first."""
        ids = [lease.group_id for lease in leases]
        try:
            await self._proven.wait()
            engine, _ = self._serving()
            taints = self._taints
            what = f"{len(leases)} groups from worker {self.name}"
            started = asyncio.create_task(self._record(ids, LedgerEventKind.STARTED))
            try:
                groups = await self._promptly(self._pace.call_seconds, what, self._maker.make(engine, leases))
                await self._proven.wait()
            finally:
                await started
            if taints != self._taints:
                raise _Tainted
            await uninterrupted(self._append(groups, ids))
        except BaseException:
            self.tally.discarded += len(ids)
            await uninterrupted(self._give_back(ids))
            raise
        return groups

    async def _append(self, groups: Sequence[Group], ids: Sequence[str]) -> None:
        submitted: Future[Receipt] = self._log.submit(groups)
        receipt = await asyncio.wrap_future(submitted)
        await self._prompts.finish(ids)
        self.tally.groups += len(receipt.accepted)
        self.tally.refused += len(receipt.refused)
        self.tally.tokens += sum(len(one.token_ids) for group in groups for one in group.completions)
        self.tally.notices += [str(entry.refusal.detail) for entry in receipt.refused]

    async def _give_back(self, ids: Sequence[str]) -> None:
        await self._prompts.give_back(ids)
        await self._record(ids, LedgerEventKind.LOST, cause="given back")

    async def _record(self, ids: Sequence[str], event: LedgerEventKind, cause: str = "") -> None:
        events = [LedgerEvent(group_id, event, cause=cause, by=self.name) for group_id in ids]
        await asyncio.to_thread(self._log.record, events)

    async def _lane(self) -> None:
        while True:
            leases = await self._prompts.take(self._pace.groups_per_call, self.name)
            if not leases:
                await asyncio.sleep(self._pace.poll_seconds)
                continue
            try:
                await self.rollout(leases)
            except _Tainted:
                continue

    async def _watch(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):  # not `wait_for`, which may swallow a cancellation
                async with asyncio.timeout(self._pace.poll_seconds):
                    await self._nudged.wait()
            self._nudged.clear()
            engine, _ = self._serving()
            await engine.health()
            newest = await asyncio.to_thread(self._policies.newest)
            if newest is not None and newest != engine.version:
                await self.sync(newest)

    async def _until_stopped(self, *works: Awaitable[None]) -> None:
        """All of it at once, until one part fails, all end, or `stop` is called; nothing is left running."""
        stopping: asyncio.Future[object] = asyncio.ensure_future(self._stopping.wait())
        tasks: list[asyncio.Future[object]] = [asyncio.ensure_future(work) for work in works]
        try:
            pending = {stopping, *tasks}
            while stopping in pending and len(pending) > 1:
                _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    if task.done():
                        task.result()
        finally:
            for task in (stopping, *tasks):
                task.cancel()
            await asyncio.gather(stopping, *tasks, return_exceptions=True)

    async def _first_version(self) -> int:
        async def appears() -> int:
            while (newest := await asyncio.to_thread(self._policies.newest)) is None:
                await asyncio.sleep(self._pace.poll_seconds)
            return newest

        try:
            return await within(self._pace.start_seconds, f"the first weights for worker {self.name}", appears())
        except DeadlinePassed as late:
            raise WorkerFailed(f"{late}: is a trainer publishing to this weight log?") from None

    async def _promptly(self, seconds: float, what: str, work: Awaitable[T]) -> T:
        try:
            return await within(seconds, what, work)
        except DeadlinePassed as late:
            raise EngineDead(f"{late}: it is stuck") from None

    async def _probe(self, version: int) -> Probe:
        probe = await asyncio.to_thread(self._policies.probe, version)
        if probe is None:
            raise WorkerFailed(
                f"version {version} was published without a probe, so nobody can prove that it is served"
            )
        return probe

    def _serving(self) -> tuple[Engine, Prober]:
        if self._engine is None or self._prober is None:
            raise EngineDead(f"worker {self.name} has no engine")
        return self._engine, self._prober
