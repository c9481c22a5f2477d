"""From plain data to a valid configuration, or to everything wrong with it. No torch.

All problems are reported at once, each with the nearest valid value. Every problem starts with its key, so that
`toml_file.py` can add the line number.
"""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from offbeat.config.axes import with_own_objective
from offbeat.config.config import Config
from offbeat.config.conflicts import conflicts
from offbeat.config.knobs import knobs
from offbeat.config.sections import Section
from offbeat.config.synonyms import nearest, suggest_setting
from offbeat.errors import ConfigError, OwnPartError, suggest_nearest


@dataclass(frozen=True)
class Examined:
    """A configuration and everything wrong with it.

    >>> examined = examine({"group_sise": 8, "sync": {"every": 4, "at_least": 9}})
    >>> for problem in examined.problems:
    ...     print(problem)
    group_sise is not a setting; did you mean 'group_size'?
    sync.at_least = 9 leaves no step to publish at; set at most sync.every = 4
    """

    config: Config
    """Faulty settings have their defaults."""
    problems: list[str]
    faulty: frozenset[str]
    """Keys of faulty settings. Further problems that mention them are not reported."""

    def also(self, problems: Sequence[str]) -> "Examined":
        """Add problems, except those that only the default of a faulty setting causes."""
        new = [problem for problem in problems if not any(_names(problem, key) for key in self.faulty)]
        return Examined(self.config, self.problems + new, self.faulty)


def _names(problem: str, key: str) -> bool:
    """Return True if a problem names this setting. `steps` is also a word of sentences, and counts before its value.

    >>> _names("sync.every = 50 gives lag up to 49 steps", "steps"), _names("steps = 5 is below sync.every", "steps")
    (False, True)
    """
    value = "" if "." in key or "_" in key else " ="
    return re.search(rf"(?<![\w.]){re.escape(key)}(?!\.?\w){value}", problem) is not None


def examine(data: Mapping[str, Any]) -> Examined:
    """Find every problem: settings that are invalid by themselves, and settings that conflict."""
    problems: dict[str, list[str]] = {}
    data = with_tables(data)
    remaining: dict[str, Any] = copy.deepcopy(data)
    if isinstance(objective := data.get("objective"), Mapping):
        try:
            remaining["objective"] = with_own_objective(objective)
        except OwnPartError as wrong:
            problems["objective.preset"] = [f"objective.preset = {objective['preset']!r}: {wrong}"]
            del remaining["objective"]["preset"]
    while True:
        try:
            config = Config.model_validate(remaining)
            break
        except ValidationError as invalid:
            for error in invalid.errors():
                key = _leave_out(remaining, error["loc"])
                problems.setdefault(key, []).extend(_explain(key, data, dict(error)))
    faulty = frozenset(problems)
    return Examined(config, [message for found in problems.values() for message in dict.fromkeys(found)], faulty).also(
        conflicts(config)
    )


def with_tables(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data with `objective = "grpo"` written as the table that it stands for.

    >>> with_tables({"objective": "grpo"})
    {'objective': {'preset': 'grpo'}}
    """
    objective = data.get("objective")
    return {**data, "objective": {"preset": objective}} if isinstance(objective, str) else dict(data)


def parse(data: Mapping[str, Any]) -> Config:
    """Return a valid configuration, or raise a `ConfigError` that lists everything wrong with it."""
    examined = examine(data)
    if examined.problems:
        raise ConfigError(examined.problems)
    return examined.config


def _knobs() -> dict[str, FieldInfo]:
    return {key: field for key, field in _fields(Config) if _section(field) is None}


def _fields(section: type[BaseModel], prefix: str = "") -> list[tuple[str, FieldInfo]]:
    found = []
    for name, field in section.model_fields.items():
        found.append((prefix + name, field))
        if (inner := _section(field)) is not None:
            found += _fields(inner, f"{prefix}{name}.")
    return found


def _section(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _leave_out(data: dict[str, Any], location: Sequence[int | str]) -> str:
    """Remove the setting that an error is about, even if the error is deep inside its value; returns its key."""
    known = dict(_fields(Config))
    place = [str(location[0])]
    for part in location[1:]:
        if (field := known.get(".".join(place))) is None or _section(field) is None:
            break
        data = data[place[-1]]
        place.append(str(part))
    data.pop(place[-1], None)  # two errors may be about one value, as in a pair
    return ".".join(place)


def _explain(key: str, data: Mapping[str, Any], error: Mapping[str, Any]) -> list[str]:
    """Turn a pydantic error into messages with the key, the value and what to do."""
    given: Any = data
    for part in key.split("."):
        given = given[part]
    if error["type"] == "extra_forbidden":
        return [f"{unknown} is not a setting; {suggest_setting(unknown)}" for unknown in _unknown_keys(key, given)]
    return [f"{key} = {given!r:.80}{_what_is_wrong(key, given, error)}"]


def _unknown_keys(key: str, given: Any) -> list[str]:
    """Return the keys inside an unknown table, or its own if only its name is wrong."""
    if not isinstance(given, Mapping) or not given or _misspelled_table(key, given):
        return [key]
    return [unknown for name, inner in given.items() for unknown in _unknown_keys(f"{key}.{name}", inner)]


def _misspelled_table(key: str, given: Mapping[str, Any]) -> bool:
    meant = nearest(key)
    if (knob := knobs().get(str(meant))) is not None:
        return knob.kind == "a table"
    return all(f"{meant}.{name}" in knobs() for name in given)


def _what_is_wrong(key: str, given: Any, error: Mapping[str, Any]) -> str:
    kind, field = error["type"], _knobs().get(key)
    if field is None:
        return f" is not a table; write [{key}] and its settings under it"
    if kind == "value_error":
        return f" {error['ctx']['error']}"
    if kind in ("enum", "literal_error"):
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return f" is not a choice; {suggest_nearest(str(error['input']), choices)}"
    takes = knobs()[key].kind
    if takes.startswith("a list of 2") and not (isinstance(given, list) and len(given) == 2):
        number = given[:1] if isinstance(given, list) else [given]
        return f" is not a list of 2 numbers; write {list(field.default or number * 2) or 'two'}"
    if takes.startswith("a list") and not isinstance(given, list):
        return f" is not a list; write {json.dumps([given])}"
    way_out = "leave it out for no value" if field.default is None else f"the default is {field.default!r}"
    return f": {error['msg'][0].lower()}{error['msg'][1:]}; {way_out}"
