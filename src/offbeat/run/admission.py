"""How many prompts are admitted: the run limits itself before it spends tokens. Pure functions of plain numbers.

`fresh` new groups go into each batch. A group that is admitted now is trained after all groups ahead of it, at step
k + ahead // fresh. Its lag is that step minus the version that generates it. So concurrent mode admits a group only if

    k + ahead // fresh − version ≤ max_lag

and the trainer delays a step that would make a group expire while it is still being generated. Then no group expires:
the bound holds, no token is wasted, and slow prompts are not dropped more often than fast ones. (Batches take the
oldest version first, which is the order of deadlines. If any order trains all groups in time, this one does.)
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Progress:
    """The numbers that admission decides from."""

    k: int
    """Steps done when the next batch is drawn."""
    published: int
    """The newest version."""
    waiting: int
    """Groups of this run that are in the log but in no batch yet."""
    in_flight: int
    """Groups being generated, or finished since the loop last read the log."""
    missing: int
    """Groups that the current batch still lacks beyond those waiting; 0 while no batch is being drawn."""


class Admission(Protocol):
    """The rule that makes a run lockstep, concurrent or offline."""

    def room(self, now: Progress, version: int) -> int:
        """Return how many groups a worker that serves `version` may start."""

    def can_train_in_time(self, k: int, versions: Mapping[int, int]) -> bool:
        """True if so many groups of each version, some in flight, can all be trained from step k on before they expire.

        The loop asks before each step that would leave groups in flight.
        """


@dataclass(frozen=True)
class LockstepAdmission:
    """Admit exactly what the batch lacks, to workers of the newest version.

    >>> LockstepAdmission().room(Progress(k=12, published=10, waiting=0, in_flight=5, missing=8), version=10)
    3
    """

    def room(self, now: Progress, version: int) -> int:
        return max(0, now.missing - now.in_flight) if version == now.published else 0

    def can_train_in_time(self, k: int, versions: Mapping[int, int]) -> bool:
        """Always False: a step waits for every group in flight, even if other groups already fill the batch."""
        return False


@dataclass(frozen=True)
class ConcurrentAdmission:
    """Admit as far ahead as `max_lag` allows.

    >>> rule = ConcurrentAdmission(max_lag=2, fresh=4)
    >>> rule.room(Progress(k=10, published=10, waiting=2, in_flight=3, missing=0), version=10)
    7
    >>> rule.room(Progress(k=13, published=10, waiting=0, in_flight=0, missing=4), version=10)   # too stale
    0
    """

    max_lag: int
    fresh: int
    """New groups in a batch."""

    def room(self, now: Progress, version: int) -> int:
        """See `Admission`. What the current batch lacks is always admitted, because it is trained at once."""
        lag = now.k - version
        if lag > self.max_lag:
            return 0
        ahead = (self.max_lag - lag + 1) * self.fresh - now.waiting - now.in_flight
        return max(0, ahead, now.missing - now.in_flight)

    def can_train_in_time(self, k: int, versions: Mapping[int, int]) -> bool:
        """See `Admission`.

        >>> ConcurrentAdmission(max_lag=2, fresh=1).can_train_in_time(k=10, versions={8: 2})   # the second: lag 3
        False
        """
        ahead = itertools.accumulate(versions[version] for version in sorted(versions))
        last_step = (k + (count - 1) // self.fresh for count in ahead)
        return all(step - version <= self.max_lag for step, version in zip(last_step, sorted(versions), strict=True))


@dataclass(frozen=True)
class OfflineAdmission:
    """Admit nothing: an offline run trains on what the experience log holds."""

    def room(self, now: Progress, version: int) -> int:
        return 0

    def can_train_in_time(self, k: int, versions: Mapping[int, int]) -> bool:
        return True
