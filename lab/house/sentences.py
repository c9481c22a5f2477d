"""Print sentences of an earlier commit beside today's, chosen at random by a seed, so that the wording can be judged.

    python -m lab.house.sentences      30 pairs

Pairs are found by name: the docstring of a class or function that exists once in both trees, the help of a command and
its options, and the first message that a function raises; sentences of the docs by the words they share. Pairs that did
not change may be drawn as well. Seconds.
"""

import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

from lab.figures import ROOT, command_parser
from lab.house.earlier import earlier_checkout

KINDS = ("docstring", "help", "error")
DOCS = 6
"""Sentences of the docs, each beside the sentence of today that shares most words with it."""


def texts(source: Path) -> Iterator[tuple[str, str, str]]:
    """Yield (kind, name, text) of every docstring, help text and error message below `source`."""
    for file in sorted((source / "src" / "offbeat").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                if text := ast.get_docstring(node):
                    yield "docstring", node.name, text
                if not isinstance(node, ast.ClassDef):
                    yield from _messages(node)
        if file.parent.name == "cli":
            yield from _help(file.stem, tree)


def _messages(function: ast.AST) -> Iterator[tuple[str, str, str]]:
    name = getattr(function, "name", "")
    for node in ast.walk(function):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for text in node.exc.args:
                if isinstance(text, ast.JoinedStr | ast.Constant):
                    yield "error", name, ast.unparse(text)
                    return


def _help(command: str, tree: ast.AST) -> Iterator[tuple[str, str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) and node.annotation is not None:
            found = re.search(r"help='([^']+)'|help=\"([^\"]+)\"", ast.unparse(node.annotation))
            if found:
                yield "help", f"{command} {node.arg}", found[1] or found[2]


def once(source: Path) -> dict[tuple[str, str], str]:
    """Return the texts whose name is unique in the tree, first paragraph only."""
    found: dict[tuple[str, str], list[str]] = {}
    for kind, name, text in texts(source):
        found.setdefault((kind, name), []).append(" ".join(text.split("\n\n")[0].split()))
    return {key: values[0] for key, values in found.items() if len(values) == 1}


def pairs(before: Path, count: int, seed: int) -> list[tuple[str, str, str, str]]:
    """Draw pairs, the same number of each kind."""
    then, now = once(before), once(ROOT)
    chosen = []
    for kind in KINDS:
        names = sorted(name for name in then.keys() & now.keys() if name[0] == kind)
        chosen += random.Random(seed).sample(names, min((count - DOCS) // len(KINDS), len(names)))
    found = [(kind, name, then[kind, name], now[kind, name]) for kind, name in chosen]
    today = sentences(ROOT)
    for sentence in random.Random(seed).sample(sentences(before), DOCS):
        found.append(("docs", "", sentence, max(today, key=lambda other: _shared(sentence, other))))
    return found


def sentences(root: Path) -> list[str]:
    """Return the sentences of all pages of the docs, without tables, code and built parts."""
    found = []
    for page in sorted((root / "docs").rglob("*.md")):
        if page.name == "log.md" or "measured" in page.parts:
            continue
        text = re.sub(r"```.*?```|<!-- built.*?<!-- end -->", "", page.read_text(encoding="utf-8"), flags=re.S)
        plain = " ".join(line for line in text.splitlines() if line and not line.startswith(("|", "#", "<")))
        found += [one.strip() for one in re.split(r"(?<=[.?!]) (?=[A-Z])", plain) if 40 < len(one) < 240]
    return found


def _shared(one: str, other: str) -> float:
    mine, its = set(re.findall(r"\w+", one.lower())), set(re.findall(r"\w+", other.lower()))
    return len(mine & its) / len(mine | its)


if __name__ == "__main__":
    parser = command_parser(__doc__)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", type=int, default=13)
    arguments = parser.parse_args()
    with earlier_checkout() as before:
        drawn = pairs(before, arguments.count, arguments.seed)
    for kind, name, then, now in drawn:
        print(f"{kind} {name}\n  - {then}\n  + {now}")
