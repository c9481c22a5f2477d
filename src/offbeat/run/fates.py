"""What the loop records about groups in the ledger of the experience log."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from offbeat.experience.ledger import Ledger, LedgerEvent, LedgerEventKind
from offbeat.experience.sampler import Dropped
from offbeat.run.protocols import Log
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
