"""How many prompts may be begun: pacing before tokens are spent. Pure functions of plain numbers.

A group that is begun now is trained after all that are ahead of it, at step k + ahead // fresh, where `fresh` new
groups go into a batch. Its lag will be that step minus the version it is written with. So concurrent mode begins a
group only if

    k + ahead // fresh − version ≤ max_lag

and the trainer waits where going on would make one expire that is still being written. Then none expires: the bound
holds, no token is wasted, and slow prompts are not the ones that are dropped. (Batches take the oldest version first,
so the order is that of deadlines, and a set of groups that can be trained in time in some order can be in this one.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Progress:
    """Where a run stands, as far as admission is concerned."""

    k: int
    """Steps done when the next batch is drawn."""
    published: int
    """The newest version."""
    waiting: int
    """Groups of ours that are in the log and in no batch yet."""
    writing: int
    """Groups that are being written, or have been since the loop last looked at the log."""
    missing: int
    """Groups that the batch being made up still needs beyond those waiting; 0 while none is."""


class Admission(Protocol):
    """Lockstep, concurrent or offline: the one thing that tells them apart."""

    def room(self, now: Progress, version: int) -> int:
        """Groups that a worker which serves `version` may begin."""

    def in_time(self, k: int, versions: Sequence[int]) -> bool:
        """Whether groups of these versions, some being written, can all be trained from step k on in time."""


@dataclass(frozen=True)
class LockstepAdmission:
    """Exactly what the batch needs, by the newest version.

    >>> LockstepAdmission().room(Progress(k=12, published=10, waiting=0, writing=5, missing=8), version=10)
    3
    """

    def room(self, now: Progress, version: int) -> int:
        """See `Admission`."""
        return max(0, now.missing - now.writing) if version == now.published else 0

    def in_time(self, k: int, versions: Sequence[int]) -> bool:
        """See `Admission`: what is being written is waited for, also where others have filled the batch meanwhile."""
        return False


@dataclass(frozen=True)
class ConcurrentAdmission:
    """As far ahead as `max_lag` allows.

    >>> rule = ConcurrentAdmission(max_lag=2, fresh=4)
    >>> rule.room(Progress(k=10, published=10, waiting=2, writing=3, missing=0), version=10)
    7
    >>> rule.room(Progress(k=13, published=10, waiting=0, writing=0, missing=4), version=10)   # too stale to begin any
    0
    """

    max_lag: int
    fresh: int
    """New groups in a batch."""

    def room(self, now: Progress, version: int) -> int:
        """See `Admission`. What the batch being made up lacks is begun in any case: it is trained at once."""
        lag = now.k - version
        if lag > self.max_lag:
            return 0
        ahead = (self.max_lag - lag + 1) * self.fresh - now.waiting - now.writing
        return max(0, ahead, now.missing - now.writing)

    def in_time(self, k: int, versions: Sequence[int]) -> bool:
        """See `Admission`.

        >>> ConcurrentAdmission(max_lag=2, fresh=1).in_time(k=10, versions=[8, 8])   # the second: lag 3
        False
        """
        return all(k + place // self.fresh - v <= self.max_lag for place, v in enumerate(sorted(versions)))


@dataclass(frozen=True)
class OfflineAdmission:
    """Nothing: the experience log is all there is."""

    def room(self, now: Progress, version: int) -> int:
        """See `Admission`."""
        return 0

    def in_time(self, k: int, versions: Sequence[int]) -> bool:
        """See `Admission`."""
        return True
