"""Three ways to choose a batch: `Fresh`, `Replay`, `Offline`.

A mode holds only its settings. What it chooses is a function of the candidates and its position in the epoch.
"""

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from offbeat.experience.index import NO_VERSION
from offbeat.experience.places import Candidates, Place
from offbeat.experience.pools import Ordinals
from offbeat.experience.priority import Priority, uniforms
from offbeat.seeds import derive


def shuffled(key: int, count: int) -> NDArray[np.int64]:
    """Return the ordinals 0 … count − 1 in the order of their random numbers."""
    return np.argsort(uniforms(key, np.arange(count)), kind="stable")


@dataclass(frozen=True, eq=False)
class EpochPosition:
    """A position in an epoch. The order follows from seed, epoch and population, so a checkpoint does not store it."""

    epoch: int = -1
    population: int = 0
    """The number of groups in the epoch."""
    position: int = 0
    deferred: tuple[int, ...] = ()
    """Groups skipped because of a cooldown. They are drawn as soon as it has passed."""
    order: Ordinals = field(default_factory=lambda: np.zeros(0, np.int64))

    def with_order(self, seed: int) -> "EpochPosition":
        """Return the same position with its order computed."""
        return replace(self, order=shuffled(derive(seed, "sampler", "epoch", self.epoch), self.population))

    def next_epoch(self, seed: int, population: int) -> "EpochPosition":
        """Return the start of the next epoch, over all groups that exist by now."""
        return EpochPosition(self.epoch + 1, population, 0, self.deferred).with_order(seed)


@dataclass(frozen=True, eq=False)
class Chosen:
    """The ordinals that a mode chose: a batch, or fewer if there are not enough candidates."""

    fresh: list[int]
    past: list[int]
    position: EpochPosition
    """Where the next choice starts if this one is used."""


class Mode(Protocol):
    """A rule for choosing batches."""

    @property
    def reuse_budget(self) -> int | None:
        """How often a group may be drawn in total; None means without limit."""

    @property
    def cooldown(self) -> int:
        """Steps that must pass between two draws of a group: 0 allows the next step, 1 the one after."""

    @property
    def own_versions(self) -> bool:
        """True if the versions in the log are those of this run. An offline run has none: they are of other runs."""

    @property
    def priority(self) -> Priority | None:
        """The weights of past groups, if they are drawn by weight."""

    def is_new(self, uses: NDArray[np.integer], versions: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Return which groups wait for their first draw in the order of versions. All others are past groups."""

    def available(self, candidates: Candidates) -> int:
        """Return how many groups `choose` would return."""

    def choose(self, candidates: Candidates, position: EpochPosition) -> Chosen:
        """Take up to one batch out of the candidates."""


@dataclass(frozen=True)
class Fresh:
    """Draw each group once, the oldest version first, because those groups would expire first.

    Groups without a policy version fill the rest of a batch. `Replay` gives them their own share.
    """

    reuse_budget: int = field(default=1, init=False)
    cooldown: int = field(default=0, init=False)
    own_versions: bool = field(default=True, init=False)
    priority: None = field(default=None, init=False)

    def is_new(self, uses: NDArray[np.integer], versions: NDArray[np.integer]) -> NDArray[np.bool_]:
        return np.asarray(uses == 0)

    def available(self, candidates: Candidates) -> int:
        return min(candidates.batch, candidates.places.new.count(candidates.k))

    def choose(self, candidates: Candidates, position: EpochPosition) -> Chosen:
        """Choose groups that were never drawn."""
        return Chosen(candidates.places.new.take(candidates.batch, candidates.k), [], position)


@dataclass(frozen=True)
class Replay:
    """Draw a share of each batch from past groups by priority; the rest are fresh groups, as in `Fresh`.

    Past groups are those drawn before and those without a policy version, so imported groups do not delay rollouts. If
    there are too few past groups, fresh groups take their places. Fresh groups that would otherwise expire always come
    first, because past groups can wait.
    """

    share: float = 0.5
    """Fraction of the batch that comes from past groups."""
    reuse_budget: int = 4
    """How often a group may be drawn in total, including the first time."""
    cooldown: int = 0
    """Steps that must pass between two draws of a group: 0 allows the next step, 1 the one after."""
    priority: Priority = field(default_factory=Priority)
    own_versions: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share = {self.share} must be above 0 and at most 1; mode 'fresh' draws no past groups")
        if self.reuse_budget < 2:
            raise ValueError(
                f"reuse_budget = {self.reuse_budget} must be at least 2; mode 'fresh' draws each group once"
            )
        _check_cooldown(self.cooldown)

    def is_new(self, uses: NDArray[np.integer], versions: NDArray[np.integer]) -> NDArray[np.bool_]:
        return np.asarray((uses == 0) & (versions != NO_VERSION))

    def available(self, candidates: Candidates) -> int:
        past = self._past(candidates)
        return past + min(candidates.batch - past, candidates.places.new.count(candidates.k))

    def choose(self, candidates: Candidates, position: EpochPosition) -> Chosen:
        """Choose past groups by weight and without repetition, then fresh ones to fill the batch."""
        c, count = candidates, self._past(candidates)
        assert c.places.past is not None  # a mode with a priority has weights
        past = c.places.past.take(count, c.k, derive(c.seed, "sampler", "replay", c.k))
        return Chosen(c.places.new.take(c.batch - count, c.k), past, position)

    def _past(self, c: Candidates) -> int:
        """Return how many groups of the batch are past groups."""
        share = max(1, round(self.share * c.batch))
        return min(share, max(0, c.batch - c.last_chances), c.places.count(Place.PAST))


@dataclass(frozen=True)
class Offline:
    """Draw in epochs over all groups, in a new shuffled order for each epoch. New groups join the next epoch.

    A batch may span two epochs; it never contains a group twice.
    """

    epochs: int | None = None
    """How often each group is drawn, including groups that arrive later; None continues without end."""
    cooldown: int = 0
    """Steps that must pass between two draws of a group; matters where two epochs meet."""
    own_versions: bool = field(default=False, init=False)
    priority: None = field(default=None, init=False)

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs = {self.epochs} draws nothing; set at least 1, or None to continue without end")
        _check_cooldown(self.cooldown)

    @property
    def reuse_budget(self) -> int | None:
        """One draw for each epoch."""
        return self.epochs

    def is_new(self, uses: NDArray[np.integer], versions: NDArray[np.integer]) -> NDArray[np.bool_]:
        return np.zeros(len(uses), np.bool_)

    def available(self, candidates: Candidates) -> int:
        return min(candidates.batch, candidates.places.count(Place.PAST))

    def choose(self, candidates: Candidates, position: EpochPosition) -> Chosen:
        """Continue in the order of the epoch, and into the next epoch if the batch needs it."""
        if not candidates.places.count(Place.PAST):
            return Chosen([], [], position)
        queue, none = np.array(position.deferred, np.int64), np.zeros(0, np.int64)
        chosen, cooling, used = self._take(candidates, queue, none)
        position = replace(position, deferred=(*cooling.tolist(), *queue[used:].tolist()))
        chosen, position = self._advance(candidates, position, chosen)
        # No group can be in a batch twice, so a batch never needs more than two epochs.
        if len(chosen) < candidates.batch:
            next_epoch = position.next_epoch(candidates.seed, candidates.end)
            chosen, position = self._advance(candidates, next_epoch, chosen)
        return Chosen(chosen.tolist(), [], position)

    def _advance(self, candidates: Candidates, at: EpochPosition, chosen: Ordinals) -> tuple[Ordinals, EpochPosition]:
        """Take from the epoch's order until the batch is full or the epoch ends."""
        stride = 4 * candidates.batch
        while len(chosen) < candidates.batch and at.position < at.population:
            queue = at.order[at.position : at.position + stride]
            more, cooling, used = self._take(candidates, queue, chosen)
            chosen = np.concatenate([chosen, more])
            at = replace(at, position=at.position + used, deferred=(*at.deferred, *cooling.tolist()))
        return chosen, at

    def _take(self, candidates: Candidates, queue: Ordinals, chosen: Ordinals) -> tuple[Ordinals, Ordinals, int]:
        """Return what the batch takes from the head of `queue`, what a cooldown defers, and how much was used."""
        places = candidates.places.of(queue)
        eligible = (places == Place.PAST) | (places == Place.COOLING)
        rested = (places == Place.PAST) & ~np.isin(queue, chosen) & _first_occurrence(queue)
        needed = candidates.batch - len(chosen)
        taken = np.flatnonzero(eligible & rested)[:needed]
        used = int(taken[-1]) + 1 if len(taken) == needed else len(queue)
        return queue[taken], queue[:used][(eligible & ~rested)[:used]], used


def _check_cooldown(cooldown: int) -> None:
    if cooldown < 0:
        raise ValueError(f"cooldown = {cooldown} must be at least 0; 0 allows a group again at the next step")


def _first_occurrence(queue: Ordinals) -> NDArray[np.bool_]:
    first = np.zeros(len(queue), np.bool_)
    first[np.unique(queue, return_index=True)[1]] = True
    return first
