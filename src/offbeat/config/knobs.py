"""Every setting as text, for `offbeat explain` and for the comments that `offbeat init` writes."""

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from offbeat.config.config import Config

Schema = dict[str, Any]
"""The JSON schema that pydantic builds from the sections."""


@dataclass(frozen=True)
class Knob:
    """One setting of the configuration.

    >>> knob = knobs()["sync.every"]
    >>> knob.kind, knob.default, knob.meaning[:24]
    ('a whole number, at least 1', '', 'v: publish every v steps')
    """

    key: str
    kind: str
    """The values it takes, in words."""
    default: str
    """As TOML; empty if the setting is left out by default."""
    meaning: str


@cache
def knobs() -> dict[str, Knob]:
    """Return all settings by key, in the order of the sections."""
    schema = Config.model_json_schema()
    return {knob.key: knob for knob in _list_knobs(schema, schema, "")}


def _list_knobs(section: Schema, root: Schema, prefix: str) -> list[Knob]:
    found = []
    for name, field in section["properties"].items():
        inner = _resolve(field, root)
        if "properties" in inner:
            found += _list_knobs(inner, root, f"{prefix}{name}.")
            continue
        default = "" if field["default"] is None else json.dumps(field["default"], ensure_ascii=False)
        found.append(Knob(prefix + name, _kind(inner, root), default, " ".join(field["description"].split())))
    return found


def _resolve(schema: Schema, root: Schema) -> Schema:
    return root["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def _kind(schema: Schema, root: Schema) -> str:
    """Describe the values of a schema in words.

    >>> _kind({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, {})
    'a number, above 0, at most 1'
    """
    schema = _resolve(schema, root)
    if "anyOf" in schema:
        return " or ".join(_kind(option, root) for option in schema["anyOf"] if option.get("type") != "null")
    if "enum" in schema:
        return "one of " + ", ".join(f'"{choice}"' for choice in schema["enum"])
    if "prefixItems" in schema:
        return f"a list of {len(schema['prefixItems'])}: {_kind(schema['prefixItems'][0], root)}"
    if schema.get("type") == "array":
        return f"a list of any of: {_kind(schema['items'], root).removeprefix('one of ')}"
    if schema.get("format") == "reference":
        return 'your own as "file.py:name"'
    names = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}
    limits = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    words = [
        names.get(schema["type"], "a table"),
        *(f"{says} {schema[key]:g}" for key, says in limits.items() if key in schema),
    ]
    return ", ".join(words)
