"""A configuration as a person writes it: a TOML file, `--set` over it, and the line of every problem. No torch."""

import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offbeat.config import Config, examine
from offbeat.errors import ConfigError


def load(path: Path, settings: Sequence[str] = ()) -> Config:
    """The configuration in a file, with `settings`, as in "sync.every=10", put over it; or a `ConfigError`.

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
    """What was written, and where.

    >>> file = TomlFile(Path("run.toml"), "steps = 50\\n\\n[sync]\\nevry = 3", {}, frozenset())
    >>> file.located(["sync.evry is not a setting; did you mean 'every'?"])
    ["run.toml:4: sync.evry is not a setting; did you mean 'every'?"]
    """

    path: Path
    text: str
    data: Mapping[str, Any]
    """With `--set` applied."""
    set_keys: frozenset[str]

    @classmethod
    def read(cls, path: Path, settings: Sequence[str] = ()) -> "TomlFile":
        """A file, with settings put over it."""
        try:
            text = path.read_text(encoding="utf-8")
            data = tomllib.loads(text)
        except (FileNotFoundError, IsADirectoryError):
            raise ConfigError([f"{path} is not a file; `offbeat init` writes one to begin with"]) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as broken:
            raise ConfigError([f"{path} is not TOML: {broken}"]) from None
        keys = [_set(data, setting) for setting in settings]
        return cls(path, text, data, frozenset(keys))

    def located(self, problems: Sequence[str]) -> list[str]:
        """Each problem with the place of the key it begins with."""
        lines = self.lines()
        return [f"{self._place(problem, lines)}: {problem}" for problem in problems]

    def lines(self) -> dict[str, int]:
        """Where each key is first written.

        TOML's parser tells no places. So it is given the file piece by piece, each as short as parses, under the table
        it stands in: the keys of a piece are written where it begins.
        """
        found: dict[str, int] = {}
        table, piece = "", list[str]()
        for number, line in enumerate(self.text.split("\n"), start=1):
            piece.append(line)
            try:
                data = tomllib.loads("\n".join([table, *piece]))
            except tomllib.TOMLDecodeError:
                continue  # within a value of several lines
            for key in _keys(data):
                found.setdefault(key, number - len(piece) + 1)
            if piece[0].lstrip().startswith("["):
                table = piece[0]
            piece = []
        return found

    def _place(self, problem: str, lines: Mapping[str, int]) -> str:
        key = re.split(r"[^\w.-]", problem, maxsplit=1)[0].rstrip(".")
        while key:
            if given := [one for one in self.set_keys if one == key or one.startswith(f"{key}.")]:
                return f"--set {given[0]}"
            if key in lines:
                return f"{self.path}:{lines[key]}"
            key = key.rpartition(".")[0]
        return str(self.path)


def _set(data: dict[str, Any], setting: str) -> str:
    """Put one setting in its place; a value that is not TOML is text."""
    key, equals, text = setting.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError([f"--set {setting}: need KEY=VALUE, for example --set sync.every=10"])
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for part in parts[:-1]:
        inner = data.get(part)
        data[part] = inner if isinstance(inner, dict) else {}
        data = data[part]
    data[parts[-1]] = value
    return ".".join(parts)


def _keys(data: Mapping[str, Any], before: str = "") -> list[str]:
    found = []
    for name, value in data.items():
        found.append(before + name)
        if isinstance(value, dict):
            found += _keys(value, f"{before}{name}.")
    return found
