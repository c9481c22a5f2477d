"""The docs as a site that needs nothing from elsewhere: `python scripts/build_site.py`, then build/site/index.html.

The README is its first page. What the docs link to in the repository (sources, tests, results) is copied into it, so
that every link leads somewhere without a host. Formulas become MathML, which browsers draw. Needs offbeat[docs].
"""

import html
import os
import re
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

from latex2mathml.converter import convert

ROOT = Path(__file__).resolve().parent.parent
TOP = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
MATHS = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)


def gather(pages: Path) -> None:
    """The Markdown of the site in one directory, with what it links to."""
    shutil.rmtree(pages, ignore_errors=True)
    pages.mkdir(parents=True)
    sources = {ROOT / "README.md": "index.md", **{ROOT / name: name for name in TOP}}
    sources |= {page: page.name for page in (ROOT / "docs").glob("*.md")}
    for source, name in sources.items():
        text = source.read_text(encoding="utf-8")
        move = partial(_moved, source=source, sources=sources, pages=pages)
        (pages / name).write_text(LINK.sub(move, text), encoding="utf-8")
    for picture in (ROOT / "docs").glob("*.svg"):
        shutil.copy(picture, pages)


def _moved(link: re.Match[str], source: Path, sources: dict[Path, str], pages: Path) -> str:
    if "://" in link[2]:
        return link[0]
    target = (source.parent / link[2]).resolve()
    name = sources.get(target) or (target.name if target.suffix == ".svg" else _copied(target, pages))
    return f"{link[1]}{name}{link[3] or ''}{link[4]}"


def _copied(target: Path, pages: Path) -> str:
    """A file of the repository as plain text, which a browser shows instead of offering to save it."""
    name = Path("source") / f"{target.relative_to(ROOT)}".removesuffix(".txt")
    name = name.with_name(f"{name.name}.txt")
    (pages / name).parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        (pages / name).write_text("".join(f"{entry.name}\n" for entry in sorted(target.iterdir())), encoding="utf-8")
    else:
        shutil.copy(target, pages / name)
    return str(name)


def draw_formulas(page: Path) -> None:
    """TeX as MathML."""

    def drawn(found: re.Match[str]) -> str:
        return str(convert(html.unescape(found[3]).strip(), display="block" if found[2] == "[" else "inline"))

    page.write_text(MATHS.sub(drawn, page.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> int:
    """Build; fails on a link that leads nowhere."""
    gather(ROOT / "build" / "pages")
    command = [str(Path(sys.executable).parent / "zensical"), "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_COLOR": "1"})
    for page in (ROOT / "build" / "site").rglob("*.html"):
        draw_formulas(page)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
