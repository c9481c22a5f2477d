"""The constants that only some presets have, as settings: where each is, how it is changed, what to say without it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from offbeat.objective.spec import (
    CentredBand,
    ExpWeight,
    GroupESS,
    Importance,
    NoGate,
    Objective,
    OneSide,
    Reject,
    Ring,
    SecondMoment,
    SquaredLogRatio,
    Truncate,
    TwoSide,
)

CLIPPED: Final = (OneSide, TwoSide, Ring, CentredBand)
"""The gates with a clip."""


@dataclass(frozen=True)
class Constant:
    """A number, or a pair of numbers, that only some presets have: fields of the choice on one axis."""

    name: str
    """Of the setting."""
    axis: str
    choices: tuple[type, ...]
    """The classes that have it."""
    fields: tuple[str, ...]
    without: str
    """What to say of an objective without it, after "has"."""
    when: Callable[[Any], bool] = lambda part: True
    """Whether a choice of these classes uses it."""

    def in_preset(self, objective: Objective) -> bool:
        return any(self._has(part) for part in self._parts(objective))

    def _parts(self, objective: Objective) -> tuple[Any, ...]:
        part = getattr(objective, self.axis)
        return part if isinstance(part, tuple) else (part,)

    def _has(self, part: object) -> bool:
        return isinstance(part, self.choices) and self.when(part)

    def change(self, objective: Objective, value: Any) -> Objective:
        """Return the objective with another value."""
        values = value if isinstance(value, tuple) else (value,)
        parts = tuple(self._changed(part, values) if self._has(part) else part for part in self._parts(objective))
        changed: Any = parts if isinstance(getattr(objective, self.axis), tuple) else parts[0]
        return replace(objective, **{self.axis: changed})

    def _changed(self, part: Any, values: tuple[float, ...]) -> Any:
        if isinstance(part, CentredBand):
            return CentredBand(values[0])
        return replace(part, **dict(zip(self.fields, values, strict=True)))

    def missing(self, objective: Objective) -> str:
        """Return what to say of an objective without it, after "has"."""
        if self.name == "clip" and not isinstance(objective.gate, NoGate):
            limit = ", whose limit is objective.m2_limit" if isinstance(objective.gate, SecondMoment) else ""
            return f"a gate without a clip{limit}"
        if self.name == "temperature" and objective.exp_weight is not None:
            return "a temperature that is chosen per batch, within objective.temperature_range"
        return self.without


CONSTANTS: Final = (
    Constant("clip", "gate", CLIPPED, ("low", "high"), "no gate"),
    Constant("outer_clip", "gate", (Ring,), ("outer_low", "outer_high"), "no ring"),
    Constant("m2_limit", "gate", (SecondMoment,), ("limit",), "no gate on the second moment of the batch"),
    Constant("weight_cap", "weight", (Importance,), ("cap",), "no importance weight"),
    Constant("correction_cap", "correction", (Truncate,), ("cap",), "no correction factor π_k/α"),
    Constant("reject_band", "reject", (Reject,), ("low", "high"), "no band of π_k/α that rejects completions"),
    Constant("min_ess", "reject", (GroupESS,), ("least",), "no gate on the effective sample size of a group"),
    Constant(
        "temperature", "exp_weight", (ExpWeight,), ("temperature",), "no exponential weight",
        when=lambda weight: not weight.adaptive,
    ),
    Constant(
        "temperature_range", "exp_weight", (ExpWeight,), ("lowest", "highest"),
        "no temperature that is chosen per batch", when=lambda weight: weight.adaptive,
    ),
    Constant("exponent_cap", "exp_weight", (ExpWeight,), ("cap",), "no exponential weight"),
    Constant("tau", "regularizers", (SquaredLogRatio,), ("tau",), "no square of the log-ratio"),
)  # fmt: skip
"""The settings that a preset may lack. They are refused there."""
