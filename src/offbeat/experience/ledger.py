"""The ledger: the fate of every group of a log, or of one of the runs that share it, computed from the log alone.

    generated = trained + waiting + dropped (by cause) + in flight + unfinished

Generated counts every group that was ever started, appended or refused. Events are only added. A trainer that resumes
from step k records `rewound`, which cancels what it recorded for later steps: those steps did not happen.

A version is a number, and in a log that several runs share each run has a version 12. So the log keeps the run of every
group whose tokens have versions, and a run reads its own versions only. Groups of another run are data without a
version for it, like imported ones: their lag is unknown, and they never expire.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from offbeat.errors import ConservationError, LogReadError
from offbeat.types import Group

if TYPE_CHECKING:
    import pyarrow as pa


class LedgerEventKind(StrEnum):
    """What can happen to a group."""

    STARTED = "started"
    """Generation has started. The group is in flight until it is appended."""
    UNFINISHED = "unfinished"
    """Its worker gave it back before it was whole, for example because the run has ended. Starting the same id again
    cancels this. Earlier versions recorded it as `lost`."""
    TRAINED = "trained"
    EXPIRED = "expired"
    """Its lag exceeded the limit (cause `lag`), or its feedback did not arrive in time (cause `feedback`)."""
    ZERO_VARIANCE = "zero-variance"
    TOO_SMALL = "too-small"
    """Fewer than two of its completions were scored."""
    SUPERSEDED = "superseded"
    QUARANTINED = "quarantined"
    """The trainer refused it, for the given cause. A group that validation refuses never enters the log."""
    REWOUND = "rewound"
    """The consumer `by` resumed at `step`. Has no group."""

    @classmethod
    def _missing_(cls, value: object) -> "LedgerEventKind | None":
        return cls.UNFINISHED if value == "lost" else None


def event_kind(name: str) -> LedgerEventKind:
    """Return the kind of an event that a log has recorded."""
    try:
        return LedgerEventKind(name)
    except ValueError:
        raise LogReadError(
            f"the ledger has an event {name!r}, which does not exist: its table is damaged, or of a later version"
        ) from None


class Fate(StrEnum):
    """What became of a group. Every group has exactly one fate."""

    IN_FLIGHT = "in flight"
    WAITING = "waiting"
    TRAINED = "trained"
    EXPIRED = "expired"
    ZERO_VARIANCE = "zero-variance"
    TOO_SMALL = "too-small"
    SUPERSEDED = "superseded"
    QUARANTINED = "quarantined"
    UNFINISHED = "unfinished"


DROPS: Final = (Fate.EXPIRED, Fate.ZERO_VARIANCE, Fate.TOO_SMALL, Fate.SUPERSEDED, Fate.QUARANTINED)
_DROP_EVENTS: Final = {LedgerEventKind(fate.value): fate for fate in DROPS}


@dataclass(frozen=True, slots=True)
class LedgerEvent:
    """One thing that happened to a group."""

    group_id: str
    event: LedgerEventKind
    step: int | None = None
    """The trainer's step, or None if the event belongs to no step."""
    cause: str = ""
    by: str = "trainer"
    """The consumer or worker that recorded the event. A rewind cancels only its own events."""
    drift: float | None = None
    """The drift of a trained group in that step: mean (1 - π_k/α)₊ over its tokens. None if α is unknown."""
    ess: float | None = None
    """The effective sample size of a trained group's sequence ratios in that step."""
    updates: int | None = None
    """The updates that a trained group had a part in, in that step. None in logs of earlier versions."""
    run: str | None = None
    """The id of the run that recorded the event; a log that is opened for a run fills it in. None: not recorded."""

    def __post_init__(self) -> None:
        if self.step is None and self.event in (LedgerEventKind.TRAINED, LedgerEventKind.REWOUND):
            raise ValueError(f"event {self.event} of group {self.group_id!r} needs a step")


@dataclass(frozen=True)
class UpdateCount:
    """The updates of one trainer, over all its steps."""

    total: int = 0
    known: bool = True
    """False if an earlier version recorded some of the steps, without their updates."""
    contradictions: tuple[str, ...] = ()
    """Steps whose groups are recorded with different numbers of updates."""


@dataclass(frozen=True, slots=True)
class GroupFate:
    """A group's fate, the steps it was trained at, and the cause if it was dropped."""

    fate: Fate
    steps: tuple[int, ...] = ()
    cause: str = ""
    drift: tuple[float | None, ...] = ()
    """The drift measured at each of these steps."""
    updates: tuple[int | None, ...] = ()
    """The updates that the group had a part in, at each of these steps."""


@dataclass(frozen=True)
class Ledger:
    """The fate of every group.

    >>> ledger = settle(["a", "b"], [LedgerEvent("a", LedgerEventKind.EXPIRED, step=9, cause="lag")])
    >>> ledger.generated, ledger.dropped, ledger.counts[Fate.WAITING]
    (2, {'expired': 1}, 1)
    """

    fates: Mapping[str, GroupFate]
    repeated: int = 0
    """Rows that repeat the id of an earlier row. They are not counted again."""
    conflicts: int = 0
    """Repeated rows whose content differs from the first row's."""
    unaccounted: tuple[str, ...] = ()
    """Groups that were trained or dropped but never appended."""
    updates: Mapping[str, UpdateCount] = field(default_factory=dict)
    """By trainer."""
    damaged: tuple[str, ...] = ()
    """What is wrong with events that are not as they were written. They are not counted."""
    counts: Mapping[Fate, int] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "counts", Counter(entry.fate for entry in self.fates.values()))

    @property
    def generated(self) -> int:
        """The number of groups ever started, appended or refused."""
        return len(self.fates)

    @property
    def dropped(self) -> dict[str, int]:
        """The number of dropped groups by cause."""
        return {fate.value: self.counts[fate] for fate in DROPS if self.counts[fate]}

    @property
    def uses(self) -> int:
        """How often groups were trained on, including replays."""
        return sum(len(entry.steps) for entry in self.fates.values())

    def check(self, made: Mapping[str, int] | None = None) -> None:
        """Raise `ConservationError` unless every group is accounted for exactly once.

        `made` is how many updates the optimizer of each trainer has counted, by the name of the trainer: the ledger
        must have recorded as many.
        """
        if self.damaged:
            raise ConservationError(
                f"{len(self.damaged)} events are lost or damaged ({'; '.join(self.damaged[:3])}), and are not counted: "
                "the storage changed the log"
            )
        if self.unaccounted:
            some = ", ".join(self.unaccounted[:5])
            raise ConservationError(
                f"{len(self.unaccounted)} groups have a fate but were never appended ({some} …): was the log replaced "
                f"or cut after they were trained on?"
            )
        total = sum(self.counts[one] for one in (Fate.TRAINED, Fate.WAITING, Fate.IN_FLIGHT, Fate.UNFINISHED))
        if total + sum(self.dropped.values()) != self.generated:
            raise ConservationError(f"{self.generated} generated, but the fates add up to {total} + {self.dropped}")
        for trainer, count in self.updates.items():
            if count.contradictions:
                raise ConservationError(
                    f"{trainer} recorded different numbers of updates for one step: "
                    + "; ".join(count.contradictions[:5])
                )
        for trainer, updates in (made or {}).items():
            count = self.updates.get(trainer, UpdateCount())
            if count.known and count.total != updates:
                raise ConservationError(
                    f"the optimizer of {trainer} made {updates} updates, but its groups are recorded for {count.total}"
                )

    def __str__(self) -> str:
        drops = sum(self.dropped.values())
        causes = ", ".join(f"{count} {cause}" for cause, count in self.dropped.items()) or "none"
        return (
            f"{self.generated} generated = {self.counts[Fate.TRAINED]} trained + {self.counts[Fate.WAITING]} waiting + "
            f"{drops} dropped ({causes}) + {self.counts[Fate.IN_FLIGHT]} in flight"
        ) + (f" + {unfinished} unfinished" if (unfinished := self.counts[Fate.UNFINISHED]) else "")

    def false_steps(self, recorded: Mapping[int, tuple[int, float | None]]) -> list[str]:
        """Say where groups and updates of a step differ from the record's; None if it has no updates."""
        found: dict[int, list[int | None]] = {}
        for entry in self.fates.values():
            for step, updates in zip(entry.steps, entry.updates, strict=True):
                found.setdefault(step, []).append(updates)
        return [
            f"step {step}: {groups} groups and {made} updates in events.jsonl, {len(own)} and {own[:1]} in the ledger"
            for step, (groups, made) in sorted(recorded.items())
            if groups != len(own := found.get(step, [])) or (None not in (made, *own) and {made} != {*own})
        ]


def settle(
    stored: Iterable[str],
    events: Iterable[LedgerEvent],
    refused: Iterable[tuple[str, str]] = (),
    *,
    invalid: Mapping[str, str] | None = None,
    repeated: int = 0,
    conflicts: int = 0,
    damaged: tuple[str, ...] = (),
) -> Ledger:
    """Compute the ledger from stored group ids, events in commit order, and refusals as (id, reason).

    >>> events = [LedgerEvent("a", LedgerEventKind.TRAINED, step=1), LedgerEvent("c", LedgerEventKind.STARTED)]
    >>> print(settle(["a", "b"], events, [("d", "reward")]))
    4 generated = 1 trained + 1 waiting + 1 dropped (1 quarantined) + 1 in flight
    """
    valid = without_rewound(events)
    fates: dict[str, GroupFate] = {}
    for event in valid:
        if event.event is LedgerEventKind.STARTED:
            fates[event.group_id] = GroupFate(Fate.IN_FLIGHT)
        elif event.event is LedgerEventKind.UNFINISHED:
            fates[event.group_id] = GroupFate(Fate.UNFINISHED, cause=event.cause)
    fates |= {group_id: GroupFate(Fate.QUARANTINED, cause=reason) for group_id, reason in refused}
    stored_ids = set(stored)
    fates |= dict.fromkeys(stored_ids, GroupFate(Fate.WAITING))
    fates |= {one: GroupFate(Fate.QUARANTINED, cause=why) for one, why in (invalid or {}).items() if one in stored_ids}
    unaccounted: dict[str, None] = {}
    for event in dict.fromkeys(valid):  # an event recorded twice counts once
        if event.event is not LedgerEventKind.TRAINED and event.event not in _DROP_EVENTS:
            continue
        if event.group_id in stored_ids:
            fates[event.group_id] = _apply(event, fates[event.group_id])
        else:
            unaccounted[event.group_id] = None
    return Ledger(fates, repeated, conflicts, tuple(unaccounted), count_updates(valid), damaged)


def count_updates(events: Iterable[LedgerEvent]) -> dict[str, UpdateCount]:
    """Count the updates of each trainer from what it recorded for the groups of each step.

    >>> events = [LedgerEvent(one, LedgerEventKind.TRAINED, step=7, updates=3) for one in ("a", "b")]
    >>> count_updates(events)["trainer"].total
    3
    """
    steps: dict[str, dict[int, set[int | None]]] = {}
    for event in events:
        if event.event is LedgerEventKind.TRAINED:
            assert event.step is not None  # LedgerEvent requires it
            steps.setdefault(event.by, {}).setdefault(event.step, set()).add(event.updates)
    return {
        trainer: UpdateCount(
            sum(max(one or 0 for one in counts) for counts in found.values()),
            all(None not in counts for counts in found.values()),
            tuple(f"step {step}: {sorted(map(str, counts))}" for step, counts in found.items() if len(counts) > 1),
        )
        for trainer, found in steps.items()
    }


def _apply(event: LedgerEvent, before: GroupFate) -> GroupFate:
    """Return the fate after an event. A trained group stays trained; otherwise the last drop counts."""
    if event.event is LedgerEventKind.TRAINED:
        assert event.step is not None  # LedgerEvent requires it
        return GroupFate(
            Fate.TRAINED,
            (*before.steps, event.step),
            drift=(*before.drift, event.drift),
            updates=(*before.updates, event.updates),
        )
    return before if before.fate is Fate.TRAINED else GroupFate(_DROP_EVENTS[event.event], cause=event.cause)


def without_rewound(events: Iterable[LedgerEvent]) -> list[LedgerEvent]:
    """Return the events that no rewind cancels, in order."""
    kept: list[LedgerEvent] = []
    for event in events:
        if event.event is LedgerEventKind.REWOUND:
            back_to = event.step or 0
            kept = [e for e in kept if e.by != event.by or e.step is None or e.step <= back_to]
        else:
            kept.append(event)
    return kept


@dataclass(frozen=True)
class UseCounts:
    """Uses of some groups, by trainer and group.

    >>> print(UseCounts(Counter({("trainer", "a"): 3, ("trainer", "b"): 1})))
    4 uses of 2 groups: 2 first + 2 replayed; at most 3 of one group
    """

    by_use: Counter[tuple[str, str]]

    @property
    def groups(self) -> int:
        return len({group for _, group in self.by_use})

    @property
    def uses(self) -> int:
        return self.by_use.total()

    @property
    def first(self) -> int:
        """Uses of a group that its trainer had not used before."""
        return len(self.by_use)

    @property
    def replayed(self) -> int:
        return self.uses - self.first

    def __str__(self) -> str:
        most = max(self.by_use.values(), default=0)
        counts = f"{self.first} first + {self.replayed} replayed"
        return f"{self.uses} uses of {self.groups} groups: {counts}; at most {most} of one group"


@dataclass(frozen=True)
class LogUses:
    """The uses of a log's groups."""

    all: UseCounts
    trainers: Mapping[str, UseCounts]
    """By the trainer of each run; in a log that runs share, its name has the run's."""
    tasks: Mapping[str, UseCounts]


def count_uses(events: Iterable[LedgerEvent], tasks: Mapping[str, str]) -> LogUses:
    """Count the uses that no rewind cancels; `tasks` has the task of each group.

    >>> events = [LedgerEvent("a", LedgerEventKind.TRAINED, step, by="trainer") for step in (1, 2, 3)]
    >>> events += [LedgerEvent("", LedgerEventKind.REWOUND, 2, by="trainer")]
    >>> print(count_uses(events, {"a": "math"}).tasks["math"])
    2 uses of 1 groups: 1 first + 1 replayed; at most 2 of one group
    """
    total, trainers, by_task = UseCounts(Counter()), dict[str, UseCounts](), dict[str, UseCounts]()
    for event in dict.fromkeys(without_rewound(events)):  # an event recorded twice counts once
        if event.event is LedgerEventKind.TRAINED:
            by_trainer = trainers.setdefault(event.by, UseCounts(Counter()))
            of_task = by_task.setdefault(tasks.get(event.group_id, "unknown"), UseCounts(Counter()))
            for counts in (total, by_trainer, of_task):
                counts.by_use[event.by, event.group_id] += 1
    return LogUses(total, trainers, by_task)


@dataclass(frozen=True)
class LedgerScope:
    """The part of a log that belongs to one run: the groups it owns, and those that its trainer used, from any source.

    >>> scope = LedgerScope("trainer a", lambda group_id: group_id.startswith("g a-"))
    >>> events = [LedgerEvent("imported", LedgerEventKind.TRAINED, step=1, by="trainer a"),
    ...           LedgerEvent("g a-0", LedgerEventKind.TRAINED, step=1, by="trainer b")]
    >>> stored, events, _ = scope.restrict(["imported", "g a-0", "g b-0"], events, [])
    >>> print(settle(stored, events))
    2 generated = 1 trained + 1 waiting + 0 dropped (none) + 0 in flight
    """

    consumer: str
    """The name of the run's trainer. Names of trainers begin with `trainer`, those of workers do not."""
    owns: Callable[[str], bool]
    """True for the id of a group that belongs to the run, used or not."""

    def restrict(
        self, stored: Iterable[str], events: Iterable[LedgerEvent], refused: Iterable[tuple[str, str]]
    ) -> tuple[list[str], list[LedgerEvent], list[tuple[str, str]]]:
        """Return the arguments of `settle`, without what belongs to other runs."""
        events = list(events)
        used = {one.group_id for one in without_rewound(events) if one.by == self.consumer}

        def kept(group_id: str) -> bool:
            return group_id in used or self.owns(group_id)

        return (
            [one for one in stored if kept(one)],
            [e for e in events if e.by == self.consumer or (not e.by.startswith("trainer") and kept(e.group_id))],
            [one for one in refused if kept(one[0])],
        )


@dataclass(frozen=True)
class OwnRun:
    """The run that a log is opened for.

    >>> one = OwnRun("81f30d94", shared=True)
    >>> one.owns("81f30d94", "host-17-3"), one.owns("5a00c2ee", "g 5a00c2ee-3"), one.owns(None, "g 81f30d94-3")
    (True, False, True)
    >>> one.is_guest("host-17-3"), one.is_guest("g 81f30d94-3")
    (True, False)
    """

    id: str
    shared: bool = False
    """True if other runs write to the log too."""
    past: tuple[tuple[str, int], ...] = ()
    """The runs that this one was copied from. What they did up to the given step is its own."""

    @property
    def prefix(self) -> str:
        """How ids of groups begin that the run itself has admitted. A number follows, after a hyphen.

        In a log of its own, a repeated run names its groups alike, because random draws depend on group ids. In a
        shared log, the run's id keeps its groups apart from those of other runs.
        """
        return f"g {self.id}" if self.shared else "g"

    @property
    def trainer(self) -> str:
        """The name of the run's trainer in the ledger, after which a rewind finds the events to cancel."""
        return f"trainer {self.id}" if self.shared else "trainer"

    @cached_property
    def _admitted(self) -> re.Pattern[str]:
        prefixes = [f"g {run}" for run in (self.id, *dict(self.past))] if self.shared else [self.prefix]
        return re.compile(rf"^(?:{'|'.join(map(re.escape, prefixes))})-[0-9]+$")

    def adopt(self, events: Iterable[LedgerEvent]) -> list[LedgerEvent]:
        """Return the events of a log that no rewind cancels, those of the past as this run's own."""
        past = {f"trainer {run}": step for run, step in self.past if self.shared}
        return [
            replace(one, by=self.trainer) if one.step is not None and one.step <= past.get(one.by, -1) else one
            for one in without_rewound(events)
        ]

    def owns(self, run: str | None, group_id: str, version: int | None = None) -> bool:
        """True if the versions of a group are of this run. Earlier releases recorded no run."""
        if run is not None:
            return run == self.id or any(
                run == one and (not self.shared or (version or 0) <= step) for one, step in self.past
            )
        return not self.shared or not self.is_guest(group_id)

    @property
    def scope(self) -> LedgerScope:
        """The part of a shared log that is this run's."""
        return LedgerScope(self.trainer, lambda group_id: group_id.startswith(f"{self.prefix}-"))

    def is_guest(self, group_id: str) -> bool:
        """True for a group that the run did not admit: a worker outside of it made it, at its own pace."""
        return self._admitted.match(group_id) is None

    def masks(self, rows: "pa.Table") -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return which rows of the table `groups` are of this run, and which of those are guests."""
        import pyarrow.compute as pc  # here, because commands that need no log read the names of runs

        admitted = pc.match_substring_regex(rows["group_id"], self._admitted.pattern).to_numpy()
        own = pc.fill_null(pc.equal(rows["run"], self.id), False).to_numpy()
        for run, step in self.past:
            in_time = pc.less_equal(rows["oldest_version"], step if self.shared else 2**31 - 1)
            own = own | pc.fill_null(pc.and_(pc.equal(rows["run"], run), in_time), False).to_numpy()
        own |= rows["run"].is_null().to_numpy() & (admitted | (not self.shared))
        return own, own & ~admitted

    def view(self, group: Group) -> Group:
        """Return the group as this run sees it: without versions if they are another run's."""
        spans = next((one.versions for one in group.completions if one.versions), ())
        if not spans or self.owns(spans[0].run, group.id, group.oldest_version):
            return group
        return replace(group, completions=tuple(replace(one, versions=()) for one in group.completions))
