"""Every setting as text, and the setting that is meant by a name that we do not have. No torch.

`synonyms.toml` has the names of TRL, verl, OpenRLHF and prime-rl, and words of habit such as lr.
"""

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Final

from offbeat.config.config import Config
from offbeat.errors import nearest, suggest_nearest

Schema = dict[str, Any]
"""The JSON schema that pydantic builds from the sections."""
SIMILAR: Final = 0.75
"""Names at least this similar count as the same name mistyped."""


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


@dataclass(frozen=True)
class Synonym:
    """A name of another tool.

    >>> synonyms()["beta"]
    Synonym(tool='trl', name='beta', setting='objective.kl_coefficient', note='')
    """

    tool: str
    name: str
    setting: str
    """The nearest setting; empty if there is none."""
    note: str
    """What differs; empty if the setting takes the same value."""

    def hint(self) -> str:
        """Return what to write instead, as part of a message."""
        meant = f"did you mean {self.setting!r}?" if self.setting else "there is no such setting here."
        return f"{meant} {self.note}".rstrip()


@cache
def synonyms() -> Mapping[str, Synonym]:
    """Return all synonyms by name, in the order of the file."""
    tools = tomllib.loads(files("offbeat.config").joinpath("synonyms.toml").read_text(encoding="utf-8"))
    found: dict[str, Synonym] = {}
    for tool, names in tools.items():
        for name, meaning in names.items():
            setting, note = (meaning, "") if isinstance(meaning, str) else meaning
            found[name] = Synonym(tool, name, setting, note)
    return found


def place(name: str) -> str | None:
    """Return the setting that takes the value of `name`, or None if there is none or its value means something else.

    >>> place("learning_rate"), place("lr"), place("temperature"), place("sync.every")
    ('optimizer.learning_rate', 'optimizer.learning_rate', 'sampling.temperature', 'sync.every')
    >>> place("epsilon")  # of TRL: the clip, which is a pair here
    """
    if name in _tables():
        return name
    if (synonym := synonyms().get(name)) is not None:
        return synonym.setting if synonym.setting and not synonym.note else None
    return next(iter(_settings_called(name)), None)


def suggest_setting(key: str) -> str:
    """Return a hint for a key that is not a setting: a name of another tool, of another table, or a mistyped one.

    >>> suggest_setting("optimizer.lr")
    "did you mean 'optimizer.learning_rate'?"
    >>> suggest_setting("sampling.max_tokns")
    "did you mean 'sampling.max_tokens'?"
    """
    if (synonym := _synonym_of(key)) is not None:
        return synonym.hint()
    if same := _settings_called(key):
        return f"did you mean {' or '.join(map(repr, same))}?"
    if (longer := next((one for name, one in synonyms().items() if name.endswith(f".{key}")), None)) is not None:
        return longer.hint()
    table, _, name = key.rpartition(".")
    inside = {known.rpartition(".")[2]: known for known in _tables() if known.rpartition(".")[0] == table}
    if (near := nearest(name, inside, SIMILAR)) is not None:
        return f"did you mean {inside[near]!r}?"
    anywhere = {known.rpartition(".")[2]: known for known in _tables()} | {known: known for known in _tables()}
    if (near := nearest(key, {*anywhere, *synonyms()} - {table}, SIMILAR)) is not None:
        return synonyms()[near].hint() if near in synonyms() else f"did you mean {anywhere[near]!r}?"
    return suggest_nearest(name, inside or [known for known in _tables() if "." not in known])


def nearest_table(key: str) -> str | None:
    """Return the table, or the setting that takes one, that `key` is a misspelled name of."""
    return nearest(key, _tables(), SIMILAR)


@cache
def _tables() -> tuple[str, ...]:
    """Return every setting and the name of every table, in the order of the configuration."""
    found: dict[str, None] = {}
    for key in knobs():
        parts = key.split(".")
        found |= dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return tuple(found)


def _settings_called(key: str) -> list[str]:
    """Return the settings whose name ends like the key, the most similar table first."""
    found = [known for known in knobs() if known.rpartition(".")[2] == key.rpartition(".")[2]]
    first = nearest(key, found, 0.0)
    return sorted(found, key=lambda known: known != first)


def _synonym_of(key: str) -> Synonym | None:
    """Return the synonym that is the whole key, or else the longest end of it."""
    parts = key.split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((synonyms()[end] for end in ends if end in synonyms()), None)
