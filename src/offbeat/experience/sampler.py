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

from offbeat.experience.index import CLOSED, NEVER, NO_VERSION, Columns, DrawCounts, Index
from offbeat.experience.modes import Candidates, EpochPosition, Mask, Mode
from offbeat.experience.priors import Prior, PromptPriors
from offbeat.types import GroupDrift, Json

STATE_FORMAT: Final = 2
EQUAL_REWARDS: Final = 1e-6
"""A standard deviation of rewards up to this counts as zero."""

Cause = Literal["expired", "too-small", "zero-variance"]
"""Why a group is never drawn."""
RetireCause = Literal["drift", "ess", "age", "refused"]
"""Why a drawn group is not drawn again."""


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

    Nothing is kept but the columns, how often and when each group was drawn, and the position in an epoch: what can be
    drawn is masks over them, made anew for every draw.

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
        available = self._mode.available(candidates)
        if available < (self._limits.batch if at_least is None else at_least):
            return Waiting(k, self._limits.batch - available, int(candidates.cooling.sum()), dropped)
        chosen = self._mode.choose(candidates, self._position)
        ordinals = np.array([*chosen.fresh, *chosen.past], np.int64)
        first = self._counts.uses[ordinals] == 0
        self._counts.mark(ordinals, k, self._mode.reuse_budget)
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
        self._counts.close(np.array(still_open, np.int64))

    def again(self) -> None:
        """Allow another draw at the last k, because its batch was not trained on. Its groups still count as drawn."""
        self._k -= 1

    def waiting(self, k: int) -> dict[int, int]:
        """Return the number of admitted new groups that could be drawn at k, by version, the oldest first."""
        waiting = self._waiting(k) & ~self.columns.guest
        versions, counts = np.unique(self.columns.oldest_version[waiting], return_counts=True)
        return dict(zip(versions.tolist(), counts.tolist(), strict=True))

    def waiting_count(self, k: int) -> int:
        """Return the number of new groups with a version that could be drawn at k, guests included."""
        return int(self._waiting(k).sum())

    @property
    def unripe(self) -> int:
        """The number of groups that wait for a score and could be drawn once it has arrived."""
        return int(((self._counts.uses != CLOSED) & ~self.columns.ripe).sum())

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
        retired = cast(list[tuple[int, RetireCause]], state["retired"])
        self._retired = [Retired(ordinal, cause) for ordinal, cause in retired]
        if self._priors is not None:
            self._priors.restore(state["priors"])

    @property
    def columns(self) -> Columns:
        """The columns of all groups so far."""
        return self._index.columns

    @property
    def nbytes(self) -> int:
        """Bytes held for the index, the draw counts and the order of an epoch."""
        return self._index.nbytes + self._counts.nbytes + self._position.order.nbytes

    def _identity(self) -> dict[str, Json]:
        return {"format": STATE_FORMAT, "mode": type(self._mode).__name__.lower(), "seed": self._seed}

    def _drop(self, k: int) -> tuple[Dropped, ...]:
        """Close groups that can no longer be drawn, and return those that were never drawn."""
        rows, limits, uses = self.columns, self._limits, self._counts.uses
        if limits.retire_age is not None:
            self.retire(np.flatnonzero((uses > 0) & self._older(k - limits.retire_age)).tolist(), "age")
        never = uses == 0
        late = never & self._older(k - limits.max_lag) if limits.max_lag is not None else np.zeros(len(uses), np.bool_)
        unfit = (uses != CLOSED) & rows.ripe & ~self._fit()
        dropped = np.flatnonzero(never & (late | unfit)).tolist()
        self._counts.close(np.flatnonzero(late | unfit))
        return tuple(
            Dropped(one, "expired" if late[one] else "too-small" if rows.scored[one] < 2 else "zero-variance")
            for one in dropped
        )

    def _older(self, version: int) -> Mask:
        """Return which groups have a version below this one."""
        versions = self.columns.oldest_version
        return np.asarray((versions != NO_VERSION) & (versions < version))

    def _fit(self) -> Mask:
        """Return which groups can be compared, as far as they are scored."""
        fit = self.columns.scored >= 2
        if self._limits.drop_zero_variance:
            fit &= self.columns.reward_std > EQUAL_REWARDS
        return np.asarray(fit)

    def _candidates(self, k: int) -> Candidates:
        """Return what a batch at k can be chosen from."""
        rows, uses, last = self.columns, self._counts.uses, self._counts.last
        drawable = (uses != CLOSED) & rows.ripe & self._fit()
        new = self._mode.is_new(uses, rows.oldest_version)
        cooling = (last != NEVER) & (last >= k - self._mode.cooldown)
        fresh = drawable & new & (rows.oldest_version <= k)
        at_limit = 0
        if self._limits.max_lag is not None:
            at_limit = int((fresh & ~rows.guest & (rows.oldest_version == k - self._limits.max_lag)).sum())
        past = drawable & ~new
        return Candidates(
            k, self._limits.batch, self._seed, rows, uses, fresh, past & ~cooling, past & cooling, at_limit
        )

    def _waiting(self, k: int) -> Mask:
        """Return which new groups with a version could be drawn at k."""
        versions, max_lag = self.columns.oldest_version, self._limits.max_lag
        new = self._mode.is_new(self._counts.uses, versions) & self.columns.ripe & self._fit()
        oldest = 0 if max_lag is None else k - max_lag
        return np.asarray(new & (versions != NO_VERSION) & (versions >= oldest) & (versions <= k))
