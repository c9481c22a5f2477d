"""Where each group is as the next draw sees it, kept up to date as groups arrive, are scored, drawn, rested and closed.

Every change costs as much as the groups that it concerns, so a draw does not depend on the length of the log.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from offbeat.experience.index import CLOSED, NEVER, DrawCounts, Index, extended
from offbeat.experience.limits import Cause, SamplerLimits
from offbeat.experience.new_groups import NewGroups
from offbeat.experience.pools import Ordinals, VersionLists, WeightedGroups

if TYPE_CHECKING:
    from offbeat.experience.modes import Mode


class Place(IntEnum):
    """Where a group is."""

    NOWHERE = 0
    """Closed, or of a task or source that is not drawn."""
    UNRIPE = 1
    """Waits for a score."""
    UNDRAWABLE = 2
    """Too small, or without variance. The next draw drops it."""
    NEW = 3
    """Waits for its first draw, in the order of versions."""
    PAST = 4
    """Can be drawn by weight, or in an epoch."""
    COOLING = 5
    """A past group that a cooldown holds back."""


class GroupPlaces:
    """The place of each group, and the pools of those that can be drawn."""

    def __init__(self, mode: "Mode", limits: SamplerLimits, index: Index, counts: DrawCounts) -> None:
        self._mode, self._limits, self._index, self._counts = mode, limits, index, counts
        self._of = np.zeros(0, np.int8)
        self._arrived = 0
        self._sizes = np.zeros(len(Place), np.int64)
        self.new = NewGroups()
        self.past = WeightedGroups(mode.priority) if mode.priority is not None else None
        self._undrawable: list[int] = []
        self._cooling, self._expiring, self._aging = VersionLists(), VersionLists(), VersionLists()

    def count(self, place: Place) -> int:
        """Return how many groups are there."""
        return int(self._sizes[place])

    def of(self, ordinals: Ordinals) -> NDArray[np.int8]:
        """Return the place of each of these groups."""
        return self._of[ordinals]

    @property
    def nbytes(self) -> int:
        """Bytes held, without the lists of new groups."""
        return self._of.nbytes + (self.past.nbytes if self.past is not None else 0)

    def feed(self, ordinals: Ordinals, k: int) -> None:
        """Take in groups that arrived or got feedback before the draw at k."""
        self._of = extended(self._of, len(self._index))
        cooling = self._of[ordinals] == Place.COOLING
        arrivals = ordinals >= self._arrived
        if arrivals.any():
            last = self._counts.last[ordinals]
            cooling |= arrivals & (last != NEVER) & (last >= k - self._mode.cooldown)
            self._arrive(ordinals[arrivals])
        self._put(ordinals, cooling)

    def _arrive(self, ordinals: Ordinals) -> None:
        self._arrived = len(self._index)
        uses, versions = self._counts.uses[ordinals], self._index.columns.oldest_version[ordinals]
        if self._limits.max_lag is not None:
            waits = (uses == 0) & self._selected(ordinals)
            self._expiring.add(versions[waits], ordinals[waits])
        self._age(ordinals[uses > 0])

    def _age(self, ordinals: Ordinals) -> None:
        if self._limits.retire_age is not None:
            self._aging.add(self._index.columns.oldest_version[ordinals], ordinals)

    def drawn(self, ordinals: Ordinals, first: NDArray[np.bool_]) -> None:
        """Note that these groups were taken out and their draw is counted; for some it was the first."""
        self._move(ordinals, np.full(len(ordinals), Place.NOWHERE, np.int8))
        self._put(ordinals, np.ones(len(ordinals), np.bool_))
        self._age(ordinals[first])

    def closed(self, ordinals: Ordinals) -> None:
        """Note that these groups are closed."""
        self._put(ordinals, np.zeros(len(ordinals), np.bool_))

    def rest(self, k: int) -> None:
        """Let groups be drawn again whose cooldown has passed at k."""
        rested = np.array(self._cooling.pop_before(k - self._mode.cooldown), np.int64)
        rested = rested[self._of[rested] == Place.COOLING]
        self._put(rested, np.zeros(len(rested), np.bool_))

    def too_old(self, k: int) -> list[int]:
        """Take out the drawn groups that are older at k than `retire_age` allows; some may be closed."""
        age = self._limits.retire_age
        return [] if age is None else self._aging.pop_before(k - age)

    def undrawable(self, k: int) -> dict[int, Cause]:
        """Take out the groups that can never be drawn from k on, with the cause. The first cause counts."""
        found: dict[int, Cause] = {}
        if self._limits.max_lag is not None:
            late = np.array(self._expiring.pop_before(k - self._limits.max_lag), np.int64)
            found |= dict.fromkeys(late[self._counts.uses[late] == 0].tolist(), "expired")
        for ordinal in self._undrawable:
            if self._of[ordinal] == Place.UNDRAWABLE:
                small = self._index.columns.scored[ordinal] < 2
                found.setdefault(ordinal, "too-small" if small else "zero-variance")
        self._undrawable = []
        return found

    def waiting(self, k: int) -> dict[int, int]:
        """Return how many admitted new groups of each version could be drawn at k, the oldest first."""
        oldest = 0 if self._limits.max_lag is None else k - self._limits.max_lag
        return self.new.counts(oldest, k)

    def waiting_count(self, k: int) -> int:
        """Return how many new groups with a version could be drawn at k, guests included."""
        if self._limits.max_lag is None:
            return self.new.count(k) - self.new.unversioned
        oldest = k - self._limits.max_lag
        return sum(self.new.counts(oldest, k).values()) + self.new.count_guests(oldest, k)

    def _put(self, ordinals: Ordinals, cooling: NDArray[np.bool_]) -> None:
        """Move groups to where they belong by what is known of them; past groups that are `cooling` wait."""
        if not len(ordinals):
            return
        limits, rows = self._limits, self._index.columns
        uses, versions = self._counts.uses[ordinals], rows.oldest_version[ordinals]
        no_variance = limits.drop_zero_variance & (rows.reward_std[ordinals] <= limits.variance_tolerance)
        conditions = {
            Place.NOWHERE: (uses == CLOSED) | ~self._selected(ordinals),
            Place.UNRIPE: ~rows.ripe[ordinals],
            Place.UNDRAWABLE: (rows.scored[ordinals] < 2) | no_variance,
            Place.NEW: self._mode.is_new(uses, versions),
            Place.COOLING: cooling,
        }
        after = np.select(list(conditions.values()), [np.int8(place) for place in conditions], np.int8(Place.PAST))
        before = self._move(ordinals, after)
        left, came = ((before == Place.NEW) & (after != before)), ((after == Place.NEW) & (after != before))
        guest = rows.guest[ordinals]
        self.new.remove(versions[left], ordinals[left], guest[left])
        self.new.add(versions[came], ordinals[came], guest[came])
        if self.past is not None:
            left, there = (before == Place.PAST) & (after != before), after == Place.PAST
            self.past.remove(ordinals[left], versions[left])
            at = ordinals[there]
            self.past.set(at, versions[there], uses[there], rows.reward_mean[at], rows.reward_std[at])
        self._undrawable += ordinals[(after == Place.UNDRAWABLE) & (after != before)].tolist()
        came = (after == Place.COOLING) & (after != before)
        self._cooling.add(self._counts.last[ordinals[came]], ordinals[came])

    def _move(self, ordinals: Ordinals, after: NDArray[np.int8]) -> NDArray[np.int8]:
        """Note the new places of groups, and return where they were."""
        before = self._of[ordinals]
        self._of[ordinals] = after
        self._sizes += np.bincount(after, minlength=len(Place)) - np.bincount(before, minlength=len(Place))
        return before

    def _selected(self, ordinals: Ordinals) -> NDArray[np.bool_]:
        """Return which of the groups have a task and a source to draw from."""
        limits, rows = self._limits, self._index.columns
        selected = np.ones(len(ordinals), np.bool_)
        if limits.tasks is not None:
            selected &= np.isin(rows.task[ordinals], sorted(limits.tasks))
        if limits.sources is not None:
            selected &= (rows.sources[ordinals] & np.uint32(limits.sources)) != 0
        return selected


@dataclass(frozen=True, eq=False)
class Candidates:
    """What a mode chooses from."""

    k: int
    """The step count of the policy that the batch is for."""
    batch: int
    seed: int
    end: int
    """The ordinal that the next group in the log will get."""
    last_chances: int
    """New groups at the largest allowed lag: they expire unless they are drawn now."""
    places: GroupPlaces
