"""The axes of an objective as text and tables: `gate = {kind = "one-side", low = 0.2, high = 0.28}`. No torch.

A table names one of the classes of `objective/spec.py` and sets its fields. Advantage, gate and weight may also be a
function of your own, as `file.py:name`.
"""

from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, fields
from enum import Enum
from math import isinf
from typing import Any, Final

from offbeat.errors import OwnPartError, suggest_nearest
from offbeat.imports import is_reference, load_module, load_own
from offbeat.objective.spec import (
    KL,
    CentredBand,
    ExpWeight,
    GroupESS,
    Importance,
    NoGate,
    Objective,
    One,
    OneSide,
    OwnFunction,
    Reject,
    Ring,
    SecondMoment,
    SquaredLogRatio,
    Tapered,
    Truncate,
    TwoSide,
)

KINDS: Final[Mapping[str, Mapping[str, type | None]]] = {
    "gate": {
        "none": NoGate, "one-side": OneSide, "two-side": TwoSide, "band": TwoSide, "ring": Ring,
        "centred-band": CentredBand, "second-moment": SecondMoment,
    },
    "weight": {"one": One, "importance": Importance, "tapered": Tapered},
    "correction": {"none": None, "truncate": Truncate},
    "reject": {"none": None, "band": Reject, "group-ess": GroupESS},
    "exp_weight": {"none": None, "exponential": ExpWeight},
    "regularizers": {"kl": KL, "squared-log-ratio": SquaredLogRatio},
}  # fmt: skip
"""What `kind` may be on each axis that is a table."""
OWN: Final = ("advantage", "gate", "weight")
"""The axes that a function of your own may be on."""

Refer = Callable[[object], str]
"""From a function to the reference under which another process finds it."""


def part_of(axis: str, given: object) -> Any:
    """Return the choice that a table, the name of a kind, or a reference makes; raise `ValueError` with what is wrong.

    >>> part_of("gate", {"kind": "band", "low": 0.2, "high": 2.0})
    TwoSide(low=0.2, high=2.0)
    >>> part_of("gate", {"kind": "band", "hi": 2.0})
    Traceback (most recent call last):
    ValueError: has 'hi', which kind 'band' does not take; did you mean 'high'?
    """
    if axis in OWN and isinstance(given, str) and is_reference(given):
        return OwnFunction(given)
    if axis == "regularizers" and isinstance(given, list):
        return tuple(part_of(axis, one) for one in given)
    table = given if isinstance(given, Mapping) else {"kind": given}
    kinds, kind = KINDS[axis], table.get("kind")
    if not isinstance(kind, str) or kind not in kinds:
        near = suggest_nearest(str(kind), kinds)
        own = ", or write your own function as 'file.py:name'" if axis in OWN and not near.startswith("did") else ""
        raise ValueError(f"has kind {kind!r}; {near}{own}")
    chosen = kinds[kind]
    known = {} if chosen is None else {field.name: field for field in fields(chosen)}
    values = {}
    for name, value in table.items():
        if name in known:
            values[name] = _value(known[name], value)
        elif name != "kind":
            what = suggest_nearest(name, known) if known else "remove it"
            raise ValueError(f"has {name!r}, which kind {kind!r} does not take; {what}")
    for name, field in known.items():
        if field.default is MISSING and name not in values:
            raise ValueError(f"has no {name!r}, which kind {kind!r} needs; write {{kind = {kind!r}, {name} = …}}")
    return None if chosen is None else chosen(**values)


def _value(field: "Field[Any]", given: object) -> object:
    """Check one field of a choice by its type: a number of at least 0, true or false, or the name of a choice."""
    if isinstance(field.type, type) and issubclass(field.type, Enum):
        choices = {one.value: one for one in field.type}
        if given not in choices:
            raise ValueError(f"has {field.name} = {given!r}; {suggest_nearest(str(given), choices)}")
        return choices[given]
    if field.type is bool:
        if not isinstance(given, bool):
            raise ValueError(f"has {field.name} = {given!r}; it takes true or false")
    elif isinstance(given, bool) or not isinstance(given, int | float) or not given >= 0:
        raise ValueError(f"has {field.name} = {given!r}; it takes a number of at least 0")
    return given


def table_of(axis: str, part: object, refer: Refer) -> Any:
    """Return the table or the reference from which `part_of` makes the same choice. Limits of infinity are left out.

    >>> table_of("gate", TwoSide(0.2, 2.0), refer=repr)
    {'kind': 'two-side', 'low': 0.2, 'high': 2.0}
    """
    if isinstance(part, OwnFunction):
        return part.target
    if isinstance(part, tuple):
        return [table_of(axis, one, refer) for one in part]
    for kind, chosen in KINDS[axis].items():
        if part is None or (chosen is not None and type(part) is chosen):
            values = {} if chosen is None else {field.name: getattr(part, field.name) for field in fields(chosen)}
            plain = {name: one.value if isinstance(one, Enum) else one for name, one in values.items()}
            return {"kind": kind, **{name: one for name, one in plain.items() if not _is_infinite(one)}}
    return refer(part)


def _is_infinite(value: object) -> bool:
    return isinstance(value, float) and isinf(value)


def objective_table(objective: Objective, refer: Refer) -> dict[str, Any]:
    """Return an objective as the table [objective], every axis of it.

    >>> objective_table(Objective(gate=OneSide(high=0.28)), refer=repr)["gate"]
    {'kind': 'one-side', 'low': 0.2, 'high': 0.28}
    """
    found: dict[str, Any] = {}
    for axis in (field.name for field in fields(objective)):
        part = getattr(objective, axis)
        if axis in KINDS:
            found[axis] = table_of(axis, part, refer)
        elif isinstance(part, OwnFunction):
            found[axis] = part.target
        else:
            found[axis] = part.value if isinstance(part, Enum) else refer(part) if callable(part) else part
    return found


def with_own_objective(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table [objective] with every axis of the `Objective` that its `preset` refers to.

    A table that has every axis is recorded, and no file is loaded for it.
    """
    preset, given = table.get("preset"), {name: value for name, value in table.items() if value is not None}
    if not is_reference(preset) or {field.name for field in fields(Objective)} <= given.keys():
        return dict(table)
    objective, home = load_own(str(preset)), str(preset).rpartition(":")[0]
    if not isinstance(objective, Objective):
        raise OwnPartError(f"is a {type(objective).__name__}, not an Objective; write {home}:NAME of an Objective")
    named = vars(load_module(home))

    def refer(part: object) -> str:
        if (name := next((name for name, one in named.items() if one is part), None)) is None:
            raise OwnPartError(f"uses {part!r:.80}, which has no name in {home}; define it there with `def`")
        return f"{home}:{name}"

    return {**objective_table(objective, refer), **given}
