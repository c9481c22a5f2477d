"""Which groups come next.

A pure state machine. It sees the index of the log and the step count; no clock, no files, no tensors. Randomness is
derived from the seed by name and step, so what it draws next is a function of its settings, the columns it was fed
and its state, and of nothing else: the log's snapshot and `state()` in a checkpoint are an exact resume.

    feed(columns)  new groups, and feedback to earlier ones
    draw(k)        a full batch for the step that starts from π_k, or how many groups are missing
"""

from dataclasses import dataclass
from typing import Final, Literal, cast

import numpy as np
from numpy.typing import NDArray

from offbeat.experience.index import CLOSED, NO_VERSION, Columns, DrawCounts, Index
from offbeat.experience.modes import Mode, View, Walk
from offbeat.types import Json

STATE_FORMAT: Final = 1

Cause = Literal["expired", "too-small", "zero-variance"]


@dataclass(frozen=True)
class SamplerLimits:
    """What holds for every mode.

    >>> SamplerLimits(batch=64, max_lag=8).drop_zero_variance
    False
    """

    batch: int
    """Groups in a draw."""
    max_lag: int | None = None
    """A group expires when k − its oldest version exceeds this; one without a version of ours never does."""
    drop_zero_variance: bool = False
    """Drop groups whose rewards are all equal, instead of leaving them to the objective's mask."""
    variance_tolerance: float = 1e-6
    """A standard deviation up to this counts as none."""
    tasks: frozenset[int] | None = None
    """Codes of the tasks to draw from; None takes all. Groups of other tasks are left waiting, not dropped."""
    sources: int | None = None
    """Bits of the sources to draw from, of which a group needs one; None takes all."""

    def __post_init__(self) -> None:
        if self.batch < 1:
            raise ValueError(f"batch = {self.batch}: a draw needs at least 1 group")
        if self.max_lag is not None and self.max_lag < 0:
            raise ValueError(f"max_lag = {self.max_lag}: 0 takes only groups of the current version; None takes any")


@dataclass(frozen=True)
class Dropped:
    """A group that was never drawn and never will be: an entry for the ledger, with `step = k`.

    What is drawn at k is trained as step k + 1, so a trainer that goes back to k takes back the training and keeps
    the drops, which the state of the checkpoint may or may not know of already.
    """

    ordinal: int
    cause: Cause


@dataclass(frozen=True)
class Draw:
    """A full batch."""

    k: int
    ordinals: tuple[int, ...]
    replayed: tuple[bool, ...]
    """Which of them came from the past."""
    lags: tuple[int | None, ...]
    """k − oldest version of each; None where no version of ours took part."""
    dropped: tuple[Dropped, ...]
    """Found hopeless since the last call."""


@dataclass(frozen=True)
class Waiting:
    """No batch yet. Asking again at the same k is safe and loses nothing."""

    k: int
    needed: int
    """Groups missing from a full batch."""
    cooling: int
    """Groups that only a cooldown holds back. If no new groups can come, it is too long for this batch."""
    dropped: tuple[Dropped, ...]
    """Found hopeless since the last call."""


class Sampler:
    """Fed with columns, asked for batches.

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

    def __init__(self, mode: Mode, limits: SamplerLimits, seed: int) -> None:
        self._mode, self._limits, self._seed = mode, limits, seed
        self._index = Index()
        self._history = DrawCounts()
        self._walk = Walk()
        self._k = -1

    def feed(self, rows: Columns) -> None:
        """Learn of new groups, and of feedback to earlier ones."""
        self._index.feed(rows)
        self._history.grow(len(self._index))

    def draw(self, k: int, *, at_least: int | None = None) -> Draw | Waiting:
        """The batch for the step that starts from π_k, or how much is missing. Each k gets one batch, in order.

        With `at_least`, a batch that has so many groups will do, where there are not enough for a full one.
        """
        if k <= self._k:
            raise ValueError(
                f"asked for a batch at k = {k}, but the batch of k = {self._k} is already drawn; "
                "restore the state that belongs to the checkpoint resumed from"
            )
        dropped = self._drop(k)
        view = self._view(k)
        choice = self._mode.choose(view, self._walk)
        chosen = np.concatenate([choice.fresh, choice.past])
        if len(chosen) < (self._limits.batch if at_least is None else at_least):
            cooling = view.able & ~view.cooled(self._mode.cooldown)
            return Waiting(k, self._limits.batch - len(chosen), int(cooling.sum()), dropped)
        self._history.mark(chosen, k, self._mode.reuse_budget)
        self._k, self._walk = k, choice.walk
        versions = self._index.columns.oldest_version[chosen].tolist()
        return Draw(
            k,
            ordinals=tuple(chosen.tolist()),
            replayed=(False,) * len(choice.fresh) + (True,) * len(choice.past),
            lags=tuple(None if version == NO_VERSION else k - version for version in versions),
            dropped=dropped,
        )

    def again(self) -> None:
        """The batch drawn last was not trained on: its k may be drawn for once more. Its groups count as drawn."""
        self._k -= 1

    def waiting_versions(self, k: int) -> NDArray[np.int32]:
        """Versions of our own groups that could be drawn at k and never were, the oldest first."""
        view = self._view(k)
        hopeless = np.logical_or.reduce(list(self._hopeless(k, view.start).values()))
        mine = view.able & (view.uses == 0) & (view.oldest_version != NO_VERSION) & ~hopeless
        return np.sort(view.oldest_version[mine])

    def state(self) -> dict[str, Json]:
        """All there is to remember, as JSON for the checkpoint; it grows with the groups still in play."""
        walk = self._walk
        cooling_since = self._k + 1 - self._mode.cooldown
        return {
            **self._identity(),
            "k": self._k,
            "groups": len(self._index),
            "runs": cast(Json, self._history.runs(cooling_since)),
            "walk": [walk.epoch, walk.population, walk.position, *walk.deferred],
        }

    def restore(self, state: dict[str, Json]) -> None:
        """Go back to `state`. The columns of the snapshot it belongs to must have been fed."""
        for name, value in self._identity().items():
            if state.get(name) != value:
                raise ValueError(f"the sampler's state has {name} = {state.get(name)!r}, this sampler {value!r}")
        groups = cast(int, state["groups"])
        if groups > len(self._index):
            raise ValueError(
                f"the sampler's state knows {groups} groups, and only {len(self._index)} were fed; "
                "feed the columns of the checkpoint's snapshot first"
            )
        epoch, population, position, *deferred = cast(list[int], state["walk"])
        self._history = DrawCounts.from_runs(len(self._index), cast(list[list[int]], state["runs"]))
        self._walk = Walk(epoch, population, position, tuple(deferred)).ordered(self._seed)
        self._k = cast(int, state["k"])

    @property
    def nbytes(self) -> int:
        """Bytes held for the index, the history and the order of an epoch."""
        return self._index.nbytes + self._history.nbytes + self._walk.order.nbytes

    def _identity(self) -> dict[str, Json]:
        return {"format": STATE_FORMAT, "mode": type(self._mode).__name__.lower(), "seed": self._seed}

    def _drop(self, k: int) -> tuple[Dropped, ...]:
        """Close what can never be drawn (again); report those of them that never were."""
        start = self._history.first_open
        mine = self._mine(start)
        dropped: dict[int, Cause] = {}
        for cause, hopeless in self._hopeless(k, start).items():
            found = start + np.flatnonzero(hopeless & mine & (self._history.uses[start:] != CLOSED))
            dropped |= dict.fromkeys(found[self._history.uses[found] == 0].tolist(), cause)
            self._history.close(found)
        return tuple(Dropped(ordinal, dropped[ordinal]) for ordinal in sorted(dropped))

    def _hopeless(self, k: int, start: int) -> dict[Cause, NDArray[np.bool_]]:
        """Which groups from `start` on can never be drawn, by cause; the first cause counts."""
        limits, rows = self._limits, self._index.columns
        ripe, version = rows.ripe[start:], rows.oldest_version[start:]
        causes: dict[Cause, NDArray[np.bool_]] = {}
        if limits.max_lag is not None:
            causes["expired"] = (version != NO_VERSION) & (version < k - limits.max_lag)
        causes["too-small"] = ripe & (rows.scored[start:] < 2)
        if limits.drop_zero_variance:
            causes["zero-variance"] = ripe & (rows.reward_std[start:] <= limits.variance_tolerance)
        return causes

    def _mine(self, start: int) -> NDArray[np.bool_]:
        """Groups from `start` on of the tasks and sources to draw from."""
        limits, rows = self._limits, self._index.columns
        mine = np.ones(len(self._index) - start, np.bool_)
        if limits.tasks is not None:
            mine &= np.isin(rows.task[start:], sorted(limits.tasks))
        if limits.sources is not None:
            mine &= (rows.sources[start:] & np.uint32(limits.sources)) != 0
        return mine

    def _view(self, k: int) -> View:
        start, rows = self._history.first_open, self._index.columns
        uses, version = self._history.uses[start:], rows.oldest_version[start:]
        oldest = NO_VERSION if self._limits.max_lag is None else k - self._limits.max_lag
        return View(
            k,
            batch=self._limits.batch,
            seed=self._seed,
            start=start,
            # A run that was resumed finds groups of versions it has yet to reach (again): they are for later.
            able=(uses != CLOSED) & rows.ripe[start:] & self._mine(start) & (version <= k),
            due=(version != NO_VERSION) & (version <= oldest),
            uses=uses,
            last=self._history.last[start:],
            oldest_version=version,
            reward_mean=rows.reward_mean[start:],
            reward_std=rows.reward_std[start:],
        )
