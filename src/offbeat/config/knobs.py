"""Every setting in words: what `explain` says of one, and what `init` writes above it."""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from offbeat.config import Config

Schema = dict[str, Any]
"""JSON schema, as pydantic makes it of the sections."""


@dataclass(frozen=True)
class Knob:
    """One setting.

    >>> knob = knobs()["sync.every"]
    >>> knob.kind, knob.default, knob.meaning[:24]
    ('a whole number, at least 1', '1', 'v: publish every v steps')
    """

    key: str
    kind: str
    """What values it takes."""
    default: str
    """As TOML; empty where the default is to leave it out."""
    meaning: str


@cache
def knobs() -> dict[str, Knob]:
    """All of them by key, in the order of the sections."""
    schema = Config.model_json_schema()
    return {knob.key: knob for knob in _of(schema, schema, "")}


def _of(section: Schema, root: Schema, before: str) -> list[Knob]:
    found = []
    for name, field in section["properties"].items():
        inner = _resolved(field, root)
        if "properties" in inner:
            found += _of(inner, root, f"{before}{name}.")
            continue
        default = "" if field["default"] is None else json.dumps(field["default"], ensure_ascii=False)
        found.append(Knob(before + name, _kind(inner, root), default, field["description"]))
    return found


def _resolved(schema: Schema, root: Schema) -> Schema:
    return root["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _kind(schema: Schema, root: Schema) -> str:
    """A schema in words.

    >>> _kind({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, {})
    'a number, above 0, at most 1'
    """
    schema = _resolved(schema, root)
    if "anyOf" in schema:
        return " or ".join(_kind(one, root) for one in schema["anyOf"] if one.get("type") != "null")
    if "enum" in schema:
        return "one of " + ", ".join(f'"{choice}"' for choice in schema["enum"])
    if "prefixItems" in schema:
        return f"a list of {len(schema['prefixItems'])}: {_kind(schema['prefixItems'][0], root)}"
    if schema.get("type") == "array":
        return f"a list of any of: {_kind(schema['items'], root).removeprefix('one of ')}"
    names = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}
    limits = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    words = [
        names.get(schema["type"], "a table"),
        *(f"{says} {schema[key]:g}" for key, says in limits.items() if key in schema),
    ]
    return ", ".join(words)
