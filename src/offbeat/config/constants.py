"""The constants that only some presets have, as settings: where each is, how it is changed, what to say without it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from offbeat.objective.spec import (
    CentredBand,
    Gate,
    GroupESS,
    Importance,
    Objective,
    OneSide,
    Reject,
    Ring,
    SecondMoment,
    SquaredLogRatio,
    TwoSide,
)

CLIPPED: Final = (OneSide, TwoSide, Ring, CentredBand)
"""The gates with a clip."""


@dataclass(frozen=True)
class Constant:
    """A number, or a pair of numbers, that only some presets have."""

    name: str
    """Of the setting."""
    in_preset: Callable[[Objective], bool]
    change: Callable[[Objective, Any], Objective]
    missing: Callable[[Objective], str]
    """What to say of an objective without it, after "has"."""


def _clip(gate: Gate, low: float, high: float) -> Gate:
    if isinstance(gate, CentredBand):
        return CentredBand(low)
    return replace(gate, low=low, high=high) if isinstance(gate, OneSide | TwoSide | Ring) else gate


def _no_clip(objective: Objective) -> str:
    if isinstance(objective.gate, SecondMoment):
        return "a gate without a clip, whose limit is objective.m2_limit"
    return "no gate"


def _no_temperature(objective: Objective) -> str:
    if objective.exp_weight is not None:
        return "a temperature that is chosen per batch, within objective.temperature_range"
    return "no exponential weight"


def _tau(objective: Objective, tau: float) -> Objective:
    terms = tuple(replace(r, tau=tau) if isinstance(r, SquaredLogRatio) else r for r in objective.regularizers)
    return replace(objective, regularizers=terms)


def _part(axis: str, *names: str) -> Callable[[Objective, Any], Objective]:
    """Return a change that sets the given fields of one axis to a number or a pair."""

    def change(objective: Objective, value: Any) -> Objective:
        values = value if isinstance(value, tuple) else (value,)
        part = replace(getattr(objective, axis), **dict(zip(names, values, strict=True)))
        return replace(objective, **{axis: part})

    return change


def _says(text: str) -> Callable[[Objective], str]:
    return lambda _: text


CONSTANTS: Final = (
    Constant(
        "clip",
        lambda o: isinstance(o.gate, CLIPPED),
        lambda o, pair: replace(o, gate=_clip(o.gate, *pair)),
        _no_clip,
    ),
    Constant(
        "outer_clip",
        lambda o: isinstance(o.gate, Ring),
        _part("gate", "outer_low", "outer_high"),
        _says("no ring"),
    ),
    Constant(
        "m2_limit",
        lambda o: isinstance(o.gate, SecondMoment),
        _part("gate", "limit"),
        _says("no gate on the second moment of the batch"),
    ),
    Constant(
        "weight_cap",
        lambda o: isinstance(o.weight, Importance),
        _part("weight", "cap"),
        _says("no importance weight"),
    ),
    Constant(
        "correction_cap",
        lambda o: o.correction is not None,
        _part("correction", "cap"),
        _says("no correction factor π_k/α"),
    ),
    Constant(
        "reject_band",
        lambda o: isinstance(o.reject, Reject),
        _part("reject", "low", "high"),
        _says("no band of π_k/α that rejects completions"),
    ),
    Constant(
        "min_ess",
        lambda o: isinstance(o.reject, GroupESS),
        _part("reject", "least"),
        _says("no gate on the effective sample size of a group"),
    ),
    Constant(
        "temperature",
        lambda o: o.exp_weight is not None and not o.exp_weight.adaptive,
        _part("exp_weight", "temperature"),
        _no_temperature,
    ),
    Constant(
        "temperature_range",
        lambda o: o.exp_weight is not None and o.exp_weight.adaptive,
        _part("exp_weight", "lowest", "highest"),
        _says("no temperature that is chosen per batch"),
    ),
    Constant(
        "exponent_cap",
        lambda o: o.exp_weight is not None,
        _part("exp_weight", "cap"),
        _says("no exponential weight"),
    ),
    Constant(
        "tau",
        lambda o: any(isinstance(term, SquaredLogRatio) for term in o.regularizers),
        _tau,
        _says("no square of the log-ratio"),
    ),
)
"""The settings that a preset may lack. They are refused there."""
