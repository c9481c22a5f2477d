"""Docs say what is: built parts are current, every block runs or could be typed, every link leads somewhere."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from lab.site.checked import look_up, run
from lab.site.commands import faults
from lab.site.events import written
from lab.site.pages import DIARY, ROOT, Block, anchors, blocks, claims, dead_links, links, pages
from offbeat.events import EVENTS
from offbeat.objective.presets import PRESETS

PAGES = pages()
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def build_docs() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_docs", ROOT / "scripts" / "build_docs.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@each_page
def test_built_parts_are_as_they_would_be_built(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert build_docs().fill(text) == text, "run python scripts/build_docs.py"


def test_a_stale_part_would_be_noticed() -> None:
    stale = "<!-- built: lags -->\n| `grpo` | 99 |\n<!-- end -->"
    assert build_docs().fill(stale) != stale


@each_page
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    run(page, tmp_path, shell=False)


@each_page
def test_commands_exist_with_their_options_and_toml_blocks_are_valid(page: Path) -> None:
    assert [fault for block in blocks(page.read_text(encoding="utf-8")) for fault in look_up(block)] == []


@each_page
def test_every_block_is_of_a_kind_that_is_checked(page: Path) -> None:
    # `py` blocks are files of a task, checked by tests/tasks/test_custom.py; without a language: pictures.
    assert {block.language for block in blocks(page.read_text(encoding="utf-8"))} <= {
        "python",
        "bash",
        "toml",
        "py",
        "text",
        "",
    }


@pytest.mark.engine
@pytest.mark.parametrize("page", [page for page in PAGES if "<!-- run -->" in page.read_text()], ids=lambda p: p.name)
def test_shell_blocks_that_are_marked_run(page: Path, tmp_path: Path) -> None:
    assert run(page, tmp_path, shell=True)["shell"] > 0


@each_page
def test_links_within_the_repository_resolve(page: Path) -> None:
    assert dead_links(page) == []


@each_page
def test_figures_in_prose_say_where_they_come_from(page: Path) -> None:
    if page.name != DIARY:
        loose = [f"{claim.number} in: {claim.passage[:200]}" for claim in claims(page) if not claim.grounded]
        assert not loose, "name the row of lab/results, as in [`trainer.2.memory`](../lab/results/trainer.json)"


def test_every_event_that_a_run_writes_is_explained() -> None:
    assert written(ROOT / "src").keys() == EVENTS.keys()


def test_the_readme_counts_the_objectives_and_stays_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"{len(PRESETS)} published ones" in text and len(text.splitlines()) <= 150


def test_what_is_wrong_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n\n[a](#two) [b](gone.md) [c](#one)\n\nIt is 7 times faster (`trainer.2.memory`). 3.5 % less.\n"
    )
    assert dead_links(page) == ["page.md: #two", "page.md: gone.md"]
    assert [(claim.number, claim.grounded) for claim in claims(page)] == [("7", False), ("3.5", False)]
    page.write_text("A step takes 0.54 times the memory ([`trainer.2.memory`](../lab/results/trainer.json)).\n")
    assert [claim.grounded for claim in claims(page)] == [True]
    assert faults("offbeat trian run.toml") and faults("offbeat train run.toml --sett x=1") and faults("offbeat train")
    assert faults("pip install 'offbeat[nothing]'") and faults("python examples/minimal.py --nothing")
    assert not faults("pip install 'offbeat[train]'") and not faults("python examples/minimal.py --sync-every 10")


def test_pages_are_taken_apart_as_people_read_them() -> None:
    text = "# A b\n\n<!-- run -->\n\n```bash\n# not a heading\nls\n```\n\n[x](y.md) `[no](link)` ![z](z.svg)\n"
    assert blocks(text) == [Block("bash", "# not a heading\nls\n", 5, True)]
    assert anchors(text) == {"a-b"} and links(text) == ["y.md", "z.svg"]
