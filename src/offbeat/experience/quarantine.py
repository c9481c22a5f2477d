"""What the door refused, kept with the reason and as much of it as JSON can hold."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Final, Literal

import numpy as np
import pyarrow as pa

from offbeat.experience.door import Refusal
from offbeat.experience.schema import QUARANTINE

MAX_PAYLOAD: Final = 4_194_304
"""Characters of a payload; a longer one is cut and says so. What is cut was refused, and usually for its size."""

Kind = Literal["group", "score"]


@dataclass(frozen=True)
class Refused:
    """One thing that was refused.

    >>> from offbeat.experience.door import Reason
    >>> Refused("g7", Refusal(Reason.ID, "the prompt's id is ''"), payload='{"id":"g7"}').kind
    'group'
    """

    group_id: str
    """Empty where it had no usable id."""
    refusal: Refusal
    payload: str
    kind: Kind = "group"


def refused(thing: object, refusal: Refusal, *, kind: Kind = "group") -> Refused:
    """Take down what was refused. Never fails, whatever it is.

    >>> from offbeat.experience.door import Reason
    >>> refused({"id": "g7", "reward": float("nan")}, Refusal(Reason.NOT_A_GROUP, "found a dict")).payload
    '{"id": "g7", "reward": "nan"}'
    """
    name = getattr(thing, "group_id" if kind == "score" else "id", None)
    try:
        payload = json.dumps(_plain(thing, depth=0))
    except (ValueError, TypeError, RecursionError) as error:
        payload = json.dumps(f"not expressible as JSON: {error}")
    if len(payload) > MAX_PAYLOAD:
        payload = json.dumps({"cut": True, "characters": len(payload), "begins": payload[: MAX_PAYLOAD // 2]})
    return Refused(_storable(name) if isinstance(name, str) else "", refusal, payload, kind)


def _storable(text: str) -> str:
    return text[:65_536].encode(errors="backslashreplace").decode()


def _plain(value: object, depth: int) -> object:
    """Anything as plain JSON; what JSON has no word for becomes its repr."""
    if depth > 32:
        return "…"
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if np.isfinite(value) else str(value)
        case np.ndarray():
            return _plain(value.tolist(), depth)
        case np.generic():
            return _plain(value.item(), depth)
        case dict():
            return {str(key): _plain(part, depth + 1) for key, part in value.items()}
        case list() | tuple():
            return [_plain(part, depth + 1) for part in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name), depth + 1) for f in fields(value)}
    return f"{value!r:.200}"


def quarantine_rows(entries: Sequence[Refused], *, at: float, writer: str) -> pa.Table:
    """Refusals as rows of `quarantine`."""
    columns = {
        "group_id": [entry.group_id for entry in entries],
        "kind": [entry.kind for entry in entries],
        "reason": [str(entry.refusal.reason) for entry in entries],
        "detail": [_storable(entry.refusal.detail) for entry in entries],
        "payload": [entry.payload for entry in entries],
        "writer": [writer] * len(entries),
        "at": [at] * len(entries),
    }
    return pa.table(columns, schema=QUARANTINE)
