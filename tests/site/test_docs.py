"""The docs are true: built parts are current, every block runs or could be typed, every link resolves."""

import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from contextlib import chdir
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from lab.site.events import written
from offbeat.config import parse
from offbeat.events import EVENTS
from offbeat.objective.presets import PRESETS
from tests import ROOT
from tests.fixtures.commands import commands, faults
from tests.fixtures.pages import (
    DIARY,
    Block,
    anchors,
    blocks,
    claims,
    dead_links,
    links,
    page_name,
    pages,
    row_names,
    rows,
)

PAGES = pages()


def look_up(block: Block) -> list[str]:
    """Return what is wrong with a block that is not run: a configuration, or commands."""
    if block.language == "bash":
        return [fault for line in commands(block.text) for fault in faults(line)]
    if block.language == "toml":
        parse(tomllib.loads(block.text))
    return []


def run(page: Path, place: Path, *, shell: bool) -> Counter[str]:
    """Run the blocks of a page in order, in one session, as a reader would type them. Raise if one fails."""
    done: Counter[str] = Counter()
    namespace: dict[str, object] = {"__name__": "docs"}
    with chdir(place):
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.file:
                assert block.text.strip() in (ROOT / block.file).read_text(encoding="utf-8"), f"{block.file} differs"
            elif block.language == "python":
                exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
                done["python"] += 1
            elif block.run and shell:
                _run_shell(page, block)
                done["shell"] += 1
    return done


def _run_shell(page: Path, block: Block) -> None:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # The whole quickstart has a test of its own; here the commands after it need only its files.
    text = re.sub(r"^offbeat quickstart$", "offbeat quickstart --steps 2", block.text, flags=re.M)
    command = ["bash", "-euo", "pipefail", "-c", text]
    done = subprocess.run(command, env={**os.environ, "PATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{page_name(page)}, line {block.line}:\n{done.stdout}{done.stderr}")


def every_block() -> list[tuple[Path, Block]]:
    return [(page, block) for page in PAGES for block in blocks(page.read_text(encoding="utf-8"))]


@cache
def build_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "scripts" / "build_docs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_built_parts_are_as_they_would_be_built() -> None:
    stale = [page_name(page) for page in PAGES if build_docs().fill(text := page.read_text(encoding="utf-8")) != text]
    assert stale == [], "run python scripts/build_docs.py"


def test_a_stale_part_is_found() -> None:
    stale = "<!-- built: lags -->\n| `grpo` | 99 |\n<!-- end -->"
    assert build_docs().fill(stale) != stale


@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- slow -->" not in page.read_text()], ids=page_name)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    run(page, tmp_path, shell=False)


def test_commands_exist_with_their_options_and_toml_blocks_are_valid() -> None:
    assert [f"{page_name(page)}: {one}" for page, block in every_block() for one in look_up(block)] == []


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    # `py` blocks are files of a task, checked by tests/tasks/test_custom.py; without a language: pictures.
    kinds = {"python", "bash", "toml", "py", "text", ""}
    others = [f"{page_name(page)}: {block.language}" for page, block in every_block() if block.language not in kinds]
    assert others == []


@pytest.mark.engine
@pytest.mark.parametrize(
    "page", [page for page in PAGES if re.search("<!-- (run|slow) -->", page.read_text())], ids=page_name
)
def test_shell_blocks_and_slow_pages_run(page: Path, tmp_path: Path) -> None:
    assert run(page, tmp_path, shell=True).total() > 0


def test_links_within_the_repository_resolve() -> None:
    assert [dead for page in PAGES for dead in dead_links(page)] == []


def test_figures_in_prose_link_to_their_row() -> None:
    found = [claim for page in PAGES if page_name(page) != DIARY for claim in claims(page)]
    loose = [f"{claim.page}: {claim.number} in: {claim.passage[:200]}" for claim in found if not claim.grounded]
    assert loose == [], "link the figure to its row, as in [0.54](../measured/trainer.md#trainer.2.memory)"


def test_row_names_are_in_links_and_not_in_sentences() -> None:
    texts = [page for page in PAGES if "docs/" in page_name(page) and page_name(page) != DIARY]
    assert [f"{page_name(page)}: {row}" for page in texts for row in row_names(page)] == []


def test_every_results_file_has_its_page_and_every_row_its_anchor() -> None:
    measured = ROOT / "docs" / "measured"
    for file in (ROOT / "lab" / "results").glob("*.json"):
        page = (measured / f"{file.stem}.md").read_text(encoding="utf-8")
        ids = {row for row in rows() if row.split(".")[0] == file.stem}
        assert f"<!-- built: results {file.stem} -->" in page and ids <= anchors(page)


@pytest.mark.parametrize("folder", ["reference", "measured"])
def test_every_page_of_reference_and_measured_is_built(folder: str) -> None:
    hand_written = {"api.md", "weight-log.md"}  # checked by other tests; a file format
    found = list((ROOT / "docs" / folder).glob("*.md"))
    assert found and all("<!-- built: " in page.read_text() for page in found if page.name not in hand_written)


def test_every_event_that_a_run_writes_is_explained() -> None:
    found = written(ROOT / "src")
    assert found.keys() == EVENTS.keys()
    for kind, fields in found.items():
        assert set(fields) <= EVENTS[kind].fields.keys(), f"{kind}: declare its fields in offbeat/events.py"


def test_the_readme_counts_the_objectives_and_stays_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{len(PRESETS)} of them" in text
    assert len(text.splitlines()) <= 140 and len(text.split()) <= 900


def test_faults_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    row = "trainer.2.memory"
    page.write_text(f"# One\n\n[a](#two) [b](gone.md) [c](#one)\n\nIt is [7 times](x.md#{row}) faster. 3.5 % less.\n")
    assert dead_links(page) == ["page.md: #two", "page.md: gone.md", f"page.md: x.md#{row}"]
    assert [(claim.number, claim.grounded) for claim in claims(page)] == [("7", False), ("3.5", False)]
    assert row_names(page) == []
    page.write_text(f"A step takes [0.54 times](../measured/trainer.md#{row}) the memory.\n")
    assert [claim.grounded for claim in claims(page)] == [True]
    page.write_text(f'A step takes [0.54 times](trainer.json "{row}") the memory, says {row}.\n')
    assert [claim.grounded for claim in claims(page)] == [True] and row_names(page) == [row]
    assert faults("offbeat trian run.toml") and faults("offbeat train run.toml --sett x=1") and faults("offbeat train")
    assert faults("pip install 'offbeat[nothing]'") and faults("python examples/minimal.py --nothing")
    assert not faults("pip install 'offbeat[train]'") and not faults("python examples/minimal.py --sync-every 10")


def test_pages_are_parsed_as_people_read_them() -> None:
    text = "# A b\n\n<!-- run -->\n\n```bash\n# not a heading\nls\n```\n\n[x](y.md) `[no](link)` ![z](z.svg)\n"
    assert blocks(text) == [Block("bash", "# not a heading\nls\n", 5, True)]
    assert anchors(text) == {"a-b"} and links(text) == ["y.md", "z.svg"]
