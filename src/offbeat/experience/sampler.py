"""The sampler: a pure state machine that decides which groups the next batch contains.

It sees the index of the log and the step count; no clock, no files, no tensors. Randomness is derived from the seed by
name and step, so the next draw is a function of the settings, the columns fed and the state, and of nothing else: a
snapshot of the log and `state()` in a checkpoint give an exact resume.

    feed(columns)    new groups, and feedback for earlier ones
    draw(k)          a full batch for the step that starts from π_k, or how many groups are missing
    measured(drift)  how far the policy is from the groups just trained on; groups beyond a limit are retired
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, cast

import numpy as np

from offbeat.experience.index import CLOSED, Columns, DrawCounts, Index
from offbeat.experience.limits import Cause, RetireCause, SamplerLimits
from offbeat.experience.modes import EpochPosition, Mode
from offbeat.experience.places import Candidates, GroupPlaces, Place
from offbeat.experience.priors import Prior, PromptPriors
from offbeat.types import GroupDrift, Json

STATE_FORMAT: Final = 2


@dataclass(frozen=True)
class Retired:
    """A group that was drawn and will not be drawn again, although its reuse budget is not used up."""

    ordinal: int
    cause: RetireCause


@dataclass(frozen=True)
class Dropped:
    """A group that was never drawn and never will be. Record it in the ledger with `step = k`.

    A batch drawn at k is trained as step k + 1. So a trainer that rewinds to k cancels the training and keeps the
    drops, whether or not the checkpoint's state already contains them.
    """

    ordinal: int
    cause: Cause


@dataclass(frozen=True)
class Draw:
    """The batch for the step that starts from π_k, and the groups that were dropped on the way."""

    k: int
    ordinals: tuple[int, ...]
    replayed: tuple[bool, ...]
    """True for each group that the mode chose as a past group."""
    lags: tuple[int | None, ...]
    """k − oldest version of each group; None for a group without a version of this run's policy."""
    dropped: tuple[Dropped, ...]
    """Groups dropped since the last call."""
    retired: tuple[Retired, ...] = ()
    """Groups retired since the last draw."""
    priors: tuple[Prior, ...] = ()
    """For each group, the results of its prompt in earlier groups; empty unless the sampler keeps them."""


@dataclass(frozen=True)
class Waiting:
    """There are too few groups for a batch. Calling `draw` again at the same k is safe and loses nothing."""

    k: int
    needed: int
    """Groups missing from a full batch."""
    cooling: int
    """Groups that only a cooldown holds back. If no new groups can arrive, the cooldown is too long for this batch."""
    dropped: tuple[Dropped, ...]
    """Groups dropped since the last call."""


class Sampler:
    """Chooses batches from the columns it is fed.

    >>> from offbeat.experience.modes import Fresh
    >>> sampler = Sampler(Fresh(), SamplerLimits(batch=2, max_lag=4), seed=7)
    >>> sampler.feed(Columns(ordinal=[0, 1, 2], oldest_version=[0, 5, 6], task=[0] * 3, sources=[1] * 3,
    ...                      ripe=[True] * 3, completions=[8] * 3, scored=[8] * 3, reward_mean=[0.5] * 3,
    ...                      reward_std=[0.5] * 3, tokens=[2048] * 3))
    >>> draw = sampler.draw(k=6)
    >>> draw.ordinals, draw.lags, draw.dropped
    ((1, 2), (1, 0), (Dropped(ordinal=0, cause='expired'),))
    >>> sampler.draw(k=7).needed
    2
    """

    def __init__(self, mode: Mode, limits: SamplerLimits, seed: int, priors: PromptPriors | None = None) -> None:
        self._mode, self._limits, self._seed, self._priors = mode, limits, seed, priors
        self._retired: list[Retired] = []
        self._index = Index()
        self._counts = DrawCounts()
        self._position = EpochPosition()
        self._k = -1
        self._places = GroupPlaces(mode, limits, self._index, self._counts)

    def feed(self, rows: Columns) -> None:
        """Add new groups, and feedback for earlier ones."""
        self._index.feed(rows)
        self._counts.grow(len(self._index))
        self._places.feed(rows.ordinal, self._k + 1)

    def draw(self, k: int, *, at_least: int | None = None) -> Draw | Waiting:
        """Return the batch for the step that starts from π_k, or how many groups are missing.

        Each k gets one batch, in ascending order. With `at_least`, a batch of that many groups is enough if there are
        not enough for a full one.
        """
        if k <= self._k:
            raise ValueError(
                f"a batch at k = {k} was requested, but the batch of k = {self._k} is already drawn; "
                "restore the sampler state of the checkpoint that the run resumed from"
            )
        dropped = self._drop(k)
        candidates = self._candidates(k)
        available = self._mode.available(candidates)
        if available < (self._limits.batch if at_least is None else at_least):
            return Waiting(k, self._limits.batch - available, self._places.count(Place.COOLING), dropped)
        chosen = self._mode.choose(candidates, self._position)
        ordinals = np.array([*chosen.fresh, *chosen.past], np.int64)
        first = self._counts.uses[ordinals] == 0
        self._counts.mark(ordinals, k, self._mode.reuse_budget)
        self._places.drawn(ordinals, first)
        self._k, self._position = k, chosen.position
        retired, self._retired = tuple(self._retired), []
        versions = self._index.columns.oldest_version[ordinals].tolist()
        return Draw(
            k,
            ordinals=tuple(ordinals.tolist()),
            replayed=(False,) * len(chosen.fresh) + (True,) * len(chosen.past),
            lags=tuple(k - version if self._mode.own_versions and 0 <= version <= k else None for version in versions),
            dropped=dropped,
            retired=retired,
            priors=() if self._priors is None else tuple(self._priors.draw(k, self._index.columns, ordinals, first)),
        )

    def measured(self, drift: Mapping[int, GroupDrift]) -> None:
        """Take the drift of groups just trained on, by ordinal, and retire those beyond a limit.

        >>> from offbeat.experience.modes import Replay
        >>> sampler = Sampler(Replay(share=0.5), SamplerLimits(batch=2, retire_drift=0.2), seed=7)
        >>> sampler.feed(Columns([0, 1, 2, 3], *([value] * 4 for value in (0, 0, 1, True, 8, 8, 0.5, 0.5, 9))))
        >>> sampler.draw(k=0).ordinals
        (0, 1)
        >>> sampler.measured({0: GroupDrift(tv=0.25, ess=0.9), 1: GroupDrift(tv=0.15, ess=0.9)})
        >>> again = sampler.draw(k=1)
        >>> again.ordinals, again.retired
        ((2, 1), (Retired(ordinal=0, cause='drift'),))
        """
        for ordinal, found in drift.items():
            if (cause := self._limits.exceeded(found)) is not None:
                self.retire([ordinal], cause)

    def retire(self, ordinals: Sequence[int], cause: RetireCause) -> None:
        """Do not draw these groups again."""
        still_open = [ordinal for ordinal in ordinals if self._counts.uses[ordinal] != CLOSED]
        self._retired += [Retired(ordinal, cause) for ordinal in still_open]
        self._close(still_open)

    def again(self) -> None:
        """Allow another draw at the last k, because its batch was not trained on. Its groups still count as drawn."""
        self._k -= 1

    def waiting(self, k: int) -> dict[int, int]:
        """Return the number of admitted new groups that could be drawn at k, by version, the oldest first."""
        return self._places.waiting(k)

    def waiting_count(self, k: int) -> int:
        """Return the number of new groups with a version that could be drawn at k, guests included."""
        return self._places.waiting_count(k)

    @property
    def unripe(self) -> int:
        """The number of groups that wait for a score and could be drawn once it has arrived."""
        return self._places.count(Place.UNRIPE)

    def state(self) -> dict[str, Json]:
        """Return the state as JSON for the checkpoint. It grows with the groups that can still be drawn."""
        at = self._position
        cooling_since = self._k + 1 - self._mode.cooldown
        return {
            **self._identity(),
            "k": self._k,
            "groups": len(self._index),
            "runs": cast(Json, self._counts.runs(cooling_since)),
            "walk": [at.epoch, at.population, at.position, *at.deferred],
            "retired": [[one.ordinal, one.cause] for one in self._retired],
            "priors": None if self._priors is None else self._priors.state(),
            "bases": None if self._places.past is None else [*self._places.past.bases],
        }

    def restore(self, state: dict[str, Json], rows: Sequence[Columns] = ()) -> None:
        """Restore `state`. The columns of its snapshot are in `rows`, or were fed before."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(f"the sampler's state has {name} = {state.get(name)!r}, this sampler has {value!r}")
        for some in rows:
            self._index.feed(some)
        groups = cast(int, state["groups"])
        if groups > len(self._index):
            raise ValueError(
                f"the sampler's state contains {groups} groups, but only {len(self._index)} were fed; "
                "feed the columns of the checkpoint's snapshot first"
            )
        epoch, population, position, *deferred = cast(list[int], state["walk"])
        self._counts = DrawCounts.from_runs(len(self._index), cast(list[list[int]], state["runs"]))
        self._position = EpochPosition(epoch, population, position, tuple(deferred)).with_order(self._seed)
        self._k = cast(int, state["k"])
        self._places = GroupPlaces(self._mode, self._limits, self._index, self._counts)
        if self._places.past is not None and state.get("bases") is not None:  # 0.1.0 had none
            self._places.past.bases = cast(tuple[float, float], tuple(cast(list[float], state["bases"])))
        self._places.feed(np.arange(len(self._index)), self._k + 1)
        retired = cast(list[tuple[int, RetireCause]], state["retired"])
        self._retired = [Retired(ordinal, cause) for ordinal, cause in retired]
        if self._priors is not None and state["priors"] is not None:  # 0.1.0 kept none
            self._priors.restore(state["priors"])

    @property
    def columns(self) -> Columns:
        """The columns of all groups so far."""
        return self._index.columns

    @property
    def nbytes(self) -> int:
        """Bytes held for the index, the draw counts and the order of an epoch."""
        return self._index.nbytes + self._counts.nbytes + self._places.nbytes + self._position.order.nbytes

    def _identity(self) -> dict[str, Json]:
        return {"format": STATE_FORMAT, "mode": type(self._mode).__name__.lower(), "seed": self._seed}

    def _drop(self, k: int) -> tuple[Dropped, ...]:
        """Close groups that can no longer be drawn, and return those that were never drawn."""
        self._places.rest(k)
        # Sorted, because a restored sampler has learned of them in another order.
        self.retire([one for one in sorted(self._places.too_old(k)) if self._counts.uses[one] > 0], "age")
        found = self._places.undrawable(k)
        dropped = tuple(Dropped(one, found[one]) for one in sorted(found) if self._counts.uses[one] == 0)
        self._close(list(found))
        return dropped

    def _close(self, ordinals: Sequence[int]) -> None:
        closed = np.array(ordinals, np.int64)
        self._counts.close(closed)
        self._places.closed(closed)

    def _candidates(self, k: int) -> Candidates:
        max_lag = self._limits.max_lag
        last_chances = 0 if max_lag is None else sum(self._places.new.counts(0, k - max_lag).values())
        return Candidates(k, self._limits.batch, self._seed, len(self._index), last_chances, self._places)
