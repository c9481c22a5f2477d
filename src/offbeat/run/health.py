"""Rules that say when a run is ill: warn, pause or stop, before a night is lost. Pure functions of metrics.

A rule looks at one metric of each step. It speaks when the value has been beyond its limit for `patience` steps in a
row.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class Action(StrEnum):
    """What an alarm does."""

    WARN = "warn"
    PAUSE = "pause"
    """Checkpoint and wait for a person."""
    STOP = "stop"
    """Checkpoint and end the run."""


@dataclass(frozen=True)
class Rule:
    """One limit.

    >>> rule = Rule("ess", below=0.1, patience=2)
    >>> rule.broken({"ess": 0.05}), rule.broken({"ess": 0.5}), rule.broken({})
    (True, False, False)
    """

    metric: str
    below: float | None = None
    above: float | None = None
    patience: int = 1
    action: Action = Action.WARN
    advice: str = ""

    def broken(self, metrics: Mapping[str, float]) -> bool:
        """Whether this step is beyond the limit; a value that is not a number is beyond every one."""
        if (value := metrics.get(self.metric)) is None:
            return False
        low = self.below is not None and not value >= self.below
        return low or (self.above is not None and not value <= self.above)

    def __str__(self) -> str:
        limits = [f"below {self.below:g}"] if self.below is not None else []
        limits += [f"above {self.above:g}"] if self.above is not None else []
        return f"{self.metric} {' or '.join(limits)}"


DEFAULT_RULES: Sequence[Rule] = (
    Rule("entropy", below=0.01, patience=5, advice="the policy has stopped exploring: lower the learning rate"),
    Rule("drift_tv_token", above=0.3, patience=3, advice="sync sooner, or lower the learning rate"),
    Rule("ess", below=0.1, patience=3, advice="a few samples speak for all: sync sooner"),
    Rule("ratio_tail_share", above=0.01, patience=3, advice="single tokens have run away: look at these groups"),
    Rule("unscorable_share", above=0.2, patience=3, action=Action.PAUSE, advice="the scorer is broken: look at it"),
    Rule("engine_gap", above=0.5, patience=3, action=Action.PAUSE, advice="the engine computes another model"),
)


@dataclass(frozen=True)
class Alarm:
    """A rule that spoke."""

    rule: Rule
    value: float
    groups: tuple[str, ...]
    """Of the batch it spoke at."""

    def __str__(self) -> str:
        advice = f": {self.rule.advice}" if self.rule.advice else ""
        steps = f" for {self.rule.patience} steps" if self.rule.patience > 1 else ""
        return f"{self.rule}{steps}, now {self.value:.4g}{advice}"


@dataclass
class Health:
    """Counts how long each rule has been broken.

    >>> health = Health([Rule("ess", below=0.1, patience=2)])
    >>> [len(health.look({"ess": value}, ["g7"])) for value in (0.05, 0.05, 0.05, 0.5, 0.05)]
    [0, 1, 0, 0, 0]
    """

    rules: Sequence[Rule] = DEFAULT_RULES
    _broken: dict[Rule, int] = field(default_factory=dict)

    def look(self, metrics: Mapping[str, float], groups: Sequence[str]) -> list[Alarm]:
        """Alarms of this step; a rule that stays broken speaks once until it has held again."""
        alarms = []
        for rule in self.rules:
            self._broken[rule] = self._broken.get(rule, 0) + 1 if rule.broken(metrics) else 0
            if self._broken[rule] == rule.patience:
                alarms.append(Alarm(rule, metrics[rule.metric], tuple(groups)))
        return alarms
