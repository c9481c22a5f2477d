"""From plain data to a valid configuration, or to everything wrong with it. No torch.

All problems are reported at once, each with the nearest valid value. Every problem starts with its key, so that
`toml_file.py` can add the line number.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from offbeat.config.config import Config
from offbeat.config.conflicts import conflicts
from offbeat.config.sections import Section
from offbeat.errors import ConfigError, suggest_nearest


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
        new = [problem for problem in problems if not any(key in problem for key in self.faulty)]
        return Examined(self.config, self.problems + new, self.faulty)


def examine(data: Mapping[str, Any]) -> Examined:
    """Find every problem: settings that are invalid by themselves, and settings that conflict."""
    remaining: dict[str, Any] = copy.deepcopy(dict(data))
    problems: dict[str, list[str]] = {}
    while True:
        try:
            config = Config.model_validate(remaining)
            break
        except ValidationError as invalid:
            for error in invalid.errors():
                key = _leave_out(remaining, error["loc"])
                problems.setdefault(key, []).append(_explain(key, data, dict(error)))
    faulty = frozenset(problems)
    return Examined(config, [message for found in problems.values() for message in found], faulty).also(
        conflicts(config)
    )


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
    del data[place[-1]]
    return ".".join(place)


def _explain(key: str, data: Mapping[str, Any], error: Mapping[str, Any]) -> str:
    """Turn a pydantic error into a message with the key, the value and what to do."""
    given: Any = data
    for part in key.split("."):
        given = given[part]
    setting, kind = f"{key} = {given!r:.80}", error["type"]
    if kind == "extra_forbidden":
        return f"{key} is not a setting; {_nearest_key(key)}"
    if kind == "model_type":
        return f"{setting} is not a table; write [{key}] and its settings under it"
    if kind == "value_error":
        return f"{setting} {error['ctx']['error']}"
    if kind in ("enum", "literal_error"):
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return f"{setting} is not a choice; {suggest_nearest(str(error['input']), choices)}"
    default = _knobs()[key].default
    way_out = "leave it out for no value" if default is None else f"the default is {default!r}"
    return f"{setting}: {error['msg'][0].lower()}{error['msg'][1:]}; {way_out}"


def _nearest_key(key: str) -> str:
    """Suggest the same name in another table, or the nearest name in this one."""
    table, _, name = key.rpartition(".")
    elsewhere = [known for known in _knobs() if known.rpartition(".")[2] == name]
    if elsewhere:
        return f"did you mean {' or '.join(map(repr, elsewhere))}?"
    inside = [known for known, _ in _fields(Config) if known.rpartition(".")[0] == table]
    return suggest_nearest(name, [known.rpartition(".")[2] for known in inside])
