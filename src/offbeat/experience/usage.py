"""How often groups were trained on: for the first time, and again."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from offbeat.experience.ledger import LedgerEvent, LedgerEventKind, without_rewound


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
