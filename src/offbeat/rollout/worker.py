"""A worker: loads policies from the weight log, makes scored groups of prompts, appends them to the experience log.

    start ── engine ── calibrate the probe on version 0 ── load the newest version ── probe ── READY
                ▲                                                                                │
                │ EngineDead                                            lanes: take prompts, generate, score, append
                │                                                       watch: is there a newer version? load, probe
                └────────────────────────────────────────────────────── renew: does the engine answer? keep the leases

A worker is STALE until the version it loaded passes its probe. If a probe fails, the worker is QUARANTINED: it discards
the groups generated since the load and loads the version again from an anchor. If that fails too, `run` raises an
error. An engine that holds several versions generates with the last one that passed while the next is loaded and
checked; then there is nothing to discard. However a lane ends, its prompts are given back. The same class runs in one
process, in a Ray actor, or on its own on another machine. Every wait has a name and a deadline.

Only `Engine.health` judges an engine. A slow group costs nothing but time: its lease is renewed until it is finished. A
call that exceeds `Pace.call_seconds` in an engine that answers is cancelled, its prompts are given back, and the engine
continues with the other groups.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Protocol

from offbeat.errors import AdapterMismatch, DeadlinePassed, EngineDead, ProbeFailed, WorkerFailed
from offbeat.experience.ledger import LedgerEvent, LedgerEventKind
from offbeat.experience.log import ExperienceLog, Receipt
from offbeat.rollout.engine import Engine, uninterrupted, within
from offbeat.rollout.generation import GroupMaker
from offbeat.rollout.parity import Prober, ProbeVerdict
from offbeat.rollout.prompt_leases import PromptLease, Prompts
from offbeat.scoring.tally import count_outcomes
from offbeat.types import Group
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


MAX_FAILED_ENGINES: Final = 3
"""After so many engines in a row that die without a finished group, the worker fails."""


class Status(StrEnum):
    """Whether a worker's engine can be used."""

    STALE = "stale"
    """There is no engine, or its weights have not passed their probe yet."""
    READY = "ready"
    QUARANTINED = "quarantined"
    """The engine failed its probe and loads the version again from an anchor."""
    STOPPED = "stopped"


@dataclass(frozen=True)
class Pace:
    """How much a worker does concurrently, and how long it waits."""

    lanes: int = 1
    """Concurrent calls of the engine: many for an engine that batches them itself, otherwise one."""
    groups_per_call: int = 1
    poll_seconds: float = 1.0
    """Time between two checks of the engine, for a newer version, or for prompts if there were none. Leases must last
    several times as long."""
    call_seconds: float = 1800.0
    """A call that takes longer is cancelled. A backstop: it must exceed what the longest completion needs."""
    start_seconds: float = 600.0
    """Deadline for the first version to appear, and for an engine to start."""


class _ProbeFailedMeanwhile(Exception):
    """A group was generated with weights that then failed their probe."""


class Worker:
    """A rollout worker, as the module describes. Call all methods from one event loop."""

    def __init__(
        self,
        name: str,
        start_engine: Callable[[], Awaitable[Engine]],
        policies: Policies,
        prompts: Prompts,
        maker: GroupMaker,
        log: ExperienceLog,
        pace: Pace | None = None,
        adapter: AdapterSpec | None = None,
    ) -> None:
        """Make a worker; `run` starts it.

        Args:
            name: A name that is unique among the workers of a run; events and groups carry it.
            start_engine: Starts an engine that serves version 0, the initial model of the run.
            policies: The weight log.
            prompts: Where prompt leases come from.
            maker: Makes groups from leases.
            log: Where groups are appended.
            pace: Concurrency and deadlines.
            adapter: What the engine was started with, with the digest of its own base; None for full weights.
        """
        self.name, self.status, self.tally = name, Status.STALE, WorkerTally()
        self.verdict: ProbeVerdict | None = None
        self._start_engine, self._policies, self._prompts = start_engine, policies, prompts
        self._maker, self._log, self._pace, self._adapter = maker, log, pace or Pace(), adapter
        self._engine: Engine | None = None
        self._prober: Prober | None = None
        self._loaded = asyncio.Event()
        """Set while the engine may generate. What it generates counts only once `_ready` is set."""
        self._ready = asyncio.Event()
        """Set while the engine's weights have passed their probe."""
        self._stopping = asyncio.Event()
        self._nudged = asyncio.Event()
        self._failed_probes = 0
        self._held: set[str] = set()
        """Leases to renew. One leaves before the desk hears that it is over, so that it is not reported as lost."""
        self._loading = False

    @property
    def version(self) -> int | None:
        """The version it serves; None unless it is READY."""
        return self._engine.version if self._engine and self.status is Status.READY else None

    def nudge(self) -> None:
        """Check for a newer version now instead of after `poll_seconds`."""
        self._nudged.set()

    def stop(self) -> None:
        """Give back all leases and end `run`."""
        self._stopping.set()

    async def run(self) -> None:
        """Work until `stop` is called. Replace engines that die."""
        failed, finished = 0, -1
        try:
            while not self._stopping.is_set():
                before, finished = finished, self.tally.groups + self.tally.evaluated
                failed = 0 if finished > before else failed + 1
                try:
                    await run_until(self._stopping, self.start())
                    lanes = (self._run_lane() for _ in range(self._pace.lanes))
                    await run_until(self._stopping, self._watch_versions(), self._renew_leases(), *lanes)
                except EngineDead as dead:
                    self.tally.notices.append(f"engine died: {dead}")
                    await self.close()
                    if failed + 1 >= MAX_FAILED_ENGINES:
                        raise WorkerFailed(
                            f"worker {self.name}: {MAX_FAILED_ENGINES} engines in a row died without a finished group; "
                            f"the last error: {dead}"
                        ) from dead
        finally:
            await self.close()
            self.status = Status.STOPPED

    async def start(self) -> None:
        """Start an engine and make it serve the newest version."""
        self.status = Status.STALE
        self._not_ready()
        self.tally.starts += 1
        what = f"an engine of worker {self.name} to start"
        try:
            self._engine = await within(self._pace.start_seconds, what, self._start_engine())
        except DeadlinePassed as late:
            raise EngineDead(f"{late}: the engine is stuck") from None
        newest = await self._first_version()  # the trainer may still be starting
        require_same_adapter(await asyncio.to_thread(self._policies.adapter, newest), self._adapter)
        self._prober = await Prober.calibrated(self._engine, await self._probe(0))
        await self.sync(newest)

    async def close(self) -> None:
        """Shut down the engine."""
        self.status = Status.STALE
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.close()

    async def sync(self, version: int) -> None:
        """Load a version and check its probe. Groups generated with it meanwhile reach the log only if it passes."""
        self.verdict = await self._load(version)
        if not self.verdict.passed:
            if not self._serving()[0].holds_several:
                self.status = Status.QUARANTINED
                self._not_ready()
                self._failed_probes += 1
            self.tally.quarantines += 1
            self.tally.notices.append(f"version {version} failed its probe: {self.verdict}")
            self.verdict = await self._load(version, from_anchor=True)
        if not self.verdict.passed:
            raise ProbeFailed(
                f"worker {self.name} does not serve version {version}, even after a reload from an anchor: "
                f"{self.verdict}. Engine and trainer compute different log-probs: compare library versions and dtypes"
            )
        self.tally.loads += 1
        self.status = Status.READY
        self._ready.set()
        await self._prompts.serving(self.name, version)

    async def _load(self, version: int, *, from_anchor: bool = False) -> ProbeVerdict:
        """Load a version and return the verdict of its probe. If it passed, the engine generates with it."""
        engine, prober = self._serving()
        replaces = not engine.holds_several
        probe = await self._probe(version)
        weights = await asyncio.to_thread(self._policies.fetch, version, from_anchor=from_anchor)
        if replaces:
            self._not_ready()
        # An engine may finish its running calls before it loads, and need not answer `health` meanwhile.
        seconds, what = self._pace.call_seconds + self._pace.start_seconds, f"version {version} on worker {self.name}"
        self._loading = replaces
        try:
            await within(seconds, what, engine.load(version, weights.items()))
        except DeadlinePassed as late:
            raise EngineDead(f"{late}: the engine is stuck") from None
        finally:
            self._loading = False
        if replaces:
            self._loaded.set()  # the next prompts are computed beside the probe
        verdict = await prober.check(engine, probe)
        if verdict.passed:
            engine.serve()
            self._loaded.set()
        return verdict

    async def rollout(self, leases: Sequence[PromptLease]) -> list[Group]:
        """Make groups of these prompts and append them to the log. On any error, give the prompts back first.

        Groups of evaluation prompts are handed over instead, and leave no trace in the log.
        """
        ids = [lease.group_id for lease in leases]
        logged = all(lease.evaluation is None for lease in leases)
        self._held.update(ids)
        try:
            groups = await self._generate(leases, ids if logged else ())
            await uninterrupted(self._append(groups, ids) if logged else self._hand_over(groups, ids))
        except BaseException:
            self.tally.discarded += len(ids)
            await uninterrupted(self._give_back(ids, logged))
            raise
        return groups

    async def _generate(self, leases: Sequence[PromptLease], recorded: Sequence[str]) -> list[Group]:
        """Return the groups, all generated by versions that passed their probe."""
        await self._loaded.wait()
        engine, _ = self._serving()
        failed_probes = self._failed_probes
        what = f"{', '.join(lease.group_id for lease in leases)} on worker {self.name}"
        started = asyncio.create_task(self._record(recorded, LedgerEventKind.STARTED))
        try:
            groups = await within(self._pace.call_seconds, what, self._maker.make(engine, leases))
            await self._ready.wait()
        finally:
            await started
        if failed_probes != self._failed_probes:
            raise _ProbeFailedMeanwhile
        return groups

    async def _hand_over(self, groups: Sequence[Group], ids: Sequence[str]) -> None:
        self._held.difference_update(ids)
        await self._prompts.evaluated(groups)
        self.tally.evaluated += len(groups)

    async def _append(self, groups: Sequence[Group], ids: Sequence[str]) -> None:
        submitted: Future[Receipt] = self._log.submit(groups)
        receipt = await asyncio.wrap_future(submitted)
        self._held.difference_update(ids)
        await self._prompts.finish(ids, count_outcomes(groups))
        self.tally.groups += len(receipt.accepted)
        self.tally.refused += len(receipt.refused)
        self.tally.tokens += sum(len(one.token_ids) for group in groups for one in group.completions)
        self.tally.notices += [str(entry.refusal.detail) for entry in receipt.refused]

    async def _give_back(self, ids: Sequence[str], logged: bool) -> None:
        self._held.difference_update(ids)
        await self._prompts.give_back(ids)
        await self._record(ids if logged else (), LedgerEventKind.UNFINISHED, cause="given back")

    async def _record(self, ids: Sequence[str], event: LedgerEventKind, cause: str = "") -> None:
        if not ids:
            return
        events = [LedgerEvent(group_id, event, cause=cause, by=self.name) for group_id in ids]
        await asyncio.to_thread(self._log.record, events)

    async def _run_lane(self) -> None:
        while True:
            leases = await self._prompts.take(self._pace.groups_per_call, self.name)
            if not leases:
                await asyncio.sleep(self._pace.poll_seconds)
                continue
            try:
                await self.rollout(leases)
            except _ProbeFailedMeanwhile:
                continue
            except DeadlinePassed as late:
                self.tally.notices.append(f"{late}: cancelled and given back; the engine answers and is kept")

    async def _renew_leases(self) -> None:
        """Keep the leases while the engine answers. A load has its own deadline, and may leave no room to answer."""
        while True:
            engine, _ = self._serving()
            if not self._loading:
                await engine.health()
            lost = await self._prompts.renew(sorted(self._held), self.name) if self._held else []
            if lost := [one for one in lost if one in self._held]:
                self._held.difference_update(lost)
                self.tally.notices.append(f"leases expired while the worker was silent: {', '.join(lost)}")
            await asyncio.sleep(self._pace.poll_seconds)

    async def _watch_versions(self) -> None:
        while True:
            await self._until_nudged()
            engine, _ = self._serving()
            newest = await asyncio.to_thread(self._policies.newest)
            if newest is not None and newest != engine.version:
                await self.sync(newest)

    async def _until_nudged(self) -> None:
        """Wait for `nudge`, at most `poll_seconds`."""
        with contextlib.suppress(TimeoutError):  # not `wait_for`, which can swallow a cancellation
            async with asyncio.timeout(self._pace.poll_seconds):
                await self._nudged.wait()
        self._nudged.clear()

    async def _first_version(self) -> int:
        async def first() -> int:
            while (newest := await asyncio.to_thread(self._policies.newest)) is None:
                await self._until_nudged()
            return newest

        try:
            return await within(self._pace.start_seconds, f"the first weights for worker {self.name}", first())
        except DeadlinePassed as late:
            raise WorkerFailed(f"{late}: check that a trainer publishes to this weight log") from None

    async def _probe(self, version: int) -> Probe:
        probe = await asyncio.to_thread(self._policies.probe, version)
        if probe is None:
            raise WorkerFailed(f"version {version} was published without a probe, so the engine cannot be checked")
        return probe

    def _not_ready(self) -> None:
        self._loaded.clear()
        self._ready.clear()

    def _serving(self) -> tuple[Engine, Prober]:
        if self._engine is None or self._prober is None:
            raise EngineDead(f"worker {self.name} has no engine")
        return self._engine, self._prober
