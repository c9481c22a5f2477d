"""The fields of events that the source writes, to check the declarations in `offbeat.events`."""

import ast
from collections.abc import Iterator
from pathlib import Path

from offbeat.events import EventKind


def written(source: Path) -> dict[EventKind, list[str]]:
    """Map each kind to its fields, from every `journal.write(EventKind.X, step, …)` below `source`."""
    found: dict[EventKind, list[str]] = {}
    for file in sorted(source.rglob("*.py")):
        for call in _writes(ast.parse(file.read_text(encoding="utf-8"))):
            kind = call.args[0]
            assert isinstance(kind, ast.Attribute), f"{file}:{call.lineno} writes a kind that is not declared"
            named = [keyword.arg for keyword in call.keywords if keyword.arg]
            fields = found.setdefault(EventKind[kind.attr], [])
            fields += [name for name in named if name not in fields]
    return found


def _writes(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "write":
            owner = node.func.value
            name = owner.attr if isinstance(owner, ast.Attribute) else owner.id if isinstance(owner, ast.Name) else ""
            if name == "journal":
                yield node
