"""Whether the next batch can be drawn now and how small it may be, and what the ledger records of its groups."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from offbeat.errors import RunStopped
from offbeat.experience.ledger import Ledger, LedgerEvent, LedgerEventKind
from offbeat.experience.sampler import Draw, Dropped, Sampler, Waiting
from offbeat.run.admission import Admission
from offbeat.run.desk import Desk
from offbeat.run.protocols import Log, RunPlan
from offbeat.trainer.trainer import Trained


@dataclass
class FateRecorder:
    """Records the fate of each group that the trainer of one run has drawn or dropped."""

    log: Log
    consumer: str
    """The name of the run's trainer."""
    _updates_made: int | None = None
    """As the trainer's optimizer counts them."""

    def record(self, step: int, event: LedgerEventKind, ids: Sequence[str], cause: str = "") -> None:
        """Record the same fate for several groups."""
        if ids:
            self.log.record([LedgerEvent(group_id, event, step, cause, self.consumer) for group_id in ids])

    def trained(self, trained: Trained) -> None:
        """Record the fate of each group of a step, with the drift that was measured on it, in one commit."""
        self._updates_made = trained.updates_made
        step, events = trained.step, []
        for one in trained.groups:
            drift, ess = astuple(trained.group_drift[one]) if one in trained.group_drift else (None, None)
            kind = LedgerEventKind.TRAINED
            events.append(LedgerEvent(one, kind, step, "", self.consumer, drift, ess, trained.updates))
        for kind, ids in (
            (LedgerEventKind.ZERO_VARIANCE, trained.zero_variance),
            (LedgerEventKind.TOO_SMALL, trained.too_small),
        ):
            events += [LedgerEvent(one, kind, step - 1, "", self.consumer) for one in ids]
        self.log.record(events)

    def check(self, ledger: Ledger) -> None:
        """Raise unless every group has one fate, and the groups are recorded for the updates that were made."""
        ledger.check({} if self._updates_made is None else {self.consumer: self._updates_made})

    def quarantined(self, step: int, faults: Mapping[str, str]) -> None:
        """Record the groups that the trainer refused, each with its reason."""
        kind, by = LedgerEventKind.QUARANTINED, self.consumer
        self.log.record([LedgerEvent(one, kind, step, why, by) for one, why in faults.items()])

    def dropped(self, dropped: Sequence[Dropped], k: int) -> None:
        """Record the groups that the sampler dropped, each with its cause."""
        if not dropped:
            return
        events = []
        for group, drop in zip(self.log.read([drop.ordinal for drop in dropped]), dropped, strict=True):
            why = "lag" if drop.cause == "expired" else ""
            events.append(LedgerEvent(group.id, LedgerEventKind(drop.cause), k, why, self.consumer))
        self.log.record(events)


@dataclass(frozen=True)
class Drawing:
    """Draws batches from the sampler, no earlier than the groups in flight allow."""

    plan: RunPlan
    sampler: Sampler
    desk: Desk
    admission: Admission
    fates: FateRecorder

    def draw(self, k: int, admitted: int) -> Draw | Waiting | None:
        """Draw a batch for step k + 1, or return None if the step must wait for groups in flight.

        A smaller batch is enough once `refill` × B prompts were admitted for it, or if no group can be added to it.
        """
        if not self._can_step_in_time(k):
            return None
        if missing := self._missing_ahead(k):
            return Waiting(k, missing, cooling=0, dropped=())
        may_wait = admitted < self.plan.refill * self.plan.batch and not self.nothing_will_come
        draw = self.sampler.draw(k, at_least=self.plan.batch if may_wait else 1)
        self.fates.dropped(draw.dropped, k)
        return draw

    @property
    def nothing_will_come(self) -> bool:
        """True if the run generates nothing, and no group is waited for until its score arrives."""
        return not self.plan.generates and not (self.plan.waits_for_scores and self.sampler.unripe)

    def describe_end(self, waiting: Waiting) -> str:
        """Say why an offline run ends before its last step. A cooldown that no step can end raises `RunStopped`."""
        if waiting.cooling:
            raise RunStopped(
                f"sampler.cooldown keeps all {waiting.cooling} groups back that could be trained next; lower it, or "
                "import more groups"
            )
        return f"the log is used up: every group was trained on sampler.epochs times{self.describe_unscored()}"

    def describe_unscored(self) -> str:
        """Say how many groups have no score yet; empty if all have."""
        count = self.sampler.unripe
        return f"; groups that wait for a score: {count} (`offbeat log pending`)" if count else ""

    def _can_step_in_time(self, k: int) -> bool:
        """True if, after a step now, every group in flight can still be trained before it expires."""
        in_flight = self.desk.versions_in_flight
        if not in_flight:
            return True
        left, batch = Counter(in_flight), self.plan.fresh
        for version, count in self.sampler.waiting(k).items():  # the oldest go into this batch
            left[version] += max(0, count - batch)
            batch = max(0, batch - count)
        return self.admission.can_train_in_time(k + 1, +left)

    def _missing_ahead(self, k: int) -> int:
        """Return how many groups are missing until the batch and those behind it, by `offset`, wait in the log."""
        if not self.plan.offset:
            return 0
        batches = min(self.plan.offset + 1, self.plan.steps - k)
        return max(0, batches * self.plan.fresh - self.sampler.waiting_count(k))
