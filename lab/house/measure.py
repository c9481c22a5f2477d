"""Measure the layout of the source, at an earlier commit and now, by one script.

    python -m lab.house.measure              print both; writes rows rooms.1.*
    python -m lab.house.measure --now        this tree only, as JSON; writes nothing

Counts Python files below src/offbeat: files, lines, lines of code (without docstrings, blank lines, comments and
imports), lengths of functions (docstring not counted), files per folder (`__init__.py` not counted), modules with a
single importer, import circles (imports for types alone included), class names used twice, words that the glossary in
CONTRIBUTING.md rules out, lines of Python of the lab, and words of the user's pages. Seconds.
"""

import ast
import io
import json
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from lab.figures import ROOT, Figure, command_parser, record
from lab.house.earlier import BEFORE, earlier_checkout

SMALL = 60
"""Lines below which a module with a single importer should say something on its own."""


@dataclass(frozen=True)
class House:
    """The figures of one tree."""

    files: int
    lines: int
    code_lines: int
    function_p50: int
    function_p90: int
    function_max: int
    most_files_in_a_folder: int
    single_importer: int
    single_importer_small: int
    circles: int
    class_names_twice: int
    ruled_out_words: int
    lab_lines: int
    words_of_the_users_pages: int


def measure(source: Path, glossary: str) -> House:
    """Measure the package `offbeat` below `source`."""
    modules = modules_of(source)
    texts = {name: file.read_text(encoding="utf-8") for name, file in modules.items()}
    trees = {name: ast.parse(text) for name, text in texts.items()}
    arrows = arrows_of(trees)
    importers = Counter(target for targets in arrows.values() for target in targets)
    lone = [name for name in modules if importers[name] == 1 and modules[name].name != "__init__.py"]
    lengths = sorted(length for tree in trees.values() for length in function_lengths(tree))
    classes = Counter(node.name for tree in trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    return House(
        files=len(modules),
        lines=sum(len(text.splitlines()) for text in texts.values()),
        code_lines=sum(code_lines(text) for text in texts.values()),
        function_p50=lengths[len(lengths) // 2],
        function_p90=lengths[len(lengths) * 9 // 10],
        function_max=lengths[-1],
        most_files_in_a_folder=max(Counter(f.parent for f in modules.values() if f.name != "__init__.py").values()),
        single_importer=len(lone),
        single_importer_small=sum(len(texts[name].splitlines()) < SMALL for name in lone),
        circles=len(circles(arrows)),
        class_names_twice=sum(count > 1 for count in classes.values()),
        ruled_out_words=sum(len(found) for text in texts.values() for found in ruled_out(text, glossary).values()),
        lab_lines=sum(
            len(file.read_text(encoding="utf-8").splitlines()) for file in (source.parent / "lab").rglob("*.py")
        ),
        words_of_the_users_pages=sum(map(prose_words, users_pages(source.parent / "docs"))),
    )


def users_pages(docs: Path) -> list[Path]:
    """Return the pages of the sections start, how-to, reference and how it works."""
    folders = ("how-to", "reference", "how-it-works")
    first = [docs / f"{name}.md" for name in ("start", "from-trl", "from-verl")]
    return [*first, *(page for folder in folders for page in sorted((docs / folder).glob("*.md")))]


def prose_words(page: Path) -> int:
    """Count the words of a page outside code blocks and tags."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    return len(re.sub(r"<[^>]+>", "", text).split())


def modules_of(source: Path) -> dict[str, Path]:
    """Return the file of every module."""
    return {_name(file, source): file for file in sorted((source / "offbeat").rglob("*.py"))}


def arrows_of(trees: Mapping[str, ast.AST]) -> dict[str, set[str]]:
    """Return what each module imports, inside functions and for types as well."""
    return {name: _imports(tree, trees.keys()) - {name} for name, tree in trees.items()}


def crowded(source: Path) -> tuple[str, str]:
    """Return the modules of the import circles, and the folders with most files, for the notes of their rows."""
    modules = modules_of(source)
    trees = {name: ast.parse(file.read_text(encoding="utf-8")) for name, file in modules.items()}
    rings = [" and ".join(sorted(ring)) for ring in circles(arrows_of(trees))]
    chapters = [file for file in modules.values() if file.name != "__init__.py"]
    folders = Counter(file.parent.relative_to(source).as_posix() for file in chapters).most_common(3)
    return ", ".join(sorted(rings)), ", ".join(f"{folder} {count}" for folder, count in folders)


def _name(file: Path, source: Path) -> str:
    parts = file.relative_to(source).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.AST, modules: Collection[str]) -> set[str]:
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            target = name if name in modules else name.rpartition(".")[0]
            if target in modules and target != "offbeat":
                found.add(target)
    return found


def circles(arrows: dict[str, set[str]]) -> list[set[str]]:
    """Return the sets of modules that import each other, directly or through others.

    >>> circles({"a": {"b"}, "b": {"a"}, "c": {"a"}}) == [{"a", "b"}]
    True
    """
    reached = {name: _reach(name, arrows) for name in arrows}
    groups = {frozenset(m for m in reached[name] if name in reached.get(m, ())) for name in arrows}
    return [set(group) for group in groups if len(group) > 1]


def _reach(start: str, arrows: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [start]
    while waiting:
        for target in arrows.get(waiting.pop(), set()):
            if target not in found:
                found.add(target)
                waiting.append(target)
    return found


def function_lengths(tree: ast.AST) -> list[int]:
    """Return the lines of each function, its docstring not counted."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            found.append(node.end_lineno - node.lineno + 1 - len(_docstring_lines(node)))
    return found


def _docstring_lines(node: ast.AST) -> range:
    body = getattr(node, "body", [])
    if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
        first = body[0]
        if isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            return range(first.lineno, (first.end_lineno or first.lineno) + 1)
    return range(0)


def code_lines(text: str) -> int:
    """Count lines that are neither blank, comment, import nor docstring (attribute docstrings included).

    >>> code_lines('import os\\n\\n# why\\ndef f():\\n    \\"\\"\\"Doc.\\"\\"\\"\\n    return 1\\n')
    2
    """
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        text_alone = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if isinstance(node, ast.Import | ast.ImportFrom) or text_alone:
            assert isinstance(node, ast.stmt)
            left_out |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    numbered = enumerate(text.splitlines(), start=1)
    return sum(bool(line.strip()) and not line.strip().startswith("#") and n not in left_out for n, line in numbered)


def ruled_out(text: str, glossary: str) -> dict[str, list[str]]:
    """Find words of the glossary's last column ("not") in docstrings, comments and messages.

    >>> ruled_out('x = "the door refuses"', "| validation | checks a group | door, gatekeeper |")
    {'door': ['the door refuses']}
    """
    words = [
        word.strip()
        for row in re.findall(r"^\|.*\|\s*([^|]*?)\s*\|\s*$", glossary, re.M)
        for word in row.split(",")
        if word.strip() and word.strip() not in ("not", "---", "–")
    ]
    found: dict[str, list[str]] = {}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            for word in words:
                if re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-]|\.\d)", token.string, re.I):  # door.3 is a row
                    found.setdefault(word, []).append(token.string.strip("\"'# ")[:80])
    return found


def glossary_of(root: Path) -> str:
    """Return the glossary table of CONTRIBUTING.md."""
    text = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return text.partition("## Words")[2].partition("\n## ")[0]


GOALS = {
    "files": 185,
    "lines": 36_500,
    "code_lines": 21_500,
    "function_p90": 20,
    "most_files_in_a_folder": 18,
    "single_importer": 35,
    "single_importer_small": 0,
    "circles": 0,
    "class_names_twice": 0,
    "ruled_out_words": 0,
    "lab_lines": 17_000,
    "words_of_the_users_pages": 35_000,
}
"""The most there may be."""


ELSEWHERE = {
    "lab_lines": "lab: lines of Python",
    "words_of_the_users_pages": "docs: words of start, how-to, reference and how it works, outside code blocks",
}
"""What is measured outside the package."""


LIMITS = {
    "files": "joining more would put two subjects into one file, or close a circle of imports",
    "lines": "joined files share little but their imports; parts of one's own and checks of rewards came in between",
    "code_lines": "what is left is used; parts of one's own and checks of rewards came in between",
}
"""Why a goal is not reached."""


def main() -> bool:
    """Print both trees and record the figures of this one."""
    glossary = glossary_of(ROOT)
    now = asdict(measure(ROOT / "src", glossary))
    with earlier_checkout() as before:
        then = asdict(measure(before / "src", glossary))
    print(f"{'':28}{BEFORE:>10}{'now':>10}")
    for name, value in now.items():
        print(f"{name.replace('_', ' '):28}{then[name]:>10,}{value:>10,}")
    rings, folders = crowded(ROOT / "src")
    reasons = {name: f"; {why}" for name, why in LIMITS.items() if now[name] > GOALS[name]}
    reasons |= {"circles": f"; {rings}" if rings else "", "most_files_in_a_folder": f"; {folders}"}
    figures = []
    for name, value in now.items():
        goal = f"≤ {GOALS[name]:,}" if name in GOALS else "shown"
        holds = value <= GOALS.get(name, value)
        what = ELSEWHERE.get(name, f"src/offbeat: {name.replace('_', ' ')}")
        figures.append(Figure(f"rooms.1.{name.replace('_', '-')}", what, goal, value, "", holds, now["files"],
                              f"{then[name]} at {BEFORE}{reasons.get(name, '')}"))  # fmt: skip
    return record(*figures)


if __name__ == "__main__":
    parser = command_parser(__doc__)
    parser.add_argument("--now", action="store_true")
    if parser.parse_args().now:
        print(json.dumps(asdict(measure(ROOT / "src", glossary_of(ROOT))), indent=1))
        sys.exit(0)
    sys.exit(not main())
