"""The loop of a run.

    workers (fleet.py)                     this loop                                     the trainer
    ──────────────────                     ─────────                                     ───────────
    take prompts  ◄── wait for admission ── desk.py
    generate, score, append ──► experience log
                                           ┌► draw a batch ◄── wait for groups in the log
                                           │  train     ─────────────────────────────► i updates ── wait for them
                                           │  record the fate of each group
                                           │  check health: a step that diverged ends the run here
                                           │  publish, if due ───────────────────────► weight log
    load, probe   ◄── nudge ───────────────┤
    answer evaluation prompts ◄────────────┤  evaluate the published version, if due
                                           │  pause, if an alarm asks for it; save, if due
                                           └─ next step

Lockstep, concurrent and offline runs use this one loop; they differ in what the desk admits (`admission.py`). In
lockstep, prompts are admitted while their batch is being drawn, for the newest version only. In concurrent mode,
workers run ahead as far as `max_lag` allows, and the loop delays a step that would make a group expire while it is
still being generated. An evaluation measures the version that is served: in lockstep the trainer waits for it, in
concurrent mode only the next publish does. Every wait has a name and a deadline.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, cast

from offbeat.errors import NoGradient, RunStopped, WaitExpired
from offbeat.events import EventKind
from offbeat.experience.index_files import IndexFiles
from offbeat.experience.ledger import Ledger, LedgerEventKind
from offbeat.experience.sampler import Draw, Sampler
from offbeat.experience.schema import Snapshot
from offbeat.run.admission import Admission
from offbeat.run.cadence import Cadence, PublishEvidence
from offbeat.run.desk import GATHERING_SECONDS, Desk
from offbeat.run.drawing import Drawing, FateRecorder
from offbeat.run.evaluation.rates import EvaluationRounds
from offbeat.run.fleet import Fleet
from offbeat.run.health import Action, Health
from offbeat.run.journal import Journal, Phase, Stopwatch
from offbeat.run.protocols import Learner, Log, PauseControl, Preparation, RunPlan, StepOutcome, make_step_context
from offbeat.trainer.trainer import Trained
from offbeat.types import Group, Json

WAIT_NOTICE_SECONDS: Final = 60.0
"""After so long without a new group the run writes what it waits for, and again after twice as long."""


@dataclass
class Loop:
    """The parts of a run, connected. Start reading at `run`."""

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
    stopwatch: Stopwatch
    clock: Callable[[], float]
    rounds: EvaluationRounds
    pause_control: PauseControl | None = None
    """None: a pause only saves a checkpoint."""
    published: int = -1
    evidence: PublishEvidence = field(default_factory=PublishEvidence)
    cursor: Snapshot | None = None
    index_files: IndexFiles | None = None
    preparation: Preparation = field(default_factory=Preparation)
    """Begins after the first version is published; the first step waits for it."""
    consumer: str = "trainer"
    """The name of this run's trainer in an experience log that several runs share."""

    def __post_init__(self) -> None:
        self._stop_reason = self._used_up = ""
        self._finished_when_read = 0
        self._saved_step: int | None = None
        self._fates = FateRecorder(self.log, self.consumer)
        self._drawing = Drawing(self.plan, self.sampler, self.desk, self.admission, self._fates)

    def stop(self, why: str) -> None:
        """End the run after the current step, with a checkpoint."""
        self._stop_reason = self._stop_reason or why

    @property
    def finished(self) -> bool:
        """True if there is nothing left to train: the last step is done, or an offline run has used up its log."""
        return self.learner.step >= self.plan.steps or bool(self._used_up)

    @property
    def why_ended(self) -> str:
        """Why the run ended before its last step; empty otherwise."""
        return self._stop_reason or self._used_up

    async def run(self) -> Ledger:
        """Train to the last step and return the ledger, which balances."""
        # A run that died may have recorded fates for steps after its checkpoint, or without one: take them back.
        self._fates.record(self.learner.step, LedgerEventKind.REWOUND, [""])
        if self.published >= 0:
            self._fates.check(self.log.ledger())  # a run that resumes counts no damaged event
        self._read_new_groups()  # a run that is stopped before its first step saves its position in the log
        await self._update_desk(self.learner.step)  # before a worker asks for prompts
        self.fleet.start()
        try:
            if self.published < 0:
                await self._publish(why="first")
                self.rounds.schedule.mark(self.learner.step)
                await self._save()  # so that a run has a checkpoint, whatever its first step does
            await self.preparation.begin(alone=not self.plan.generates)
            await self._evaluate_if_due()
            while not self.finished and not self._stop_reason:
                outcome = await self._step()
                if outcome is None:
                    break
                self._record(outcome)
                pause = await self._check_health(outcome)
                await self._publish_if_due()
                self.rounds.schedule.mark(self.learner.step)
                await self._evaluate_if_due()
                if pause:
                    await self._pause(pause)
                if self.plan.save_every and self.learner.step % self.plan.save_every == 0:
                    await self._save()
            await self._evaluate_last()
        finally:
            with self.stopwatch.phase(Phase.ENDING):
                await self.rounds.cancel()
                await self.fleet.close()
        await self._save()
        with self.stopwatch.phase(Phase.SAVING):
            await self.learner.finish()
        return self._end()

    async def _step(self) -> StepOutcome | None:
        """Train one batch, or return None if the run is stopping. A batch that moves nothing is replaced."""
        why = ""
        for _ in range(self.plan.refill):
            batch = await self._next_batch()
            if batch is None:
                return None
            with self.stopwatch.phase(Phase.CHECKING):
                await self.preparation.finish()
            trained = await self._train(*batch)
            if isinstance(trained, Trained):
                return StepOutcome(trained, *batch)
            why = trained
            self.sampler.again()
        broken = why.startswith("the trainer refused")
        raise RunStopped(
            f"step {self.learner.step + 1}: {self.plan.refill} batches in a row moved nothing. The last one: {why}. "
            "Look at the groups with `offbeat view`"
            + (f", or {self.health.way_back()}" if broken or self.health.healthy < self.learner.step else "")
        )

    async def _next_batch(self) -> tuple[Draw, list[Group]] | None:
        """Wait for a batch and return it, or return None if the run is stopping."""
        k, admitted_before, last_news, notices = self.learner.step, self.desk.admitted, self.clock(), 0
        while not self._stop_reason:
            if self._read_new_groups():
                last_news, notices = self.clock(), 0
            self._keep_waiting()
            draw = self._drawing.draw(k, admitted=self.desk.admitted - admitted_before)
            if isinstance(draw, Draw):
                await self._update_desk(k + 1)  # groups admitted from now on are trained after this batch
                return draw, self.log.read(draw.ordinals)
            if draw is not None and self._drawing.nothing_will_come:
                self._used_up = self._drawing.describe_end(draw)
                return None
            missing = draw.needed if draw is not None else 0
            await self._update_desk(k, missing)
            waited = self.clock() - last_news
            if waited > self.plan.patience:
                raise WaitExpired(
                    f"{self._describe_wait(k, missing, waited)}; check the workers, or raise run.patience"
                )
            if waited > WAIT_NOTICE_SECONDS * 2**notices:
                notices += 1
                self.journal.write(EventKind.WAITING, k, why=self._describe_wait(k, missing, waited))
            await self._wait_for_groups(missing)
        return None

    def _read_new_groups(self) -> bool:
        self._finished_when_read = self.desk.finished  # before the read: the log may lack what finishes after this
        rows, self.cursor = self.log.index_since(self.cursor)
        self.sampler.feed(rows)
        return len(rows) > 0

    async def _wait_for_groups(self, missing: int) -> None:
        """Wait for a change, and shortly for all missing groups. Idle time counts as loading, or as the loop itself."""
        idle_before = self.desk.idle_seconds
        with self.stopwatch.phase(Phase.GROUPS):
            await self.desk.wait_for_change(self.plan.poll_seconds)
            await self.desk.wait_for_finished(self._finished_when_read + missing, GATHERING_SECONDS)
        idle_phase = Phase.LOADING if self.published == self.learner.step else Phase.ITSELF
        if self.plan.generates:
            self.stopwatch.move(self.desk.idle_seconds - idle_before, Phase.GROUPS, idle_phase)

    def _describe_wait(self, k: int, missing: int, waited: float) -> str:
        in_flight = ", ".join(f"{lease.group_id} by {lease.by}" for lease in self.desk.in_flight[:5]) or "none"
        waits = f"waited {waited:.0f} s for {missing or 'late'} groups for step {k + 1}"
        return waits + (
            f"; groups in flight: {in_flight}" if self.plan.generates else self._drawing.describe_unscored()
        )

    async def _update_desk(self, k: int, missing: int = 0) -> None:
        waiting, finished = self.sampler.waiting_count(k), self._finished_when_read
        await self.desk.update(k=k, published=self.published, waiting=waiting, missing=missing, finished=finished)

    async def _train(self, draw: Draw, groups: Sequence[Group]) -> Trained | str:
        """Train on the groups, or return why they move nothing. Groups that the trainer refuses are quarantined."""
        k, ordinals = draw.k, dict(zip((group.id for group in groups), draw.ordinals, strict=True))
        context = make_step_context(draw, groups, self.published if self.plan.generates else None)
        while True:
            with self.stopwatch.phase(Phase.TRAINING):
                try:
                    outcome = await self.learner.train(groups, context)
                except NoGradient as error:
                    self.journal.write(EventKind.NO_GRADIENT, k, why=str(error))
                    self._fates.record(k, LedgerEventKind.ZERO_VARIANCE, [group.id for group in groups], "no gradient")
                    return str(error)
            if isinstance(outcome, Trained):
                outcome = self.desk.scoring.report(outcome, self.journal)
                self._fates.trained(outcome)
                self._quarantine(k + 1, outcome.refused, ordinals)
                self.sampler.measured({ordinals[one]: drift for one, drift in outcome.group_drift.items()})
                return outcome
            self._quarantine(k, outcome.faults, ordinals)
            groups = [group for group in groups if group.id not in outcome.faults]
            if not groups:
                return f"the trainer refused its groups: {[*outcome.faults.values()][-1]}"

    def _quarantine(self, step: int, faults: Mapping[str, str], ordinals: Mapping[str, int]) -> None:
        """Record the groups that the trainer refused, and never draw them again."""
        if not faults:
            return
        self.journal.write(EventKind.REFUSED, step, groups=dict(faults))
        self.sampler.retire([ordinals[one] for one in faults], "refused")
        self._fates.quarantined(step, faults)

    def _record(self, outcome: StepOutcome) -> None:
        trained = outcome.trained
        self.journal.write(
            EventKind.STEP,
            trained.step,
            metrics=outcome.metrics(self.evidence.add_step(trained.published, self.stopwatch.seconds())),
            by_lag={name: dict(values) for name, values in trained.by_lag.items()},
            lags=cast(Json, outcome.trained_lags),
            groups=len(trained.groups),
            replayed=outcome.trained_replays,
            retired=dict(Counter(one.cause for one in outcome.draw.retired)),
            rewards=outcome.rewards_by_version(),
            seconds=self.stopwatch.to_json(),
        )

    async def _publish_if_due(self) -> None:
        why = self.cadence.due(self.evidence.since, self.evidence.publish_seconds)
        if why is not None:
            await self._publish(why)

    async def _publish(self, why: str) -> None:
        await self._finish_evaluation()  # after a publish no engine serves the version before
        version, details = self.learner.step, None
        if self.plan.generates:  # no worker reads the versions of an offline run
            with self.stopwatch.phase(Phase.PUBLISHING):
                details = await self.learner.publish(version)
        self.published = version
        self.evidence.published()
        if details is not None:
            self.journal.write(EventKind.PUBLISHED, version, version=version, why=why, **details)
        await self._update_desk(version)
        await self.fleet.nudge()

    async def _evaluate_if_due(self) -> None:
        if self.rounds.on_engines and self.published < self.learner.step >= self.plan.steps:
            return  # `_evaluate_last` publishes the policy of the last step first
        self.rounds.begin(self.published, lambda: self.learner.step)
        if not self.rounds.overlap:
            await self._finish_evaluation()

    async def _finish_evaluation(self) -> None:
        """Wait for the running evaluation. Time in which no worker can answer yet counts as loading."""
        idle_before = self.desk.idle_seconds
        with self.stopwatch.phase(Phase.EVALUATING):
            await self.rounds.finish(self._keep_waiting, self.plan.poll_seconds)
        if self.rounds.on_engines:
            self.stopwatch.move(self.desk.idle_seconds - idle_before, Phase.EVALUATING, Phase.LOADING)

    def _keep_waiting(self) -> bool:
        """Return False if the run is stopping; raise if what it waits for is lost."""
        self.fleet.check()
        self.learner.check()
        self.preparation.check()
        return not self._stop_reason

    async def _evaluate_last(self) -> None:
        """Publish and evaluate the policy of the last step, if an evaluation is still due."""
        await self._finish_evaluation()
        if self.rounds.schedule.due and self.finished and not self._stop_reason:
            await self._save()  # a run that is later given more steps continues as if this were not published
            await self._publish(why="last")
            self.rounds.begin(self.published, lambda: self.learner.step)
            await self._finish_evaluation()

    async def _check_health(self, outcome: StepOutcome) -> str:
        """Return why to pause; empty if not. Raises `RunStopped` if the step diverged."""
        trained, step, says = outcome.trained, self.learner.step, dict.fromkeys(Action, "")
        for alarm in self.health.check(trained.metrics, outcome.groups, trained.group_drift, step):
            action, says[alarm.rule.action] = str(alarm.rule.action), str(alarm)
            self.journal.write(EventKind.ALARM, step, action=action, says=str(alarm), groups=list(alarm.groups))
        if why := says[Action.STOP]:
            await self.learner.finish()  # the newest checkpoint may still be being written
            rate, broken = trained.metrics["learning_rate"], ", ".join(trained.overflowed[:3]) or "none"
            raise RunStopped(
                f"step {step} diverged at a learning rate of {rate:g}: {why}. Tensors that overflowed: {broken}. "
                f"Nothing of this step was published or saved; {self.health.way_back()}"
            )
        return says[Action.PAUSE]

    async def _pause(self, why: str) -> None:
        await self._save()
        if self.pause_control is None:
            return
        deadline = self.clock() + self.plan.pause_seconds
        self.pause_control.pause()
        while not self.pause_control.is_released():
            if self.clock() > deadline:
                self.stop(f"paused for {self.plan.pause_seconds:g} s: {why}")
                return
            await asyncio.sleep(self.plan.poll_seconds)
        self.journal.write(EventKind.RELEASED, self.learner.step)

    async def _save(self) -> None:
        if self._saved_step == self.learner.step:
            return
        with self.stopwatch.phase(Phase.SAVING):
            await self.learner.save(self.state())
            if self.index_files is not None and self.cursor is not None:
                await asyncio.to_thread(self.index_files.save_if_grown, self.sampler.columns, self.cursor)
        self._saved_step = self.learner.step
        self.journal.write(EventKind.SAVED, self.learner.step)

    def state(self) -> dict[str, Json]:
        """Return the loop's part of a checkpoint: everything but model and optimizer."""
        assert self.cursor is not None  # the log was read before the first step
        return {
            "published": self.published,
            "evidence": self.evidence.state(),
            "sampler": self.sampler.state(),
            "desk": self.desk.state(),
            "snapshot": {**self.cursor.to_json()},
            "evaluation": self.rounds.schedule.state(),
            "healthy": self.health.healthy,
        }

    def _end(self) -> Ledger:
        ledger, seconds, step, why = self.log.ledger(), self.stopwatch.to_json(), self.learner.step, self.why_ended
        rows = cast(Json, self.log.index_since(self.cursor)[1].to_json())
        self.journal.write(
            EventKind.ENDED, step, why=why, finished=self.finished, ledger=str(ledger), seconds=seconds, rows=rows
        )
        self._fates.check(ledger)
        return ledger
