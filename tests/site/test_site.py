"""The docs site builds without network, and every link in it resolves."""

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SITE = ROOT / "build" / "site"

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    done = subprocess.run([sys.executable, "scripts/build_site.py"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@cache
def page(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def test_every_page_of_the_docs_is_on_the_site_and_in_the_menu() -> None:
    docs = ROOT / "docs"
    names = {file.relative_to(docs).with_suffix(".html").as_posix() for file in docs.rglob("*.md")}
    menu = page(SITE / "index.html")
    assert names <= {file.relative_to(SITE).as_posix() for file in SITE.rglob("*.html")}
    assert {name for name in names if f'href="./{name}"' not in menu} == set()


def test_every_link_and_anchor_of_the_site_resolves() -> None:
    dead = []
    for file in SITE.rglob("*.html"):
        for target in re.findall(r'(?:href|src)="([^"]*)"', page(file)):
            name, _, anchor = target.partition("#")
            if re.match(r"\w+:", name) or file.name == "404.html":
                continue
            to = file.parent / name if name else file
            to = to / "index.html" if to.is_dir() else to
            there = to.exists() and (not anchor or to.suffix != ".html" or f'id="{anchor}"' in page(to))
            dead += [] if there else [f"{file.relative_to(SITE)}: {target}"]
    assert dead == []


def test_nothing_is_fetched_from_other_sites_and_no_formula_is_left_as_tex() -> None:
    for file in SITE.rglob("*.html"):
        fetched = re.findall(r'<(?:script|link|img|source)[^>]*(?:src|href)="(?:https?:)?//[^"]*"', page(file))
        assert fetched == [] and 'class="arithmatex"' not in page(file), file.name
