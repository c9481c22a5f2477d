"""Past groups, and lists by version, in structures that change with the log: a draw costs the same however long it is.

WeightedGroups   drawn before, by weight: a tree of sums
VersionLists     what is due once the run has passed a version
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray

from offbeat.experience.index import NO_VERSION, extended
from offbeat.experience.priority import Priority, uniforms

Ordinals = NDArray[np.int64]

UNVERSIONED: Final = 1 << 40
"""The place of groups without a version among versions: they never expire and come last."""
CHILDREN: Final = 128
"""Of a node in a tree of sums."""
EXPONENT_LIMIT: Final = 300.0
"""exp of this is far from an overflow, also if a million weights are added."""


class VersionLists:
    """Ordinals by version, taken out when their version has passed.

    >>> due = VersionLists()
    >>> due.add(np.array([3, 4, 3]), np.array([0, 1, 2]))
    >>> due.pop_before(4), due.pop_before(4)
    ([0, 2], [])
    """

    def __init__(self) -> None:
        self._ordinals: dict[int, list[int]] = {}
        self._versions: list[int] = []  # a heap

    def add(self, versions: NDArray[np.integer], ordinals: Ordinals) -> None:
        """Add groups of these versions; those without a version are left out."""
        for version, some in by_version(versions, ordinals):
            if version == UNVERSIONED:
                continue
            if version not in self._ordinals:
                self._ordinals[version] = []
                heappush(self._versions, version)
            self._ordinals[version] += some

    def pop_before(self, version: int) -> list[int]:
        """Take out the groups of all earlier versions."""
        found: list[int] = []
        while self._versions and self._versions[0] < version:
            found += self._ordinals.pop(heappop(self._versions))
        return found


class WeightTree:
    """A weight for each ordinal, and their sums in a tree: setting and finding take O(log n).

    Each node has many children, because numpy adds a hundred numbers as fast as two.

    >>> tree = WeightTree()
    >>> tree.set(np.array([0, 500]), np.array([1.0, 3.0]))
    >>> tree.total, tree.find(np.array([0.2, 0.3])).tolist()
    (4.0, [0, 500])
    """

    def __init__(self) -> None:
        # Each level has a row of children for each node above. The first level has one row, the last has the weights.
        self._levels = [np.zeros((1, CHILDREN))]

    @property
    def total(self) -> float:
        """The sum of all weights."""
        return float(self._levels[0].sum())

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(level.nbytes for level in self._levels)

    def set(self, ordinals: Ordinals, weights: NDArray[np.float64]) -> None:
        """Set the weights of these groups; each may appear once."""
        if not len(ordinals):
            return
        self._grow(int(ordinals.max()) + 1)
        self._levels[-1].reshape(-1)[ordinals] = weights
        for above, level in zip(self._levels[-2::-1], self._levels[:0:-1], strict=True):
            ordinals = np.unique(ordinals // CHILDREN)
            above.reshape(-1)[ordinals] = level[ordinals].sum(axis=1)

    def find(self, numbers: NDArray[np.float64]) -> Ordinals:
        """Return the group at each number from [0, 1): each is found with probability weight ÷ total."""
        nodes, rest = np.zeros(len(numbers), np.int64), numbers * self.total
        at = np.arange(len(numbers))
        for level in self._levels:
            up_to = level[nodes].cumsum(axis=1)
            rest = np.minimum(rest, np.nextafter(up_to[:, -1], 0.0))  # rounding leads to no child beyond the last
            child = (up_to > rest[:, None]).argmax(axis=1)
            rest = rest - np.where(child > 0, up_to[at, child - 1], 0.0)
            nodes = nodes * CHILDREN + child
        return nodes

    def _grow(self, length: int) -> None:
        if length <= self._levels[-1].size:
            return
        rows = -(-max(length, self._levels[-1].size * 3 // 2) // CHILDREN)
        levels = [np.zeros((rows, CHILDREN))]
        levels[0].reshape(-1)[: self._levels[-1].size] = self._levels[-1].reshape(-1)
        while len(levels[0]) > 1:
            sums = levels[0].sum(axis=1)
            above = np.zeros((-(-len(sums) // CHILDREN), CHILDREN))
            above.reshape(-1)[: len(sums)] = sums
            levels.insert(0, above)
        self._levels = levels


class LogWeights:
    """A `WeightTree` of logarithms: weights of any size, of which the largest count.

    >>> weights = LogWeights()
    >>> weights.set(np.array([0, 1]), np.array([5000.0, 5001.0]))
    >>> round(weights.log_total - 5000.0, 3)                        # log(1 + e)
    1.313
    """

    def __init__(self) -> None:
        self._logs = np.full(0, -np.inf)
        self._tree = WeightTree()
        self._members = 0
        self.base = 0.0
        """The tree holds exp(log − base). Changes only if weights would overflow, or have all underflowed."""

    def set(self, ordinals: Ordinals, logs: NDArray[np.float64]) -> None:
        """Set the logarithms of the weights of these groups; −∞ removes a group."""
        if not len(ordinals):
            return
        self._logs = extended(self._logs, int(ordinals.max()) + 1, -np.inf)
        self._members += int((logs > -np.inf).sum() - (self._logs[ordinals] > -np.inf).sum())
        self._logs[ordinals] = logs
        self._tree.set(ordinals, np.exp(np.minimum(logs - self.base, EXPONENT_LIMIT)))
        if logs.max() - self.base > EXPONENT_LIMIT:
            self._rebase()

    @property
    def log_total(self) -> float:
        """The logarithm of the sum of all weights; −∞ if there are none."""
        if not self._members:
            return -np.inf
        if self._tree.total == 0.0:
            self._rebase()
        return self.base + float(np.log(self._tree.total))

    def find(self, numbers: NDArray[np.float64]) -> Ordinals:
        """See `WeightTree`."""
        return self._tree.find(numbers)

    def _rebase(self) -> None:
        self.base = float(self._logs.max())
        self._tree.set(np.arange(len(self._logs)), np.exp(self._logs - self.base))

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._logs.nbytes + self._tree.nbytes


class WeightedGroups:
    """Groups that are drawn by `Priority`, without replacement.

    One step more of lag multiplies the weight of every group with a version by the same factor. So nothing changes in
    their tree, which leaves out that factor; a draw only compares the trees of groups with and without a version.
    """

    def __init__(self, priority: Priority) -> None:
        self._priority = priority
        self._versioned, self._unversioned = LogWeights(), LogWeights()

    def set(self, ordinals: Ordinals, versions: NDArray[np.integer], uses: NDArray[np.integer],
            reward_mean: NDArray[np.floating], reward_std: NDArray[np.floating]) -> None:  # fmt: skip
        """Add groups, or change their weights."""
        logs = self._priority.log_weights(np.zeros(len(ordinals), np.int64), uses, reward_mean, reward_std)
        unversioned = versions == NO_VERSION
        self._unversioned.set(ordinals[unversioned], logs[unversioned])
        self._versioned.set(ordinals[~unversioned], (logs + self._priority.recency * versions)[~unversioned])

    def remove(self, ordinals: Ordinals, versions: NDArray[np.integer]) -> None:
        """Remove groups of these versions."""
        for weights, which in ((self._unversioned, versions == NO_VERSION), (self._versioned, versions != NO_VERSION)):
            weights.set(ordinals[which], np.full(int(which.sum()), -np.inf))

    def take(self, count: int, k: int, key: int) -> list[int]:
        """Take out `count` groups, one after another, each with probability proportional to its weight.

        Numbers that meet a group again are skipped, which is the same as drawing from the others.
        """
        found: dict[int, None] = {}
        numbers = 0
        while len(found) < count:
            missing = count - len(found)
            which, where = uniforms(key, np.arange(numbers, numbers + 2 * missing)).reshape(2, missing)
            numbers += 2 * missing
            fallen = self._versioned.log_total - self._priority.recency * k
            versioned = which < 1.0 / (1.0 + np.exp(np.clip(self._unversioned.log_total - fallen, -700.0, 700.0)))
            chosen = np.empty(missing, np.int64)
            chosen[versioned] = self._versioned.find(where[versioned])
            chosen[~versioned] = self._unversioned.find(where[~versioned])
            found |= dict.fromkeys(chosen.tolist())
            for weights, some in ((self._versioned, chosen[versioned]), (self._unversioned, chosen[~versioned])):
                taken = np.unique(some)
                weights.set(taken, np.full(len(taken), -np.inf))
        return list(found)

    @property
    def bases(self) -> tuple[float, float]:
        """The logarithms that the trees leave out. Saved with a sampler: the last bits of sums depend on them."""
        return self._versioned.base, self._unversioned.base

    @bases.setter
    def bases(self, value: tuple[float, float]) -> None:
        self._versioned.base, self._unversioned.base = value

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return self._versioned.nbytes + self._unversioned.nbytes


def by_version(versions: NDArray[np.integer], ordinals: Ordinals) -> Iterator[tuple[int, list[int]]]:
    """Yield each version with its ordinals in ascending order."""
    keys = np.where(versions == NO_VERSION, UNVERSIONED, versions.astype(np.int64))
    order = np.lexsort((ordinals, keys))
    edges = np.flatnonzero(np.diff(keys[order])) + 1
    for some in np.split(order, edges) if len(order) else ():
        yield int(keys[some[0]]), ordinals[some].tolist()
