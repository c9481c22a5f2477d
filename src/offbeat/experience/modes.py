"""Three ways to choose a batch: `Fresh`, `Replay`, `Offline`. Each is a value, and a pure function of what it sees."""

from dataclasses import dataclass, field, replace
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from offbeat.experience.index import NEVER, NO_VERSION
from offbeat.seeds import derive

LEAST_STD: Final = 1e-3
"""Groups without contrast weigh as if their rewards differed by this little: rarely drawn, never impossible."""


@dataclass(frozen=True)
class Priority:
    """The weight of a past group: std^advantage · exp(−recency·lag − reuse·uses − difficulty·mean reward).

    Zero switches a term off; all zero draws uniformly. A group one step further behind is drawn exp(−recency) times
    as often, one use more counts exp(−reuse), and a positive difficulty prefers prompts that are rarely solved. A
    group without a version of ours has no lag, so recency leaves it alone.

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
        """Logarithms, so that no group's weight vanishes however far behind it is."""
        contrast = np.log(np.maximum(reward_std.astype(np.float64), LEAST_STD))
        discount = self.recency * lag + self.reuse * uses + self.difficulty * reward_mean.astype(np.float64)
        return np.asarray(self.advantage * contrast - discount, dtype=np.float64)


def uniforms(key: int, ordinals: NDArray[np.integer]) -> NDArray[np.float64]:
    """A number in (0, 1) for each ordinal under `key`, by the finaliser of SplitMix64.

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
    """The ordinals 0 … count − 1 in the order of their random numbers.

    >>> shuffled(7, 5).tolist()
    [1, 0, 4, 3, 2]
    """
    return np.argsort(uniforms(key, np.arange(count)), kind="stable")


def weighted_draw(
    key: int, ordinals: NDArray[np.int64], log_weights: NDArray[np.float64], count: int
) -> NDArray[np.int64]:
    """`count` of `ordinals` without replacement, each next one with chance proportional to its weight.

    The largest of log w + Gumbel noise come first, which is the same as drawing one after another
    (Efraimidis and Spirakis, 2006).

    >>> weighted_draw(7, np.array([4, 8, 9]), np.log([1.0, 1e9, 1e-9]), 2).tolist()
    [8, 4]
    """
    scores = log_weights - np.log(-np.log(uniforms(key, ordinals)))
    best = np.arange(len(ordinals))
    if 0 < count < len(ordinals):
        best = np.argpartition(-scores, count)[:count]
    order: NDArray[np.int64] = best[np.argsort(-scores[best], kind="stable")][:count]
    return ordinals[order]


Ordinals = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class View:
    """What a mode chooses from: every group from ordinal `start` on, position 0 of each column being `start`."""

    k: int
    batch: int
    seed: int
    start: int
    able: NDArray[np.bool_]
    """Ripe, wanted, within lag and budget. A cooldown may still hold a group back."""
    due: NDArray[np.bool_]
    """At the largest lag allowed: drawn now or never."""
    uses: NDArray[np.int32]
    last: NDArray[np.int32]
    oldest_version: NDArray[np.int32]
    reward_mean: NDArray[np.float32]
    reward_std: NDArray[np.float32]

    @property
    def end(self) -> int:
        """The ordinal the next group in the log will have."""
        return self.start + len(self.able)

    def cooled(self, cooldown: int, place: Ordinals | slice = slice(None)) -> NDArray[np.bool_]:
        """Which groups at `place` no cooldown holds back."""
        last = self.last[place]
        cooled: NDArray[np.bool_] = (last == NEVER) | (last < self.k - cooldown)
        return cooled


@dataclass(frozen=True, eq=False)
class Walk:
    """A place in an epoch. The order follows from seed, epoch and population, so that a state need not hold it."""

    epoch: int = -1
    population: int = 0
    position: int = 0
    deferred: tuple[int, ...] = ()
    """Passed while cooling down; drawn as soon as they may be."""
    order: Ordinals = field(default_factory=lambda: np.zeros(0, np.int64))

    def ordered(self, seed: int) -> "Walk":
        """The same place with its order worked out."""
        return replace(self, order=shuffled(derive(seed, "sampler", "epoch", self.epoch), self.population))

    def next_epoch(self, seed: int, population: int) -> "Walk":
        """The start of the next epoch, over all groups there are by now."""
        return Walk(self.epoch + 1, population, 0, self.deferred).ordered(seed)


@dataclass(frozen=True, eq=False)
class Choice:
    """Up to a batch of ordinals."""

    fresh: Ordinals
    past: Ordinals
    walk: Walk
    """Where to go on from, if the choice is taken."""


class Mode(Protocol):
    """A way to choose."""

    @property
    def reuse_budget(self) -> int | None:
        """How often one group may be drawn in all; None is without limit."""

    @property
    def cooldown(self) -> int:
        """Steps that must pass between two draws of one group: 0 allows the next step, 1 the one after."""

    def choose(self, view: View, walk: Walk) -> Choice:
        """A batch if there is one, else less."""


@dataclass(frozen=True)
class Fresh:
    """Each group once, those of the oldest version first: what would expire soonest is not passed by.

    Groups that no version of ours wrote fill up what is left of a batch; `Replay` gives them a share of their own.

    >>> Fresh().reuse_budget
    1
    """

    reuse_budget: int = field(default=1, init=False)
    cooldown: int = field(default=0, init=False)

    def choose(self, view: View, walk: Walk) -> Choice:
        """Groups that were never drawn."""
        return Choice(_oldest(view, view.able & (view.uses == 0), view.batch), np.zeros(0, np.int64), walk)


@dataclass(frozen=True)
class Replay:
    """A share of each batch from the past, by priority; the rest fresh, each once, of the oldest version first.

    The past is every group drawn before and every group without a version of ours: what was imported does not queue
    before the rollouts. While the past offers too few, fresh groups take their place; those for which it is now or
    never keep it, since the past can wait.

    >>> Replay(share=0.25, reuse_budget=3, cooldown=2).priority.advantage
    1.0
    """

    share: float = 0.5
    """Of the batch, from the past."""
    reuse_budget: int = 4
    """How often one group may be drawn in all, its first time included."""
    cooldown: int = 0
    """Steps that must pass between two draws of one group: 0 allows the next step, 1 the one after."""
    priority: Priority = field(default_factory=Priority)

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share = {self.share} must be above 0 and at most 1; 'fresh' draws nothing from the past")
        if self.reuse_budget < 2:
            raise ValueError(f"reuse_budget = {self.reuse_budget} leaves nothing to replay; set at least 2, or 'fresh'")
        _check_cooldown(self.cooldown)

    def choose(self, view: View, walk: Walk) -> Choice:
        """Past groups by weight, without repetition, then fresh ones to fill the batch."""
        unversioned = view.oldest_version == NO_VERSION
        candidates = np.flatnonzero(view.able & view.cooled(self.cooldown) & ((view.uses > 0) | unversioned))
        lag = np.where(unversioned[candidates], 0, np.maximum(view.k - view.oldest_version[candidates], 0))
        log_weights = self.priority.log_weights(
            lag, view.uses[candidates], view.reward_mean[candidates], view.reward_std[candidates]
        )
        key = derive(view.seed, "sampler", "replay", view.k)
        new = view.able & (view.uses == 0) & ~unversioned
        room = max(0, view.batch - int((new & view.due).sum()))
        share = max(1, round(self.share * view.batch))
        past = weighted_draw(key, view.start + candidates, log_weights, min(room, share))
        fresh = _oldest(view, new, view.batch - len(past))
        return Choice(fresh, past, walk)


@dataclass(frozen=True)
class Offline:
    """Epochs over what is there, in an order shuffled anew for each. What arrives meanwhile joins the next epoch.

    A batch may span two epochs; it never holds a group twice.

    >>> Offline(epochs=3).reuse_budget
    3
    """

    epochs: int | None = None
    """How often each group is drawn, late ones too; None goes on without end."""
    cooldown: int = 0
    """Steps that must pass between two draws of one group; matters at the seam of two epochs."""

    def __post_init__(self) -> None:
        if self.epochs is not None and self.epochs < 1:
            raise ValueError(f"epochs = {self.epochs} draws nothing; set at least 1, or None to go on without end")
        _check_cooldown(self.cooldown)

    @property
    def reuse_budget(self) -> int | None:
        """One draw an epoch."""
        return self.epochs

    def choose(self, view: View, walk: Walk) -> Choice:
        """Go on in the order of the epoch, past its end if need be."""
        nothing = np.zeros(0, np.int64)
        if not view.able.any():
            return Choice(nothing, nothing, walk)
        queue = np.array(walk.deferred, np.int64)
        chosen, cooling, used = self._take(view, queue, nothing)
        walk = replace(walk, deferred=(*cooling.tolist(), *queue[used:].tolist()))
        chosen, walk = self._advance(view, walk, chosen)
        # No group can be in a batch twice, so a batch never needs more than two epochs.
        if len(chosen) < view.batch:
            chosen, walk = self._advance(view, walk.next_epoch(view.seed, view.end), chosen)
        return Choice(chosen, nothing, walk)

    def _advance(self, view: View, walk: Walk, chosen: Ordinals) -> tuple[Ordinals, Walk]:
        """Take from the epoch's order until the batch is full or the epoch ends."""
        stride = 4 * view.batch
        while len(chosen) < view.batch and walk.position < walk.population:
            queue = walk.order[walk.position : walk.position + stride]
            more, cooling, used = self._take(view, queue, chosen)
            chosen = np.concatenate([chosen, more])
            deferred = (*walk.deferred, *cooling.tolist())
            walk = replace(walk, position=walk.position + used, deferred=deferred)
        return chosen, walk

    def _take(self, view: View, queue: Ordinals, chosen: Ordinals) -> tuple[Ordinals, Ordinals, int]:
        """What the batch gets from the head of `queue`, what is passed over because it cools, how much was used."""
        place = np.maximum(queue - view.start, 0)
        able = (queue >= view.start) & view.able[place]
        cool = view.cooled(self.cooldown, place) & ~np.isin(queue, chosen) & _first_occurrence(queue)
        needed = view.batch - len(chosen)
        taken = np.flatnonzero(able & cool)[:needed]
        used = int(taken[-1]) + 1 if len(taken) == needed else len(queue)
        return queue[taken], queue[:used][(able & ~cool)[:used]], used


def _check_cooldown(cooldown: int) -> None:
    if cooldown < 0:
        raise ValueError(f"cooldown = {cooldown}: 0 allows a group again at the next step")


def _oldest(view: View, mask: NDArray[np.bool_], count: int) -> Ordinals:
    """By version, and by their order in the log within one; what no version of ours wrote never expires: it is last."""
    found = np.flatnonzero(mask)
    versions = view.oldest_version[found].astype(np.int64)
    versions[versions == NO_VERSION] = np.iinfo(np.int64).max
    return view.start + found[np.argsort(versions, kind="stable")[:count]]


def _first_occurrence(queue: Ordinals) -> NDArray[np.bool_]:
    first = np.zeros(len(queue), np.bool_)
    first[np.unique(queue, return_index=True)[1]] = True
    return first
