"""Three ways to choose a batch: `Fresh`, `Replay`, `Offline`.

A mode holds only its settings. What it chooses is a pure function of the candidates and its position in the epoch.
"""

from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from offbeat.experience.index import NEVER, NO_VERSION
from offbeat.seeds import derive

LEAST_STD: Final = 1e-3
"""Smallest reward deviation in a weight, so a group with equal rewards is drawn rarely and not never."""


@dataclass(frozen=True)
class Priority:
    """The weight of a past group: std^advantage · exp(−recency·lag − reuse·uses − difficulty·mean reward).

    Zero switches a term off; all zeros draw uniformly. One more step of lag multiplies the weight by exp(−recency),
    one more use by exp(−reuse), and a positive difficulty prefers prompts that are rarely solved. A group without a
    policy version has lag 0, so recency does not affect it.

    >>> weights = np.exp(Priority(recency=0.1, reuse=0.0).log_weights(
    ...     lag=np.array([0, 10]), uses=np.array([1, 1]), reward_mean=np.array([0.5, 0.5]),
    ...     reward_std=np.array([0.5, 0.5])))
    >>> weights.round(3).tolist()
    [0.5, 0.184]
    """

    recency: float = 0.1
    reuse: float = 1.0
    advantage: float = 1.0
    difficulty: float = 0.0

    def log_weights(
        self,
        lag: NDArray[np.integer],
        uses: NDArray[np.integer],
        reward_mean: NDArray[np.floating],
        reward_std: NDArray[np.floating],
    ) -> NDArray[np.float64]:
        """Return the logarithm of each weight, which does not underflow however large the lag is."""
        contrast = np.log(np.maximum(reward_std.astype(np.float64), LEAST_STD))
        discount = self.recency * lag + self.reuse * uses + self.difficulty * reward_mean.astype(np.float64)
        return np.asarray(self.advantage * contrast - discount, dtype=np.float64)


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


def shuffled(key: int, count: int) -> NDArray[np.int64]:
    """Return the ordinals 0 … count − 1 in the order of their random numbers."""
    return np.argsort(uniforms(key, np.arange(count)), kind="stable")


def weighted_draw(
    key: int, ordinals: NDArray[np.int64], log_weights: NDArray[np.float64], count: int
) -> NDArray[np.int64]:
    """Draw `count` of `ordinals` without replacement, each with probability proportional to its weight.

    Takes the largest values of log w + Gumbel noise, which is the same as drawing one after another
    (Efraimidis and Spirakis, 2006).

    >>> weighted_draw(7, np.array([4, 8, 9]), np.log([1.0, 1e9, 1e-9]), 2).tolist()
    [8, 4]
    """
    perturbed = log_weights - np.log(-np.log(uniforms(key, ordinals)))
    best = np.arange(len(ordinals))
    if 0 < count < len(ordinals):
        best = np.argpartition(-perturbed, count)[:count]
    order: NDArray[np.int64] = best[np.argsort(-perturbed[best], kind="stable")][:count]
    return ordinals[order]


Ordinals = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Candidates:
    """What a mode chooses from: one entry in each column for every group from ordinal `start` on."""

    k: int
    """The step count of the policy that the batch is for."""
    batch: int
    seed: int
    start: int
    eligible: NDArray[np.bool_]
    """Ripe, of a wanted task and source, within lag and budget. A cooldown may still hold a group back."""
    last_chance: NDArray[np.bool_]
    """At the largest allowed lag: the group expires unless it is drawn now."""
    uses: NDArray[np.int32]
    last: NDArray[np.int32]
    """The step of the last draw, or `NEVER`."""
    oldest_version: NDArray[np.int32]
    reward_mean: NDArray[np.float32]
    reward_std: NDArray[np.float32]

    @property
    def end(self) -> int:
        """The ordinal that the next group in the log will get."""
        return self.start + len(self.eligible)

    def rested(self, cooldown: int, at: Ordinals | slice = slice(None)) -> NDArray[np.bool_]:
        """Return a mask of the groups at these positions that no cooldown holds back."""
        last = self.last[at]
        rested: NDArray[np.bool_] = (last == NEVER) | (last < self.k - cooldown)
        return rested


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

    fresh: Ordinals
    past: Ordinals
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

    def choose(self, candidates: Candidates, position: EpochPosition) -> Chosen:
        """Choose up to one batch."""


@dataclass(frozen=True)
class Fresh:
    """Draw each group once, the oldest version first, because those groups would expire first.

    Groups without a policy version fill the rest of a batch. `Replay` gives them their own share.
    """

    reuse_budget: int = field(default=1, init=False)
    cooldown: int = field(default=0, init=False)
    own_versions: bool = field(default=True, init=False)

    def choose(self, candidates: Candidates, position: EpochPosition) -> Chosen:
        """Choose groups that were never drawn."""
        new = candidates.eligible & (candidates.uses == 0)
        return Chosen(_oldest(candidates, new, candidates.batch), np.zeros(0, np.int64), position)


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

    def choose(self, candidates: Candidates, position: EpochPosition) -> Chosen:
        """Choose past groups by weight and without repetition, then fresh ones to fill the batch."""
        c = candidates
        unversioned = c.oldest_version == NO_VERSION
        at = np.flatnonzero(c.eligible & c.rested(self.cooldown) & ((c.uses > 0) | unversioned))
        lag = np.where(unversioned[at], 0, np.maximum(c.k - c.oldest_version[at], 0))
        log_weights = self.priority.log_weights(lag, c.uses[at], c.reward_mean[at], c.reward_std[at])
        key = derive(c.seed, "sampler", "replay", c.k)
        new = c.eligible & (c.uses == 0) & ~unversioned
        room = max(0, c.batch - int((new & c.last_chance).sum()))
        share = max(1, round(self.share * c.batch))
        past = weighted_draw(key, c.start + at, log_weights, min(room, share))
        return Chosen(_oldest(c, new, c.batch - len(past)), past, position)


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

    def choose(self, candidates: Candidates, position: EpochPosition) -> Chosen:
        """Continue in the order of the epoch, and into the next epoch if the batch needs it."""
        none = np.zeros(0, np.int64)
        if not candidates.eligible.any():
            return Chosen(none, none, position)
        queue = np.array(position.deferred, np.int64)
        chosen, cooling, used = self._take(candidates, queue, none)
        position = replace(position, deferred=(*cooling.tolist(), *queue[used:].tolist()))
        chosen, position = self._advance(candidates, position, chosen)
        # No group can be in a batch twice, so a batch never needs more than two epochs.
        if len(chosen) < candidates.batch:
            next_epoch = position.next_epoch(candidates.seed, candidates.end)
            chosen, position = self._advance(candidates, next_epoch, chosen)
        return Chosen(chosen, none, position)

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
        at = np.maximum(queue - candidates.start, 0)
        eligible = (queue >= candidates.start) & candidates.eligible[at]
        rested = candidates.rested(self.cooldown, at) & ~np.isin(queue, chosen) & _first_occurrence(queue)
        needed = candidates.batch - len(chosen)
        taken = np.flatnonzero(eligible & rested)[:needed]
        used = int(taken[-1]) + 1 if len(taken) == needed else len(queue)
        return queue[taken], queue[:used][(eligible & ~rested)[:used]], used


def _check_cooldown(cooldown: int) -> None:
    if cooldown < 0:
        raise ValueError(f"cooldown = {cooldown} must be at least 0; 0 allows a group again at the next step")


def _oldest(candidates: Candidates, mask: NDArray[np.bool_], count: int) -> Ordinals:
    """Return groups by version, then by order in the log. Groups without a version never expire and come last."""
    found = np.flatnonzero(mask)
    versions = candidates.oldest_version[found].astype(np.int64)
    versions[versions == NO_VERSION] = np.iinfo(np.int64).max
    return candidates.start + found[np.argsort(versions, kind="stable")[:count]]


def _first_occurrence(queue: Ordinals) -> NDArray[np.bool_]:
    first = np.zeros(len(queue), np.bool_)
    first[np.unique(queue, return_index=True)[1]] = True
    return first
