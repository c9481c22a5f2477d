"""lab/README.md lists every command of the lab once, with the rows it writes."""

import json
import re
from collections import Counter
from fnmatch import fnmatchcase
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
README = (ROOT / "lab" / "README.md").read_text(encoding="utf-8")
LISTED, _, DELETED = README.partition("## Deleted commands")
COMMAND = re.compile(r"python -m (lab(?:\.\w+)+)")


def commands() -> set[str]:
    """Return the lab modules that can be run."""
    return {
        ".".join(file.relative_to(ROOT).with_suffix("").parts)
        for file in (ROOT / "lab").rglob("*.py")
        if '\nif __name__ == "__main__":\n' in file.read_text(encoding="utf-8")
    }


def recorded_rows() -> list[tuple[str, str]]:
    """Return the id and the command of every row of lab/results."""
    files = sorted((ROOT / "lab" / "results").glob("*.json"))
    return [(row["id"], row["command"]) for file in files for row in json.loads(file.read_text(encoding="utf-8"))]


def test_every_command_is_listed_exactly_once_and_exists() -> None:
    assert Counter(COMMAND.findall(LISTED)) == Counter(commands())


def listed_rows() -> dict[str, list[str]]:
    """Return the patterns of the rows that are listed with each command, today's and deleted ones."""
    found: dict[str, list[str]] = {}
    for line in README.splitlines():
        if command := COMMAND.search(line):
            found.setdefault(command[1], []).extend(re.findall(r"`([^`]+)`", line.split(" | ")[-1]))
    return found


def test_every_row_is_listed_with_a_command_that_exists_or_is_listed_as_deleted() -> None:
    listed = listed_rows()
    for row, command in recorded_rows():
        found = COMMAND.match(command)
        patterns = listed.get(found[1], []) if found else []
        assert any(fnmatchcase(row, pattern) for pattern in patterns), f"{row} is not listed with {command}"


def test_every_command_parses_its_arguments_so_that_help_never_measures() -> None:
    for module in commands():
        source = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        assert ".parse_args()" in source, f"{module} runs on --help"
