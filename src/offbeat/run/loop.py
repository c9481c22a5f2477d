"""The loop.

    workers (fleet.py)                     this loop                                     the trainer
    ──────────────────                     ─────────                                     ───────────
    take prompts  ◄── waits for admission ── desk.py
    generate, score, append ──► experience log
                                           ┌► a batch?  ◄── waits for groups in the log
                                           │  train     ─────────────────────────────► i updates ── waits for it
                                           │  fates into the ledger
                                           │  publish?  ─────────────────────────────► weight log, when cadence says so
    load, probe   ◄── nudged ──────────────┤
                                           │  evaluate? save? health?
                                           └─ next step

Lockstep, concurrent and offline are this one loop; they differ in what the desk admits (`admission.py`). In lockstep a
batch's prompts are admitted when the batch is made up, by the newest version only. In concurrent mode workers run
ahead as far as `max_lag` allows, and the loop waits before a step that would make a group expire which is still being
written. Every wait has a name and a deadline.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from offbeat.errors import NoGradient, RunStopped, WaitExpired
from offbeat.events import EventKind
from offbeat.experience.ledger import Ledger, LedgerEvent, LedgerEventKind
from offbeat.experience.sampler import Draw, Dropped, Sampler, Waiting
from offbeat.experience.schema import Snapshot
from offbeat.run.admission import Admission
from offbeat.run.cadence import Cadence
from offbeat.run.desk import Desk
from offbeat.run.fleet import Fleet
from offbeat.run.health import Action, Health
from offbeat.run.journal import Journal, Phase, Stopwatch
from offbeat.run.protocols import Learner, Log, NeverPaused, PauseControl, RunPlan, StepOutcome
from offbeat.trainer.trainer import Trained
from offbeat.types import Group, Json

TELL_SECONDS: Final = 60.0
"""Without a new group, after which the run says what it waits for, and again after twice as long."""


@dataclass
class Loop:
    """Parts, wired. `run` is the story."""

    plan: RunPlan
    log: Log
    sampler: Sampler
    desk: Desk
    admission: Admission
    fleet: Fleet
    learner: Learner
    cadence: Cadence
    journal: Journal
    health: Health
    watch: Stopwatch
    clock: Callable[[], float]
    evaluate: Callable[[int], Awaitable[Mapping[str, Json]]] | None = None
    gate: PauseControl = field(default_factory=NeverPaused)
    published: int = -1
    cursor: Snapshot | None = None
    consumer: str = "trainer"
    """Its name in an experience log that other runs use too."""

    def __post_init__(self) -> None:
        self._stopping = ""
        self._counted = 0
        self._saved: int | None = None

    def stop(self, why: str = "asked to") -> None:
        """End after this step, with a checkpoint."""
        self._stopping = self._stopping or why

    async def run(self) -> Ledger:
        """To the last step; returns the books, which balance."""
        # Whatever a run before this one recorded for later steps did not happen, also where it left no checkpoint.
        self._record(self.learner.step, LedgerEventKind.REWOUND, [""])
        if self.published < 0:
            await self._publish(why="first")
            await self._evaluate()
        await self.fleet.start()
        try:
            while self.learner.step < self.plan.steps and not self._stopping:
                outcome = await self._step()
                if outcome is None:
                    break
                await self._publish_if_due(outcome)
                await self._evaluate()
                await self._look_after(outcome)
                if self.plan.save_every and self.learner.step % self.plan.save_every == 0:
                    await self._save()
        finally:
            with self.watch.phase(Phase.ENDING):
                await self.fleet.close()
        await self._save()
        with self.watch.phase(Phase.SAVING):
            await self.learner.finish()
        return self._statement()

    async def _step(self) -> StepOutcome | None:
        """A batch, trained. What the trainer refuses is quarantined, and the step is made with other groups.

        None where the run is to stop before there is a batch.
        """
        for _ in range(self.plan.refill):
            batch = await self._batch()
            if batch is None:
                return None
            draw, groups = batch
            taught = await self._train(draw.k, groups)
            if taught is not None:
                return StepOutcome(taught, draw, groups)
            self.sampler.again()
        raise RunStopped(
            f"step {self.learner.step + 1}: {self.plan.refill} batches in a row had nothing to teach: prompts too easy "
            "or too hard, or a broken scorer; look at their groups"
        )

    async def _train(self, k: int, groups: Sequence[Group]) -> Trained | None:
        while groups:
            with self.watch.phase(Phase.TRAINING):
                try:
                    outcome = await self.learner.train(groups)
                except NoGradient as nothing:
                    self.journal.write(EventKind.NO_GRADIENT, k, why=str(nothing))
                    self._record(k, LedgerEventKind.ZERO_VARIANCE, [group.id for group in groups], "no gradient")
                    return None
            if isinstance(outcome, Trained):
                self._settle(k, outcome)
                return outcome
            self.journal.write(EventKind.REFUSED, k, groups=dict(outcome.faults))
            for group_id, why in outcome.faults.items():
                self._record(k, LedgerEventKind.QUARANTINED, [group_id], why)
            groups = [group for group in groups if group.id not in outcome.faults]
        return None

    async def _batch(self) -> tuple[Draw, list[Group]] | None:
        """As soon as there is one; none where the run is to stop."""
        k, asked_before, last_news, told = self.learner.step, self.desk.asked, self.clock(), 0
        while not self._stopping:
            if self._feed():
                last_news, told = self.clock(), 0
            self.fleet.check()
            self.learner.check()
            enough = self.plan.batch if self.desk.asked - asked_before < self.plan.refill * self.plan.batch else 1
            draw: Draw | Waiting | None = self.sampler.draw(k, at_least=enough) if self._in_time(k) else None
            if draw is not None:
                self._drop(draw.dropped, k)
            if isinstance(draw, Draw):
                await self._report(k + 1)  # what is begun from now on is trained after this batch
                return draw, self.log.read(draw.ordinals)
            missing = draw.needed if draw is not None else 0
            await self._report(k, missing)
            waited = self.clock() - last_news
            if waited > self.plan.patience:
                raise WaitExpired(self._owed(k, missing, waited))
            if waited > TELL_SECONDS * 2**told:
                told += 1
                self.journal.write(EventKind.WAITING, k, why=self._owed(k, missing, waited))
            await self._wait_for_groups()
        return None

    async def _wait_for_groups(self) -> None:
        """Until something changes. While nobody writes, it is a new version that is waited for, or nothing at all."""
        idle_before = self.desk.idle
        with self.watch.phase(Phase.GROUPS):
            await self.desk.change(self.plan.poll_seconds)
        instead = Phase.LOADING if self.published == self.learner.step else Phase.ITSELF
        self.watch.move(self.desk.idle - idle_before, Phase.GROUPS, instead)

    def _in_time(self, k: int) -> bool:
        """Whether, after a step now, what is still being written can be trained before it expires."""
        writing = [lease.version for lease in self.desk.out if lease.version is not None]
        waiting = self.sampler.waiting_versions(k)[self.plan.fresh :]
        return not writing or self.admission.in_time(k + 1, [*waiting.tolist(), *writing])

    def _owed(self, k: int, missing: int, waited: float) -> str:
        owed = ", ".join(f"{lease.group_id} by {lease.by}" for lease in self.desk.out[:5]) or "nobody has any on loan"
        return f"waited {waited:.0f} s for {missing or 'late'} groups for step {k + 1}; owed: {owed}"

    def _feed(self) -> bool:
        self._counted = self.desk.finished  # before the look at the log: what is finished later may not be in it
        rows, self.cursor = self.log.index_since(self.cursor)
        self.sampler.feed(rows)
        return len(rows) > 0

    async def _report(self, k: int, missing: int = 0) -> None:
        waiting = len(self.sampler.waiting_versions(k))
        await self.desk.report(k=k, published=self.published, waiting=waiting, missing=missing, counted=self._counted)

    def _drop(self, dropped: Sequence[Dropped], k: int) -> None:
        if dropped:
            ids = [group.id for group in self.log.read([one.ordinal for one in dropped])]
            self.log.record(
                [
                    LedgerEvent(
                        name, LedgerEventKind(one.cause), k, "lag" if one.cause == "expired" else "", self.consumer
                    )
                    for name, one in zip(ids, dropped, strict=True)
                ]
            )

    def _settle(self, k: int, trained: Trained) -> None:
        """The fate of every group of the batch."""
        self._record(k + 1, LedgerEventKind.TRAINED, trained.groups)
        self._record(k, LedgerEventKind.ZERO_VARIANCE, trained.zero_variance)
        self._record(k, LedgerEventKind.TOO_SMALL, trained.too_small)

    def _record(self, step: int, event: LedgerEventKind, ids: Sequence[str], cause: str = "") -> None:
        if ids:
            self.log.record([LedgerEvent(group_id, event, step, cause, self.consumer) for group_id in ids])

    async def _publish_if_due(self, outcome: StepOutcome) -> None:
        trained = outcome.trained
        why = self.cadence.due(trained.step, self.published, trained.drift, outcome.median_version)
        lags = [lag for lag in outcome.draw.lags if lag is not None]
        self.journal.write(
            EventKind.STEP,
            trained.step,
            metrics=dict(trained.metrics),
            by_lag={name: dict(values) for name, values in trained.by_lag.items()},
            lags=list(lags),
            groups=len(outcome.groups),
            replayed=sum(outcome.draw.replayed),
            rewards=outcome.rewards_by_version(),
            seconds={str(phase): spent for phase, spent in self.watch.seconds().items()},
        )
        if why is not None:
            await self._publish(why)

    async def _publish(self, why: str) -> None:
        version = self.learner.step
        with self.watch.phase(Phase.PUBLISHING):
            said = await self.learner.publish(version)
        self.published = version
        self.journal.write(EventKind.PUBLISHED, version, version=version, why=why, **said)
        await self._report(version)
        await self.fleet.nudge()

    async def _evaluate(self) -> None:
        every, step = self.plan.evaluate_every, self.learner.step
        if self.evaluate is not None and every and step % every == 0:
            with self.watch.phase(Phase.EVALUATING):
                found = await self.evaluate(step)
            self.journal.write(EventKind.EVALUATED, step, **found)

    async def _look_after(self, outcome: StepOutcome) -> None:
        step = self.learner.step
        for alarm in self.health.look(outcome.trained.metrics, outcome.trained.groups):
            action = alarm.rule.action
            self.journal.write(EventKind.ALARM, step, action=str(action), says=str(alarm), groups=list(alarm.groups))
            if action is Action.STOP:
                self.stop(str(alarm))
            if action is Action.PAUSE:
                await self._pause(str(alarm))

    async def _pause(self, why: str) -> None:
        await self._save()
        until = self.clock() + self.plan.pause_seconds
        self.gate.shut()
        while not self.gate.is_open():
            if self.clock() > until:
                self.stop(f"paused for {self.plan.pause_seconds:g} s: {why}")
                return
            await asyncio.sleep(self.plan.poll_seconds)
        self.journal.write(EventKind.RELEASED, self.learner.step)

    async def _save(self) -> None:
        if self._saved == self.learner.step:
            return
        with self.watch.phase(Phase.SAVING):
            await self.learner.save(self.state())
        self._saved = self.learner.step
        self.journal.write(EventKind.SAVED, self.learner.step)

    def state(self) -> dict[str, Json]:
        """What a checkpoint needs of the loop, beside model and optimiser."""
        assert self.cursor is not None  # a step was made, so the log was read
        return {
            "published": self.published,
            "sampler": self.sampler.state(),
            "desk": self.desk.state(),
            "snapshot": {**self.cursor.to_json()},
        }

    def _statement(self) -> Ledger:
        ledger = self.log.ledger()
        seconds: dict[str, Json] = {str(phase): spent for phase, spent in self.watch.seconds().items()}
        self.journal.write(EventKind.ENDED, self.learner.step, why=self._stopping, books=str(ledger), seconds=seconds)
        ledger.check()
        return ledger
