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
from typing import Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from offbeat.experience.index import CLOSED, NO_VERSION, Columns, DrawCounts, Index
from offbeat.experience.modes import Candidates, EpochPosition, Mode
from offbeat.experience.priors import Prior, PromptPriors
from offbeat.types import GroupDrift, Json

STATE_FORMAT: Final = 2

Cause = Literal["expired", "too-small", "zero-variance"]
RetireCause = Literal["drift", "ess", "age", "refused"]


@dataclass(frozen=True)
class SamplerLimits:
    """The limits of a draw in every mode."""

    batch: int
    """Groups in a batch."""
    max_lag: int | None = None
    """A group that was never drawn expires when k − its oldest version exceeds this. One without a policy version never
    does. Groups that were drawn have the `retire` limits."""
    drop_zero_variance: bool = False
    """Drop groups whose rewards are all equal. By default the objective masks them."""
    variance_tolerance: float = 1e-6
    """A standard deviation up to this counts as zero."""
    tasks: frozenset[int] | None = None
    """Numbers of the tasks to draw from; None means all. Groups of other tasks stay waiting and are not dropped."""
    sources: int | None = None
    """Bits of the sources to draw from, at least one of which a group needs; None means all."""
    retire_drift: float | None = None
    """A drawn group is not drawn again once its measured drift exceeds this; None for no limit."""
    retire_ess: float | None = None
    """A drawn group is not drawn again once its measured effective sample size is below this; None for no limit."""
    retire_age: int | None = None
    """A drawn group is not drawn again once k − its oldest version exceeds this; None for no limit."""

    def exceeded(self, found: GroupDrift) -> RetireCause | None:
        """Return which limit a measured group is beyond, or None."""
        if self.retire_drift is not None and found.tv > self.retire_drift:
            return "drift"
        return "ess" if self.retire_ess is not None and found.ess < self.retire_ess else None

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch = {self.batch} must be at least 1 group")
        if self.max_lag is not None and self.max_lag < 0:
            raise ValueError(f"max_lag = {self.max_lag} must be at least 0 (only the current version), or None")


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
    """k − oldest version of each group; None for a group without a policy version."""
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

    def feed(self, rows: Columns) -> None:
        """Add new groups, and feedback for earlier ones."""
        self._index.feed(rows)
        self._counts.grow(len(self._index))

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
        chosen = self._mode.choose(candidates, self._position)
        ordinals = np.concatenate([chosen.fresh, chosen.past])
        if len(ordinals) < (self._limits.batch if at_least is None else at_least):
            cooling = candidates.eligible & ~candidates.rested(self._mode.cooldown)
            return Waiting(k, self._limits.batch - len(ordinals), int(cooling.sum()), dropped)
        first = self._counts.uses[ordinals] == 0
        self._counts.mark(ordinals, k, self._mode.reuse_budget)
        self._k, self._position = k, chosen.position
        retired, self._retired = tuple(self._retired), []
        versions = self._index.columns.oldest_version[ordinals].tolist()
        return Draw(
            k,
            ordinals=tuple(ordinals.tolist()),
            replayed=(False,) * len(chosen.fresh) + (True,) * len(chosen.past),
            lags=tuple(None if version == NO_VERSION or version > k else k - version for version in versions),
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
        self._counts.close(np.array(still_open, np.int64))

    def again(self) -> None:
        """Allow another draw at the last k, because its batch was not trained on. Its groups still count as drawn."""
        self._k -= 1

    def waiting_versions(self, k: int) -> NDArray[np.int32]:
        """Return the policy versions of groups that could be drawn at k and never were, the oldest first."""
        found = self._candidates(k)
        undrawable = np.logical_or.reduce(list(self._undrawable(k, found.start).values()))
        waiting = found.eligible & (found.uses == 0) & (found.oldest_version != NO_VERSION) & ~undrawable
        return np.sort(found.oldest_version[waiting])

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
        }

    def restore(self, state: dict[str, Json]) -> None:
        """Restore `state`. Feed the columns of its snapshot first."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(f"the sampler's state has {name} = {state.get(name)!r}, this sampler has {value!r}")
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
        retired = cast(list[tuple[int, RetireCause]], state["retired"])
        self._retired = [Retired(ordinal, cause) for ordinal, cause in retired]
        if self._priors is not None:
            self._priors.restore(state["priors"])

    @property
    def nbytes(self) -> int:
        """Bytes held for the index, the draw counts and the order of an epoch."""
        return self._index.nbytes + self._counts.nbytes + self._position.order.nbytes

    def _identity(self) -> dict[str, Json]:
        return {"format": STATE_FORMAT, "mode": type(self._mode).__name__.lower(), "seed": self._seed}

    def _drop(self, k: int) -> tuple[Dropped, ...]:
        """Close groups that can no longer be drawn, and return those that were never drawn."""
        self._retire_by_age(k)
        start = self._counts.first_open
        selected = self._selected(start)
        dropped: dict[int, Cause] = {}
        for cause, undrawable in self._undrawable(k, start).items():
            found = start + np.flatnonzero(undrawable & selected & (self._counts.uses[start:] != CLOSED))
            dropped |= dict.fromkeys(found[self._counts.uses[found] == 0].tolist(), cause)
            self._counts.close(found)
        return tuple(Dropped(ordinal, dropped[ordinal]) for ordinal in sorted(dropped))

    def _retire_by_age(self, k: int) -> None:
        if self._limits.retire_age is None:
            return
        start = self._counts.first_open
        version, uses = self._index.columns.oldest_version[start:], self._counts.uses[start:]
        too_old = (uses > 0) & (version != NO_VERSION) & (version < k - self._limits.retire_age)
        self.retire((start + np.flatnonzero(too_old)).tolist(), "age")

    def _undrawable(self, k: int, start: int) -> dict[Cause, NDArray[np.bool_]]:
        """Return masks of the groups from `start` on that can never be drawn, by cause. The first cause counts."""
        limits, rows, never_drawn = self._limits, self._index.columns, self._counts.uses[start:] == 0
        ripe, version = rows.ripe[start:], rows.oldest_version[start:]
        causes: dict[Cause, NDArray[np.bool_]] = {}
        if limits.max_lag is not None:
            causes["expired"] = never_drawn & (version != NO_VERSION) & (version < k - limits.max_lag)
        causes["too-small"] = ripe & (rows.scored[start:] < 2)
        if limits.drop_zero_variance:
            causes["zero-variance"] = ripe & (rows.reward_std[start:] <= limits.variance_tolerance)
        return causes

    def _selected(self, start: int) -> NDArray[np.bool_]:
        """Return a mask of the groups from `start` on with a task and a source to draw from."""
        limits, rows = self._limits, self._index.columns
        selected = np.ones(len(self._index) - start, np.bool_)
        if limits.tasks is not None:
            selected &= np.isin(rows.task[start:], sorted(limits.tasks))
        if limits.sources is not None:
            selected &= (rows.sources[start:] & np.uint32(limits.sources)) != 0
        return selected

    def _candidates(self, k: int) -> Candidates:
        start, rows = self._counts.first_open, self._index.columns
        uses, version = self._counts.uses[start:], rows.oldest_version[start:]
        oldest = NO_VERSION if self._limits.max_lag is None else k - self._limits.max_lag
        reached = version <= k if self._mode.own_versions else np.ones(len(version), np.bool_)
        return Candidates(
            k,
            batch=self._limits.batch,
            seed=self._seed,
            start=start,
            # After a resume the log may have groups of versions that the run has not reached again; they are for later.
            eligible=(uses != CLOSED) & rows.ripe[start:] & self._selected(start) & reached,
            last_chance=(version != NO_VERSION) & (version <= oldest),
            uses=uses,
            last=self._counts.last[start:],
            oldest_version=version,
            reward_mean=rows.reward_mean[start:],
            reward_std=rows.reward_std[start:],
        )
