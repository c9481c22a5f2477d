"""Groups that were never drawn, in the order in which they are drawn.

    admitted by the run, the oldest version first      they would expire first, and admission has counted on them
    guests, the oldest version first                   workers outside the run made them at their own pace
    without a version of this run                      they never expire

Within a version the order is that of the log.
"""

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from offbeat.experience.pools import UNVERSIONED, Ordinals, by_version


@dataclass
class _Bucket:
    """The groups of one version."""

    heap: list[int] = field(default_factory=list)
    """Ordinals; those that are no longer members are skipped."""
    members: set[int] = field(default_factory=set)
    largest: int = -1

    def add(self, ordinals: list[int]) -> None:
        """Add ordinals in ascending order."""
        if ordinals and ordinals[0] > self.largest:
            self.heap += ordinals  # after all others: still a heap
        else:
            for ordinal in ordinals:
                heappush(self.heap, ordinal)
        self.largest = max(self.largest, *ordinals)
        self.members.update(ordinals)

    def take(self, count: int) -> list[int]:
        """Take out the first `count` members."""
        found: list[int] = []
        while self.heap and len(found) < count:
            if (ordinal := heappop(self.heap)) in self.members:
                self.members.remove(ordinal)
                found.append(ordinal)
        return found


class _VersionQueue:
    """Groups by version."""

    def __init__(self) -> None:
        self._buckets: dict[int, _Bucket] = {}
        self._versions: list[int] = []
        self._size = 0

    def add(self, versions: NDArray[np.integer], ordinals: Ordinals) -> None:
        for version, some in by_version(versions, ordinals):
            if version not in self._buckets:
                self._buckets[version] = _Bucket()
                insort(self._versions, version)
            self._buckets[version].add(some)
        self._size += len(ordinals)

    def remove(self, versions: NDArray[np.integer], ordinals: Ordinals) -> None:
        for version, some in by_version(versions, ordinals):
            self._buckets[version].members.difference_update(some)
        self._size -= len(ordinals)

    def count(self, k: int) -> int:
        later = self._versions[bisect_right(self._versions, k) :]
        return self._size - sum(self.count_of(version) for version in later if version != UNVERSIONED)

    def counts(self, first: int, last: int) -> dict[int, int]:
        some = self._versions[bisect_left(self._versions, first) : bisect_right(self._versions, last)]
        return {version: count for version in some if (count := self.count_of(version))}

    def count_of(self, version: int) -> int:
        return len(self._buckets[version].members) if version in self._buckets else 0

    def take(self, count: int, first: int, last: int) -> list[int]:
        """Take out up to `count` groups of versions from `first` to `last`, the oldest first."""
        found: list[int] = []
        at = bisect_left(self._versions, first)
        while len(found) < count and at < len(self._versions) and self._versions[at] <= last:
            version = self._versions[at]
            found += self._buckets[version].take(count - len(found))
            if self._buckets[version].members:
                break
            del self._buckets[version], self._versions[at]
        self._size -= len(found)
        return found


class NewGroups:
    """Groups that were never drawn.

    >>> new = NewGroups()
    >>> new.add(np.array([5, -1, 4]), np.array([0, 1, 2]))
    >>> new.count(k=4), new.counts(0, 9), new.take(2, k=9)
    (2, {4: 1, 5: 1}, [2, 0])
    >>> new.add(np.array([3, 6]), np.array([3, 4]), guests=np.array([True, False]))
    >>> new.take(3, k=9)
    [4, 3, 1]
    """

    def __init__(self) -> None:
        self._admitted, self._guests = _VersionQueue(), _VersionQueue()

    def add(self, versions: NDArray[np.integer], ordinals: Ordinals, guests: NDArray[np.bool_] | None = None) -> None:
        """Add groups of these versions; `guests` marks those that the run did not admit."""
        guests = np.zeros(len(ordinals), np.bool_) if guests is None else guests
        self._admitted.add(versions[~guests], ordinals[~guests])
        self._guests.add(versions[guests], ordinals[guests])

    def remove(
        self, versions: NDArray[np.integer], ordinals: Ordinals, guests: NDArray[np.bool_] | None = None
    ) -> None:
        """Remove groups, given as they were added."""
        guests = np.zeros(len(ordinals), np.bool_) if guests is None else guests
        self._admitted.remove(versions[~guests], ordinals[~guests])
        self._guests.remove(versions[guests], ordinals[guests])

    def count(self, k: int) -> int:
        """Return how many groups have a version up to k, or none."""
        return self._admitted.count(k) + self._guests.count(k)

    @property
    def unversioned(self) -> int:
        """How many groups have no version."""
        return self._admitted.count_of(UNVERSIONED) + self._guests.count_of(UNVERSIONED)

    def counts(self, first: int, last: int) -> dict[int, int]:
        """Return how many admitted groups there are of each version from `first` to `last`, the oldest first."""
        return self._admitted.counts(first, last)

    def count_guests(self, first: int, last: int) -> int:
        """Return how many guests have a version from `first` to `last`."""
        return sum(self._guests.counts(first, last).values())

    def take(self, count: int, k: int) -> list[int]:
        """Take out up to `count` groups of versions up to k, and of no version."""
        found = self._admitted.take(count, 0, k)
        found += self._guests.take(count - len(found), 0, k)
        for queue in (self._admitted, self._guests):
            found += queue.take(count - len(found), UNVERSIONED, UNVERSIONED)
        return found
