"""Three ways to choose a batch: `Fresh`, `Replay`, `Offline`.

A mode holds only its settings. What it chooses is a function of the candidates, which are masks over the columns of
the log, and of its position in the epoch.
"""

from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from offbeat.experience.index import NO_VERSION, Columns
from offbeat.seeds import derive

Ordinals = NDArray[np.int64]
Mask = NDArray[np.bool_]

LEAST_STD: Final = 1e-3
"""Smallest reward deviation in a weight, so a group with equal rewards is drawn rarely and not never."""
RECENCY: Final = 0.1
"""One more step of lag multiplies the weight of a past group by exp(−RECENCY); one more use by exp(−1)."""


@dataclass(frozen=True, eq=False)
class Candidates:
    """The groups that a mode chooses from at one step. No group is in two of the masks."""

    k: int
    """The step count of the policy that the batch is for."""
    batch: int
    seed: int
    columns: Columns
    uses: NDArray[np.int32]
    new: Mask
    """Wait for their first draw, in the order of versions."""
    past: Mask
    cooling: Mask
    """Past groups that a cooldown holds back."""
    last_chances: int = 0
    """New groups at the largest allowed lag: they expire unless they are drawn now."""

    def first_new(self, count: int) -> list[int]:
        """Return the new groups that are drawn first, in the order of the log within a version.

        Admitted groups of the run come first, the oldest version before others: they would expire first, and admission
        has counted on them. Then guests, which workers outside the run made at their own pace; last, groups without a
        version, which never expire.

        >>> versions = [5, NO_VERSION, 4, 3, 6]
        >>> rows = Columns(range(5), versions, *([one] * 5 for one in (0, 1, True, 8, 8, 0.5, 0.5, 9)),
        ...                guest=[False, False, False, True, False])
        >>> none = np.zeros(5, bool)
        >>> Candidates(5, 3, 0, rows, np.zeros(5, np.int32), np.array(versions) <= 5, none, none).first_new(9)
        [2, 0, 3, 1]
        """
        ordinals = np.flatnonzero(self.new)
        versions = self.columns.oldest_version[ordinals].astype(np.int64)
        place = 2 * (versions == NO_VERSION) + self.columns.guest[ordinals]
        order = np.argsort((place << 40) + versions, kind="stable")  # nearly sorted in the order of the log
        return ordinals[order[:count]].tolist()  # type: ignore[no-any-return]

    def sample_past(self, count: int) -> list[int]:
        """Return past groups, one after another, each with probability proportional to its weight.

        The weight is std · exp(−RECENCY · lag − uses), with lag 0 for a group without a version. Adding Gumbel noise to
        logarithms and taking the largest is the same as drawing without replacement.
        """
        ordinals = np.flatnonzero(self.past)
        rows, versions = self.columns, self.columns.oldest_version[ordinals]
        lag = np.where(versions == NO_VERSION, 0, self.k - versions)
        contrast = np.log(np.maximum(rows.reward_std[ordinals].astype(np.float64), LEAST_STD))
        noise = uniforms(derive(self.seed, "sampler", "replay", self.k), ordinals)
        keys = contrast - RECENCY * lag - self.uses[ordinals] - np.log(-np.log(noise))
        largest = np.argpartition(-keys, count - 1)[:count] if 0 < count < len(keys) else np.arange(len(keys))[:count]
        return ordinals[largest[np.argsort(-keys[largest])]].tolist()  # type: ignore[no-any-return]


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

    def is_new(self, uses: NDArray[np.integer], versions: NDArray[np.integer]) -> Mask:
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

    def is_new(self, uses: NDArray[np.integer], versions: NDArray[np.integer]) -> Mask:
        return np.asarray(uses == 0)

    def available(self, candidates: Candidates) -> int:
        return min(candidates.batch, int(candidates.new.sum()))

    def choose(self, candidates: Candidates, position: EpochPosition) -> Chosen:
        """Choose groups that were never drawn."""
        return Chosen(candidates.first_new(candidates.batch), [], position)


@dataclass(frozen=True)
class Replay:
    """Draw a share of each batch from past groups by weight; the rest are fresh groups, as in `Fresh`.

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
    own_versions: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share = {self.share} must be above 0 and at most 1; mode 'fresh' draws no past groups")
        if self.reuse_budget < 2:
            raise ValueError(
                f"reuse_budget = {self.reuse_budget} must be at least 2; mode 'fresh' draws each group once"
            )
        _check_cooldown(self.cooldown)

    def is_new(self, uses: NDArray[np.integer], versions: NDArray[np.integer]) -> Mask:
        return np.asarray((uses == 0) & (versions != NO_VERSION))

    def available(self, candidates: Candidates) -> int:
        past = self._past(candidates)
        return past + min(candidates.batch - past, int(candidates.new.sum()))

    def choose(self, candidates: Candidates, position: EpochPosition) -> Chosen:
        """Choose past groups by weight and without repetition, then fresh ones to fill the batch."""
        count = self._past(candidates)
        return Chosen(candidates.first_new(candidates.batch - count), candidates.sample_past(count), position)

    def _past(self, c: Candidates) -> int:
        """Return how many groups of the batch are past groups."""
        share = max(1, round(self.share * c.batch))
        return min(share, max(0, c.batch - c.last_chances), int(c.past.sum()))


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

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs = {self.epochs} draws nothing; set at least 1, or None to continue without end")
        _check_cooldown(self.cooldown)

    @property
    def reuse_budget(self) -> int | None:
        """One draw for each epoch."""
        return self.epochs

    def is_new(self, uses: NDArray[np.integer], versions: NDArray[np.integer]) -> Mask:
        return np.zeros(len(uses), np.bool_)

    def available(self, candidates: Candidates) -> int:
        return min(candidates.batch, int(candidates.past.sum()))

    def choose(self, candidates: Candidates, position: EpochPosition) -> Chosen:
        """Continue in the order of the epoch, and into the next epoch if the batch needs it."""
        if not candidates.past.any():
            return Chosen([], [], position)
        queue, none = np.array(position.deferred, np.int64), np.zeros(0, np.int64)
        chosen, cooling, used = self._take(candidates, queue, none)
        position = replace(position, deferred=(*cooling.tolist(), *queue[used:].tolist()))
        chosen, position = self._advance(candidates, position, chosen)
        # No group can be in a batch twice, so a batch never needs more than two epochs.
        if len(chosen) < candidates.batch:
            next_epoch = position.next_epoch(candidates.seed, len(candidates.columns))
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
        eligible = candidates.past[queue] | candidates.cooling[queue]
        rested = candidates.past[queue] & ~np.isin(queue, chosen) & _first_occurrence(queue)
        needed = candidates.batch - len(chosen)
        taken = np.flatnonzero(eligible & rested)[:needed]
        used = int(taken[-1]) + 1 if len(taken) == needed else len(queue)
        return queue[taken], queue[:used][(eligible & ~rested)[:used]], used


def uniforms(key: int, ordinals: NDArray[np.integer]) -> NDArray[np.float64]:
    """Return a random number in (0, 1) for each ordinal under `key`, by the finalizer of SplitMix64.

    >>> uniforms(7, np.array([0, 1, 2])).round(4).tolist()
    [0.3898, 0.0168, 0.9008]
    """
    x = ordinals.astype(np.uint64) + np.uint64(1)
    x *= np.uint64(0x9E3779B97F4A7C15)
    x += np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return np.asarray((x >> np.uint64(11)) + 0.5, dtype=np.float64) * 2.0**-53


def shuffled(key: int, count: int) -> Ordinals:
    """Return the ordinals 0 … count − 1 in the order of their random numbers."""
    return np.argsort(uniforms(key, np.arange(count)), kind="stable")


def _check_cooldown(cooldown: int) -> None:
    if cooldown < 0:
        raise ValueError(f"cooldown = {cooldown} must be at least 0; 0 allows a group again at the next step")


def _first_occurrence(queue: Ordinals) -> Mask:
    first = np.zeros(len(queue), np.bool_)
    first[np.unique(queue, return_index=True)[1]] = True
    return first
