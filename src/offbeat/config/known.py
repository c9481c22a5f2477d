"""What is known about the lag of a run before it starts. No torch.

    refused               settings contradict each other, or the data lack what the formula needs: not here
    known to lose         a row of ours or a paper says so; a run needs `accept = true`, and records it
    nobody has shown it   a warning

A row speaks about its own objective, at its lag and learning rate and above, for models of its size and larger: at the
same rate, these drift further.
"""

from dataclasses import dataclass, fields, replace
from enum import StrEnum
from functools import cache
from itertools import chain
from math import inf, log
from typing import Final

from offbeat.config.config import Config
from offbeat.config.conflicts import conflicts, first_fix
from offbeat.config.objective import ObjectiveConfig
from offbeat.objective.measured import MeasuredLag, measured_lags
from offbeat.objective.presets import PRESETS, Preset
from offbeat.objective.spec import KL, Aggregate, CutOff, Need, Objective

REPORTED_RATE: Final = 1e-6
"""The learning rate of most reports; up to twice as much is alike."""
ADAPTER_FACTOR: Final = 10
"""An adapter learns at so many times the rate for the same drift."""
SIMILAR: Final = 4
"""Models whose sizes differ by no larger factor are alike."""
SMALLEST_REPORTED: Final = 10_000_000
"""Parameters below which a report, which is about language models, says nothing."""
CANDIDATES: Final = (100, 50, 20, 10, 5, 4, 2, 1, 0)
"""Steps of lag, or between two publishes, that advice may name."""


class Doubt(StrEnum):
    """How bad it is."""

    LOSES = "known to lose"
    UNSHOWN = "nobody has shown it"


@dataclass(frozen=True)
class LagFinding:
    """A sentence about the lag of a run, and the row of figures that it names."""

    level: Doubt
    text: str
    row: str


@dataclass(frozen=True)
class LagEvidence:
    """The lag of a run, beside the rows and reports about it.

    >>> from offbeat.config import parse
    >>> far = parse({"sync": {"every": 10}, "optimizer": {"learning_rate": 5e-6}})
    >>> LagEvidence(far).finding().row
    'evidence.smollm2.v10-loss'
    """

    config: Config
    parameters: float = inf
    """Parameters of the model. One of unknown size counts as larger than any that was measured."""
    any_age: bool = False
    """True if it trains on groups of unknown versions beside its own."""
    logprobs: bool = True
    """False if the groups of its log have no log-probs, so that objectives which need them are no way out."""

    def finding(self) -> LagFinding | None:
        """Return what speaks against this lag; None if nothing does."""
        if (row := self.losing_row()) is not None:
            says = f"in our runs {self.config.objective.preset!r} {row}"
            if self._preset is not None and self._preset.collapses:
                says = f"{self._preset.collapses}, and {says}"
            ways = "accepted"
            if not self.config.accept:
                ways = ", or ".join([*self._ways(), "set accept = true (`--accept`) to train anyway"])
            return LagFinding(Doubt.LOSES, f"{self._setting()}, which is known to lose: {says}; {ways}", row.row)
        if not self.is_shown():
            row = self._nearest()
            return LagFinding(Doubt.UNSHOWN, f"{self._setting()}, and {self._unshown(row)}", row.row)
        return None

    def losing_row(self) -> MeasuredLag | None:
        """Return the row by which the run is known to lose: of the most similar model, and there of the nearest lag."""
        rows = [row for row in _rows(self.config) if row.verdict == "fails"]
        if self._preset is not None and self._preset.collapses and self._largest_lag > 0:
            return self._first_of([row for row in rows if not row.replay])
        return self._first_of([row for row in rows if self._speaks(row)])

    def is_shown(self) -> bool:
        """True if a report or rows of similar models say that a run learns with this lag."""
        if self._largest_lag == 0:
            return True
        reported = -1.0 if self._preset is None else self._preset.reported_lag
        if self._largest_lag <= reported and self._rate <= 2 * REPORTED_RATE and self.parameters >= SMALLEST_REPORTED:
            return True
        if self.any_age or self._largest_lag == inf:
            return False
        alike = [row for row in _rows(self.config) if self._size_apart(row) <= log(SIMILAR) and row.rate >= self._rate]
        tolerated = {row.v if not row.replay else 0 for row in alike if row.verdict == "tolerates"}
        if self._replays and 0 not in tolerated:
            return False
        shortest_failed = min((row.v for row in alike if row.verdict != "tolerates" and not row.replay), default=inf)
        return self._fresh_lag < min(max(tolerated | {1}), shortest_failed)

    @property
    def _preset(self) -> Preset | None:
        """The published objective; None for one of the user's own."""
        known = self.config.objective.known
        return known if known.source else None

    @property
    def _rate(self) -> float:
        rate = self.config.optimizer.learning_rate
        return rate / ADAPTER_FACTOR if self.config.adapter.rank else rate

    @property
    def _fresh_lag(self) -> int:
        """The largest lag of fresh groups, in updates."""
        return (self.config.fresh_lag + 1) * self.config.updates_per_batch - 1

    @property
    def _largest_lag(self) -> float:
        return inf if self.any_age else self.config.largest_lag

    def _speaks(self, row: MeasuredLag) -> bool:
        """True if a row that fails was measured at no more lag, rate, size and drift than this run allows itself.

        Data of other policies has no lag in steps, and a rule by cost publishes before its gate stops too much.
        """
        config = self.config
        if config.run.mode == "offline" or self._rate < row.rate or self.parameters < row.parameters / SIMILAR:
            return False
        if row.replay:
            return self._replays
        if self._fresh_lag >= row.v - 1 and not config.sync.by_cost:
            return _reaches(config.sync.drift_budget, row)
        return self._replays_like_fresh and self._largest_lag >= row.v - 1 and _reaches(config.retire_drift, row)

    @property
    def _replays(self) -> bool:
        return self.config.sampler.mode == "replay"

    @property
    def _replays_like_fresh(self) -> bool:
        """True if only rows about fresh groups can tell what this objective makes of replayed ones."""
        return self._replays and not any(row.replay for row in _rows(self.config))

    def _size_apart(self, row: MeasuredLag) -> float:
        return abs(log(min(self.parameters, 1e12) / row.parameters))

    def _first_of(self, rows: list[MeasuredLag]) -> MeasuredLag | None:
        return min(rows, key=lambda row: (self._size_apart(row), abs(row.v - 1 - self._fresh_lag)), default=None)

    def _nearest(self) -> MeasuredLag:
        """Return the row that comes nearest to this run, of another objective if its own was not measured."""
        own = _rows(self.config)
        rows = [row for row in own if row.replay == self._replays] or own
        if not rows:
            asked = _under_lag(self.config.objective.resolve())
            rows = [row for row in chain(*measured_lags().values()) if row.plain]
            most = max(_likeness(_objective_of(row), asked) for row in rows)
            rows = [row for row in rows if _likeness(_objective_of(row), asked) == most]
        nearest = self._first_of(rows)
        assert nearest is not None, "the package holds rows"
        return nearest

    def _unshown(self, row: MeasuredLag) -> str:
        """Return what was reported and measured instead of it."""
        preset, rate = self._preset, f"{self.config.optimizer.learning_rate:g}"
        known = "nothing is reported about it"
        if preset is not None:
            age = "data of any age" if preset.reported_lag == inf else f"lag up to {preset.reported_lag:g}"
            known = f"it is reported for {age} at learning rates of about {REPORTED_RATE:g} ({preset.lag_evidence})"
        own = row in _rows(self.config)
        measured = f"in our runs it {row}" if own else f"our nearest runs are of {row.preset!r}, which {row}"
        return f"nobody has shown that {self.config.objective.preset!r} learns with it at {rate}: {known}; {measured}"

    def _setting(self) -> str:
        """Return the setting that gives the lag, and how much."""
        config = self.config
        if self.any_age:
            return f"run.experience = {config.run.experience!r} holds groups without a policy version, of any age"
        if config.run.mode == "offline":
            return "run.mode = 'offline' trains on data of any age"
        updates = f" with updates_per_batch = {config.updates_per_batch}" if config.updates_per_batch > 1 else ""
        if self._replays and config.retire_age > config.fresh_lag:
            setting = f"sampler.retire_age = {config.retire_age}"
        elif config.run.max_lag is not None:
            setting = f"run.max_lag = {config.run.max_lag}"
        else:
            setting = f"sync.offset = {config.sync.offset}" if config.sync.offset else f"sync.every = {config.longest}"
        return f"{setting}{updates} gives lag up to {config.largest_lag:g}"

    def _ways(self) -> list[str]:
        """Return changes after which nothing speaks against the run."""
        config, rate = self.config, REPORTED_RATE * (ADAPTER_FACTOR if self.config.adapter.rank else 1)
        ways = [
            first_fix(config, "run", "max_lag", CANDIDATES, self._is_quiet, below=config.run.max_lag or 0),
            first_fix(config, "sync", "offset", CANDIDATES, self._is_quiet, below=config.sync.offset),
            first_fix(config, "sync", "every", CANDIDATES[:-1], self._is_quiet, below=config.longest),
            first_fix(
                config, "sampler", "retire_age", CANDIDATES, self._is_quiet, below=self._replays * config.retire_age
            ),
            first_fix(config, "optimizer", "learning_rate", [rate], self._is_quiet),
        ]
        sampler = config.sampler.model_copy(update={"mode": "fresh"})
        if self._replays and self._is_quiet(config.model_copy(update={"sampler": sampler})):
            ways.append("set sampler.mode = 'fresh'")
        presets = [
            name
            for name, one in PRESETS.items()
            if (self.logprobs or Need.BEHAVIOR not in one.objective.needs) and self._is_quiet(with_preset(config, name))
        ]
        return [*filter(None, ways), *([f"choose one of {', '.join(presets)}"] if presets else [])]

    def _is_quiet(self, config: Config) -> bool:
        changed = replace(self, config=config)
        return changed.losing_row() is None and changed.is_shown() and not conflicts(config)


def _reaches(limit: float | None, row: MeasuredLag) -> bool:
    """True if data may drift as far as in the runs of a row."""
    return limit is None or (row.drift is not None and limit >= row.drift)


def with_preset(config: Config, name: str) -> Config:
    """Return the configuration with another preset and the same changes to it."""
    objective = config.objective if config.objective.preset in PRESETS else ObjectiveConfig()
    return config.model_copy(update={"objective": objective.model_copy(update={"preset": name})})


def _rows(config: Config) -> list[MeasuredLag]:
    """Return the rows about an objective that differs from the run's in nothing that matters under lag."""
    asked = _under_lag(config.objective.resolve())
    return [row for row in chain(*measured_lags().values()) if _objective_of(row) == asked]


def _likeness(one: Objective, other: Objective) -> int:
    """Return how alike two objectives are: equal choices, where the kind of gate and of weight decides under lag."""
    kinds = [type(getattr(one, axis)) is type(getattr(other, axis)) for axis in ("gate", "weight")]
    equal = [bool(getattr(one, axis.name) == getattr(other, axis.name)) for axis in fields(Objective)]
    return 3 * sum(kinds) + sum(equal)


@cache
def _objective_of(row: MeasuredLag) -> Objective:
    return _under_lag(ObjectiveConfig.model_validate({"preset": row.preset, **row.changes}).resolve())


def _under_lag(objective: Objective) -> Objective:
    """Leave out what decides about normalization, masks and the reference policy."""
    terms = tuple(term for term in objective.regularizers if not isinstance(term, KL))
    return replace(
        objective, epsilon=Objective.epsilon, truncated=CutOff.SCORE, zero_variance_mask=False, regularizers=terms,
        aggregate=Aggregate.TOKEN_MEAN,
    )  # fmt: skip
