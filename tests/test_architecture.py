"""Imports point down, siblings leave each other alone, and what must be light stays light."""

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "offbeat"

LAYERS: list[set[str]] = [
    {"errors", "secrecy", "seeds", "types", "words", "working"},
    {"events", "hub", "imports", "metrics"},
    {"evaluation", "objective", "storage", "verify"},
    {"config", "sandbox", "weights"},
    {"experience", "placement", "tasks", "trainer"},
    {"scoring"},
    {"rollout"},
    {"run"},
    {"inside", "reports"},
    {"preflight"},
    {"drive", "from_python"},
    {"api"},
    {"papers"},
    {"cli"},
    {"__main__"},
]
LAYER = {part: depth for depth, layer in enumerate(LAYERS) for part in layer}
LIGHT = ["offbeat.types", "offbeat.config", "offbeat.metrics", "offbeat.objective.presets", "offbeat.cli.main"]


def imports(file: Path) -> set[str]:
    """The parts of offbeat that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide the direction of an arrow"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("offbeat.")}
    return found - {"__version__"}


def part_of(file: Path) -> str:
    return file.relative_to(SRC).parts[0].removesuffix(".py")


FILES = sorted(f for f in SRC.rglob("*.py") if f != SRC / "__init__.py")


def test_imports_point_down() -> None:
    for file in FILES:
        part = part_of(file)
        assert part in LAYER, f"{part} has no place in the layers: give it one here and in ARCHITECTURE.md"
        for imported in imports(file) - {part}:
            assert LAYER[imported] < LAYER[part], f"{file.relative_to(SRC)} imports {imported}, which is not below it"


def test_the_check_sees_an_import_that_points_up(tmp_path: Path) -> None:
    upward = tmp_path / "upward.py"
    upward.write_text("def f():\n    from offbeat.run import loop\n")
    assert imports(upward) == {"run"}


@pytest.mark.parametrize("module", LIGHT)
def test_light_modules_do_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; print([m for m in ('torch', 'transformers', 'lance', 'ray') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_help_answers_without_torch() -> None:
    code = "import sys; sys.modules['torch'] = None; from offbeat.cli.main import app; app(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "objectives" in done.stdout, done.stderr


LINES_OF_A_FILE = 600
FILES_OF_A_FOLDER = 18
BUDGET = 46_500
"""Lines of `src`. Lower it when code goes away; a change that raises it says in docs/log.md what a user got for it."""


def test_a_file_is_a_chapter() -> None:
    for file in FILES:
        lines = len(file.read_text(encoding="utf-8").splitlines())
        assert lines <= LINES_OF_A_FILE, f"{file}: {lines} lines: is it still one thing?"
        assert file.stem not in {"utils", "util", "helpers", "common", "misc", "manager"}


def test_a_folder_holds_no_more_files_than_a_person_can_overlook() -> None:
    found = Counter(str(file.parent.relative_to(SRC)) for file in FILES if file.name != "__init__.py")
    for folder, count in found.items():
        assert count <= FILES_OF_A_FOLDER, f"{folder} has {count} files: which belong together?"


def test_the_house_stays_within_its_budget() -> None:
    lines = sum(len(file.read_text(encoding="utf-8").splitlines()) for file in SRC.rglob("*.py"))
    assert BUDGET - 1000 <= lines <= BUDGET, f"{lines} lines: say in docs/log.md what they buy, or lower the budget"


ENGINES = {"vllm": "rollout/vllm", "ray": "run/ray/", "lance": "experience/"}


def test_an_engine_is_imported_in_one_place() -> None:
    """What breaks with every release breaks there."""
    for file in FILES:
        nodes = list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))
        found = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        found |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        for engine in {name.split(".")[0] for name in found} & ENGINES.keys():
            assert str(file.relative_to(SRC)).startswith(ENGINES[engine]), file
