"""Health rules: warn about a broken run, pause it or stop it, before a night is lost.

A rule looks at one metric of each step. It fires when the value has been beyond its limit for `patience` steps in a
row, and names the groups to look at.
"""

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Final

from offbeat.config import Config
from offbeat.config.sections import OptimizerConfig
from offbeat.errors import suggest_nearest
from offbeat.metrics import METRICS
from offbeat.scoring.tally import failure_of
from offbeat.trainer.checkpoint import saved_folders
from offbeat.types import Group, GroupDrift

NAMED: Final = 3
"""Groups that the text of an alarm names."""


class Action(StrEnum):
    """What an alarm does."""

    WARN = "warn"
    PAUSE = "pause"
    """Save a checkpoint and wait for a person."""
    STOP = "stop"
    """End the run with an error, before what the step made is published or saved."""


@dataclass(frozen=True)
class Rule:
    """A limit for one declared metric; an undeclared name is an error at once, not a rule that never fires.

    >>> rule = Rule("ess", below=0.1, patience=2)
    >>> rule.is_broken({"ess": 0.05}), rule.is_broken({"ess": 0.5}), rule.is_broken({})
    (True, False, False)
    >>> Rule("es", below=0.1)
    Traceback (most recent call last):
    ValueError: a health rule needs a metric declared in offbeat.metrics, not 'es'; did you mean 'ess'?
    """

    metric: str
    below: float | None = None
    above: float | None = None
    patience: int = 1
    action: Action = Action.WARN
    advice: str = ""
    by_lag: bool = False
    """True if publishing more often keeps the metric within its limit."""

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            hint = suggest_nearest(self.metric, METRICS)
            raise ValueError(f"a health rule needs a metric declared in offbeat.metrics, not {self.metric!r}; {hint}")

    def is_broken(self, metrics: Mapping[str, float]) -> bool:
        """True if this step is beyond a limit. NaN is beyond every limit; a metric that is not there is beyond none."""
        if (value := metrics.get(self.metric)) is None:
            return False
        low = self.below is not None and not value >= self.below
        return low or (self.above is not None and not value <= self.above)

    def __str__(self) -> str:
        limits = [f"below {self.below:g}"] if self.below is not None else []
        limits += [f"above {self.above:g}"] if self.above is not None else []
        return f"{self.metric} {' or '.join(limits)}"


SOONER: Final = "publish more often (sync.every), or lower optimizer.learning_rate"
DEFAULT_RULES: Sequence[Rule] = (
    Rule("drift_step", above=0.5, action=Action.STOP, advice="the step is too large: lower optimizer.learning_rate"),
    Rule("entropy", below=0.01, patience=5, advice="the policy has stopped exploring: lower optimizer.learning_rate"),
    Rule(
        "gate_stopped_gradient",
        above=0.5,
        patience=10,
        advice="the gate stops most of the gradient, so these steps hardly teach: " + SOONER,
        by_lag=True,
    ),
    Rule("drift_tv_token", above=0.3, patience=3, advice=SOONER, by_lag=True),
    Rule("ess", below=0.1, patience=3, advice="a few samples dominate the update: " + SOONER, by_lag=True),
    Rule(
        "ratio_tail_share",
        above=0.05,
        patience=3,
        advice="a few tokens have extreme ratios: " + SOONER,
        by_lag=True,
    ),
    Rule(
        "unscorable_share",
        above=0.2,
        patience=3,
        action=Action.PAUSE,
        advice="a reward function is broken: look at its errors",
    ),
    Rule(
        "answer_fault_share",
        above=0.2,
        patience=3,
        advice="many answers make the reward function fail: look at them, and set answer_fault to a penalty",
    ),
    Rule(
        "right_unscorable_share",
        above=0.0,
        advice="the reward function fails on right answers, which are left out: fix the error that the groups show",
    ),
    Rule(
        "engine_gap",
        above=0.5,
        patience=3,
        action=Action.PAUSE,
        advice="engine and trainer disagree about the same weights",
    ),
)


def rules_for(config: Config) -> Sequence[Rule]:
    """Return the default rules, with the drift at which the run's objective fails in our own runs, if that is known.

    Groups of other runs and models drift by nature, so a run that trains on them keeps the default limit.
    """
    preset = config.objective.known
    limit, foreign = preset.drift_limit, config.run.mode == "offline" or config.run.experience
    # Elsewhere the lag of a batch does not say after how many steps its limit was passed.
    in_turns = config.run.mode == "lockstep" and config.sampler.mode == "fresh" and not config.sync.offset
    rules = [rule if in_turns else replace(rule, by_lag=False) for rule in DEFAULT_RULES]
    rules[0] = replace(rules[0], above=config.optimizer.max_step_drift)
    if limit is None or foreign:
        return rules
    known = f"{preset.name} learns worse at such drift (offbeat objectives {preset.name}): "
    return [
        replace(rule, above=min(rule.above, limit), advice=known + rule.advice)
        if rule.metric == "drift_tv_token" and rule.above is not None
        else rule
        for rule in rules
    ]


@dataclass(frozen=True)
class Alarm:
    """A rule that fired."""

    rule: Rule
    value: float
    groups: tuple[str, ...]
    """The groups of the batch at which it fired, those to look at first."""
    run: str = "RUN"
    """The run directory, for the command in the text."""
    lag: float = 0.0
    """The lag of the batch, as far as it is known."""

    def __str__(self) -> str:
        advice = f": {self.rule.advice}" if self.rule.advice else ""
        if self.rule.by_lag and self.lag >= 1:
            advice += f"; at lag {self.lag:g}, so set sync.every = {max(1, int(self.lag) + 1 - self.rule.patience)}"
        steps = f" for {self.rule.patience} steps" if self.rule.patience > 1 else ""
        return f"{self.rule}{steps}, now {self.value:.4g}{advice}{self._look}"

    @property
    def _look(self) -> str:
        """The command that shows the groups to look at first.

        >>> print(Alarm(Rule("ess", below=0.1), 0.05, ("g-7", "g-2", "g-1", "g-9"), "runs/one"))
        ess below 0.1, now 0.05; look at: offbeat view runs/one --group g-7 --group g-2 --group g-1
        """
        if not self.groups:
            return ""
        options = " ".join(f"--group {shlex.quote(one)}" for one in self.groups[:NAMED])
        return f"; look at: offbeat view {shlex.quote(self.run)} {options}"


@dataclass
class Health:
    """Counts for how many steps in a row each rule has been broken.

    >>> health = Health([Rule("ess", below=0.1, patience=2)])
    >>> [len(health.check({"ess": value}, [], {})) for value in (0.05, 0.05, 0.05, 0.5, 0.05)]
    [0, 1, 0, 0, 0]
    """

    rules: Sequence[Rule] = DEFAULT_RULES
    run: str = "RUN"
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    healthy: int = 0
    """The last step at which every rule held. The newest checkpoint up to here is kept."""
    _broken_steps: dict[Rule, int] = field(default_factory=dict)

    def check(
        self, metrics: Mapping[str, float], groups: Sequence[Group], drift: Mapping[str, GroupDrift], step: int = 0
    ) -> list[Alarm]:
        """Return the alarms of step `step`. A rule that stays broken fires once, until it has held again.

        `groups` are those of the batch, and `drift` is what the trainer measured on each of them.
        """
        alarms = []
        for rule in self.rules:
            self._broken_steps[rule] = self._broken_steps.get(rule, 0) + 1 if rule.is_broken(metrics) else 0
            if self._broken_steps[rule] == rule.patience:
                suspects = _suspects(rule.metric, groups, drift)
                alarms.append(Alarm(rule, metrics[rule.metric], suspects, self.run, metrics.get("lag", 0.0)))
        if not any(self._broken_steps.values()):
            self.healthy = step
        return alarms

    def way_back(self) -> str:
        """Return the command that continues from the newest checkpoint up to the last step that was healthy."""
        saved = [int(folder.name.rpartition("-")[2]) for folder in saved_folders(Path(self.run) / "checkpoints")]
        step = max((one for one in saved if one <= self.healthy), default=0)
        rate, decay = self.optimizer.learning_rate, self.optimizer.weight_decay
        rate = rate / 10 if rate <= 1e-3 else 1e-6  # a tenth of a higher one may still be too high
        return (
            f"continue from {f'the checkpoint of step {step}' if step else 'the model'}, from before any rule broke: "
            f"offbeat resume {shlex.quote(self.run)} --from-step {step} --set optimizer.learning_rate={rate:g}"
            + (" --set optimizer.weight_decay=0" if rate * decay > 1e-3 else "")
        )


def _suspects(metric: str, groups: Sequence[Group], drift: Mapping[str, GroupDrift]) -> tuple[str, ...]:
    """Return the groups of a batch, those first that contribute most to an alarm about `metric`."""

    def order(group: Group) -> float:
        if metric in ("unscorable_share", "answer_fault_share", "right_unscorable_share"):
            return -sum(bool(failure_of(one.score)) for one in group.completions)
        measured = drift.get(group.id)
        if measured is None:
            return math.inf
        return measured.ess if metric == "ess" else -measured.tv

    return tuple(group.id for group in sorted(groups, key=order))
