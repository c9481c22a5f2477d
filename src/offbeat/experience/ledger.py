"""The ledger: what became of every group, computed from the log alone.

    generated = trained + waiting + dropped (by cause) + in flight

Generated is every group that was ever begun, appended or refused. Events are only added. A trainer that is resumed from
step k says so with `rewound`, which takes back what it had recorded for later steps: those steps did not happen.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from offbeat.errors import ConservationError


class LedgerEventKind(StrEnum):
    """What can happen to a group."""

    STARTED = "started"
    """Generation has begun; until the group is appended it is in flight."""
    LOST = "lost"
    """Whoever generated it is gone. Starting it again under the same id takes this back."""
    TRAINED = "trained"
    EXPIRED = "expired"
    """Its lag passed the limit (cause `lag`), or its feedback did not come in time (cause `feedback`)."""
    ZERO_VARIANCE = "zero-variance"
    TOO_SMALL = "too-small"
    """Fewer than two of its completions were scored."""
    SUPERSEDED = "superseded"
    QUARANTINED = "quarantined"
    """The trainer refused it, for the cause given; what the door refuses never becomes a group of the log."""
    REWOUND = "rewound"
    """The consumer `by` is back at `step`. Names no group."""


class Fate(StrEnum):
    """What became of a group. Exactly one holds for each."""

    IN_FLIGHT = "in flight"
    WAITING = "waiting"
    TRAINED = "trained"
    EXPIRED = "expired"
    ZERO_VARIANCE = "zero-variance"
    TOO_SMALL = "too-small"
    SUPERSEDED = "superseded"
    QUARANTINED = "quarantined"
    LOST = "lost"


DROPS: Final = (
    Fate.EXPIRED,
    Fate.ZERO_VARIANCE,
    Fate.TOO_SMALL,
    Fate.SUPERSEDED,
    Fate.QUARANTINED,
    Fate.LOST,
)
_ENDINGS: Final = {
    LedgerEventKind(fate.value): fate
    for fate in (Fate.EXPIRED, Fate.ZERO_VARIANCE, Fate.TOO_SMALL, Fate.SUPERSEDED, Fate.QUARANTINED)
}


@dataclass(frozen=True)
class LedgerEvent:
    """One thing that happened to a group.

    >>> LedgerEvent("g7", LedgerEventKind.TRAINED, step=12).by
    'trainer'
    """

    group_id: str
    event: LedgerEventKind
    step: int | None = None
    """Of the trainer; None where no step has to do with it."""
    cause: str = ""
    by: str = "trainer"
    """Which consumer or worker says so. A rewind takes back only its own."""

    def __post_init__(self) -> None:
        if self.step is None and self.event in (LedgerEventKind.TRAINED, LedgerEventKind.REWOUND):
            raise ValueError(f"event {self.event} of group {self.group_id!r} needs its step")


@dataclass(frozen=True)
class GroupFate:
    """A group's fate, the steps it was trained at, and the cause if it was dropped.

    >>> GroupFate(Fate.TRAINED, steps=(12, 15)).steps
    (12, 15)
    """

    fate: Fate
    steps: tuple[int, ...] = ()
    cause: str = ""


@dataclass(frozen=True)
class Ledger:
    """The fate of every group.

    >>> ledger = settle(["a", "b"], [LedgerEvent("a", LedgerEventKind.EXPIRED, step=9, cause="lag")])
    >>> ledger.generated, ledger.dropped, ledger.counts[Fate.WAITING]
    (2, {'expired': 1}, 1)
    """

    fates: Mapping[str, GroupFate]
    repeated: int = 0
    """Rows that repeat a group already there, and are not counted again."""
    conflicts: int = 0
    """Of these, the ones with other content than the first."""
    unaccounted: tuple[str, ...] = ()
    """Groups that were trained or dropped without ever having been in the log."""
    counts: Mapping[Fate, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", Counter(entry.fate for entry in self.fates.values()))

    @property
    def generated(self) -> int:
        """Every group ever begun, appended or refused."""
        return len(self.fates)

    @property
    def dropped(self) -> dict[str, int]:
        """How many were dropped, by cause."""
        return {fate.value: self.counts[fate] for fate in DROPS if self.counts[fate]}

    @property
    def uses(self) -> int:
        """How often groups were trained on, replays included."""
        return sum(len(entry.steps) for entry in self.fates.values())

    def check(self) -> None:
        """Raise `ConservationError` unless every group is accounted for exactly once."""
        if self.unaccounted:
            some = ", ".join(self.unaccounted[:5])
            raise ConservationError(
                f"{len(self.unaccounted)} groups have a fate but were never appended ({some} …): was the log exchanged "
                f"or cut after they were trained on?"
            )
        total = self.counts[Fate.TRAINED] + self.counts[Fate.WAITING] + self.counts[Fate.IN_FLIGHT]
        if total + sum(self.dropped.values()) != self.generated:
            raise ConservationError(f"{self.generated} generated, but the fates add up to {total} + {self.dropped}")

    def __str__(self) -> str:
        drops = sum(self.dropped.values())
        causes = ", ".join(f"{count} {cause}" for cause, count in self.dropped.items()) or "none"
        return (
            f"{self.generated} generated = {self.counts[Fate.TRAINED]} trained + {self.counts[Fate.WAITING]} waiting + "
            f"{drops} dropped ({causes}) + {self.counts[Fate.IN_FLIGHT]} in flight"
        )


def settle(
    stored: Iterable[str],
    events: Iterable[LedgerEvent],
    refused: Iterable[tuple[str, str]] = (),
    *,
    repeated: int = 0,
    conflicts: int = 0,
) -> Ledger:
    """The ledger of these groups, events in commit order, and refusals (id, reason).

    >>> events = [LedgerEvent("a", LedgerEventKind.TRAINED, step=1), LedgerEvent("c", LedgerEventKind.STARTED)]
    >>> print(settle(["a", "b"], events, [("d", "reward")]))
    4 generated = 1 trained + 1 waiting + 1 dropped (1 quarantined) + 1 in flight
    """
    valid = _not_taken_back(events)
    fates: dict[str, GroupFate] = {}
    for event in valid:
        if event.event is LedgerEventKind.STARTED:
            fates[event.group_id] = GroupFate(Fate.IN_FLIGHT)
        elif event.event is LedgerEventKind.LOST:
            fates[event.group_id] = GroupFate(Fate.LOST, cause=event.cause)
    fates |= {group_id: GroupFate(Fate.QUARANTINED, cause=reason) for group_id, reason in refused}
    held = set(stored)
    fates |= dict.fromkeys(held, GroupFate(Fate.WAITING))
    unaccounted: dict[str, None] = {}
    for event in dict.fromkeys(valid):  # said twice is said once
        if event.event is not LedgerEventKind.TRAINED and event.event not in _ENDINGS:
            continue
        if event.group_id in held:
            fates[event.group_id] = _after(fates[event.group_id], event)
        else:
            unaccounted[event.group_id] = None
    return Ledger(fates, repeated, conflicts, tuple(unaccounted))


def _after(before: GroupFate, event: LedgerEvent) -> GroupFate:
    """Trained once is trained for good; otherwise the last ending counts."""
    if event.event is LedgerEventKind.TRAINED:
        assert event.step is not None  # Event demands it
        return GroupFate(Fate.TRAINED, (*before.steps, event.step))
    return before if before.fate is Fate.TRAINED else GroupFate(_ENDINGS[event.event], cause=event.cause)


def _not_taken_back(events: Iterable[LedgerEvent]) -> list[LedgerEvent]:
    """The events that still hold, in order."""
    kept: list[LedgerEvent] = []
    for event in events:
        if event.event is LedgerEventKind.REWOUND:
            back_to = event.step or 0
            kept = [e for e in kept if e.by != event.by or e.step is None or e.step <= back_to]
        else:
            kept.append(event)
    return kept
