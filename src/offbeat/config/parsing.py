"""From TOML, or what an earlier version recorded, to a valid configuration or everything wrong with it. No torch.

All problems are reported at once, each with the nearest valid value. Every problem starts with its key, which gives the
line of the file.
"""

import copy
import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic.fields import FieldInfo

from offbeat.config.axes import with_own_objective
from offbeat.config.config import Config
from offbeat.config.conflicts import conflicts
from offbeat.config.knobs import knobs, nearest_table, suggest_setting
from offbeat.config.sections import Section
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


def _field(key: str) -> FieldInfo | None:
    """Return the field of a setting or a table; None for any other name."""
    section: type[Section] | None = Config
    field = None
    for name in key.split("."):
        field = None if section is None else section.model_fields.get(name)
        section = _section(field)
    return field


def _section(field: FieldInfo | None) -> type[Section] | None:
    kind = None if field is None else field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _leave_out(data: dict[str, Any], location: Sequence[int | str]) -> str:
    """Remove the setting that an error is about, even if the error is deep inside its value; returns its key."""
    place = [str(location[0])]
    for part in location[1:]:
        if _section(_field(".".join(place))) is None:
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
    meant = nearest_table(key)
    if (knob := knobs().get(str(meant))) is not None:
        return knob.kind == "a table"
    return all(f"{meant}.{name}" in knobs() for name in given)


def _what_is_wrong(key: str, given: Any, error: Mapping[str, Any]) -> str:
    kind, field = error["type"], _field(key)
    if field is None or _section(field) is not None:
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


def load(path: Path, settings: Sequence[str] = ()) -> Config:
    """Load a file and apply `settings` such as "sync.every=10" to it; raises `ConfigError` with every problem.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     file = Path(place, "run.toml")
    ...     _ = file.write_text("steps = 50")
    ...     load(file, ["sync.every=10"]).plan
    '32 prompts × 8 = 256 completions a step → 1 update; sync every 10 steps: lag 0 to 9'
    """
    file = TomlFile.read(path, settings)
    examined = examine(file.data)
    if examined.problems:
        raise ConfigError(file.located(examined.problems))
    return examined.config


@dataclass(frozen=True)
class TomlFile:
    """The text of a TOML file, its data, and the line of each key.

    >>> file = TomlFile(Path("run.toml"), "steps = 50\\n\\n[sync]\\nevry = 3", {}, frozenset())
    >>> file.located(["sync.evry is not a setting; did you mean 'sync.every'?"])
    ["run.toml:4: sync.evry is not a setting; did you mean 'sync.every'?"]
    """

    path: Path
    text: str
    data: Mapping[str, Any]
    """The parsed file, with `--set` applied."""
    set_keys: frozenset[str]
    set_by: str = "--set"
    """How the reader knows those keys: an option of the command line, or a keyword in Python."""

    @classmethod
    def read(cls, path: Path, settings: Sequence[str] = ()) -> "TomlFile":
        """Read a file and apply `settings` to it."""
        try:
            if not path.is_file():  # a FIFO would wait for its writer, and a device may have no end
                raise FileNotFoundError
            text = path.read_text(encoding="utf-8")
            data = with_tables(tomllib.loads(text))
        except (FileNotFoundError, IsADirectoryError):
            raise ConfigError([f"{path} is not a file; `offbeat init` writes one to start from"]) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as broken:
            raise ConfigError([f"{path} is not TOML: {broken}"]) from None
        except OSError as error:
            raise ConfigError([f"{path} cannot be read: {error.strerror}; check its permissions"]) from None
        keys = [apply_setting(data, setting) for setting in settings]
        return cls(path, text, data, frozenset(keys))

    def located(self, problems: Sequence[str]) -> list[str]:
        """Prefix each problem with the file and line of the key it starts with, in the order of the lines."""
        lines = self.lines()
        found = [(*self._locate(problem, lines), problem) for problem in problems]
        return [f"{place}: {problem}" for _, place, problem in sorted(found, key=lambda one: one[0])]

    def lines(self) -> dict[str, int]:
        """Return the line of each key.

        tomllib reports no line numbers, so we parse the smallest chunks that parse on their own, each below the header
        of its table. The keys of a chunk are on its first line.
        """
        found: dict[str, int] = {}
        table, chunk = "", list[str]()
        for number, line in enumerate(self.text.split("\n"), start=1):
            chunk.append(line)
            try:
                data = tomllib.loads("\n".join([table, *chunk]))
            except tomllib.TOMLDecodeError:
                continue  # inside a value of several lines
            for key in key_paths(data):
                found.setdefault(key, number - len(chunk) + 1)
            if chunk[0].lstrip().startswith("["):
                table = chunk[0]
            chunk = []
        return found

    def _locate(self, problem: str, lines: Mapping[str, int]) -> tuple[float, str]:
        """Return the line that a problem is about, infinity without one, and where that is in words."""
        key = re.split(r"[^\w.-]", problem, maxsplit=1)[0].rstrip(".")
        while key:
            if overrides := [name for name in self.set_keys if name == key or name.startswith(f"{key}.")]:
                return inf, f"{self.set_by} {overrides[0]}"
            if key in lines:
                return lines[key], f"{self.path}:{lines[key]}"
            key = key.rpartition(".")[0]
        return inf, str(self.path)


def apply_setting(data: dict[str, Any], setting: str) -> str:
    """Write one setting such as "sync.every=10" into the data; returns its key. A value that is not TOML is text."""
    key, equals, text = setting.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError([f"--set {setting}: need KEY=VALUE, for example --set sync.every=10"])
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    table = data
    for part in parts[:-1]:
        inner = table.get(part)
        table[part] = inner if isinstance(inner, dict) else {}
        table = table[part]
    table[parts[-1]] = value
    data |= with_tables(data)
    return ".".join(parts)


def key_paths(data: Mapping[str, Any], prefix: str = "") -> list[str]:
    found = []
    for name, value in data.items():
        found.append(prefix + name)
        if isinstance(value, dict):
            found += key_paths(value, f"{prefix}{name}.")
    return found


def translate(recorded: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an earlier version recorded in today's settings, so that its run continues as it began.

    >>> recorded = Config().model_dump(mode="json")
    >>> recorded["objective"]["untested_lag"] = True
    >>> translate(recorded)["accept"]
    True
    """
    data = copy.deepcopy(dict(recorded))
    if data.get("objective", {}).pop("untested_lag", False):
        _accept_untested_lag(data)
    return data


def _accept_untested_lag(data: dict[str, Any]) -> None:
    """Consent to lag was a setting of the objective, and lifted the limits that follow from its preset."""
    data["accept"] = True
    sync, sampler = data["sync"], data["sampler"]
    if (sync["by_cost"] or sync["drift_budget"] is not None) and sync["every"] is None:
        sync["every"] = max(100, sync["at_least"])
    if sampler["mode"] == "replay" and sampler["retire_age"] is None:
        sampler["retire_age"] = 200
