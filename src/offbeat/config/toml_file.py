"""Configurations from a TOML file and `--set`, with the line number of every problem. No torch."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.config.config import Config
from offbeat.config.parsing import examine, with_tables
from offbeat.errors import ConfigError


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
        """Prefix each problem with the file and line of the key it starts with."""
        lines = self.lines()
        return [f"{self._locate(problem, lines)}: {problem}" for problem in problems]

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

    def _locate(self, problem: str, lines: Mapping[str, int]) -> str:
        key = re.split(r"[^\w.-]", problem, maxsplit=1)[0].rstrip(".")
        while key:
            if overrides := [name for name in self.set_keys if name == key or name.startswith(f"{key}.")]:
                return f"{self.set_by} {overrides[0]}"
            if key in lines:
                return f"{self.path}:{lines[key]}"
            key = key.rpartition(".")[0]
        return str(self.path)


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
