"""Build the docs as a site that needs no network: `python scripts/build_site.py`, then open build/site/index.html.

The README is the first page; folders of docs/ stay folders. Files of the repository that the docs link to (sources,
tests, results) are copied into the site as text, so that every link works without a server. Formulas become MathML,
which browsers draw. Needs offbeat[docs].
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
TOP = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "CODE_OF_CONDUCT.md")
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\s+\"[^\"]*\")?(\))")
MATHS = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)


def gather(pages: Path) -> None:
    """Write the Markdown of the site into one directory, with the files it links to."""
    shutil.rmtree(pages, ignore_errors=True)
    docs = ROOT / "docs"
    sources = {ROOT / "README.md": Path("index.md"), **{ROOT / name: Path(name) for name in TOP}}
    sources |= {file: file.relative_to(docs) for pattern in ("*.md", "*.svg", "*.css") for file in docs.rglob(pattern)}
    for source, place in sources.items():
        (pages / place).parent.mkdir(parents=True, exist_ok=True)
        if source.suffix != ".md":
            shutil.copy(source, pages / place)
            continue
        relink = partial(_relinked, source=source, sources=sources, pages=pages)
        (pages / place).write_text(LINK.sub(relink, source.read_text(encoding="utf-8")), encoding="utf-8")


def _relinked(link: re.Match[str], source: Path, sources: dict[Path, Path], pages: Path) -> str:
    """A link as it must read on the site, relative to the page it is on."""
    if "://" in link[2]:
        return link[0]
    target = (source.parent / link[2]).resolve()
    place = sources[target] if target in sources else _copied(target, pages)
    name = os.path.relpath(place, sources[source].parent)
    return f"{link[1]}{name}{link[3] or ''}{link[4] or ''}{link[5]}"


def _copied(target: Path, pages: Path) -> Path:
    """Copy a file of the repository as plain text, which a browser shows instead of saving it."""
    inside = [part.lstrip(".") for part in target.relative_to(ROOT).parts]  # the site leaves out names with a dot
    place = Path("source", *inside)
    place = place.with_name(f"{place.name.removesuffix('.txt')}.txt")
    (pages / place).parent.mkdir(parents=True, exist_ok=True)
    if target.is_dir():
        (pages / place).write_text("".join(f"{entry.name}\n" for entry in sorted(target.iterdir())), encoding="utf-8")
    else:
        shutil.copy(target, pages / place)
    return place


def draw_formulas(page: Path) -> None:
    """Replace TeX by MathML."""

    def drawn(found: re.Match[str]) -> str:
        return str(convert(html.unescape(found[3]).strip(), display="block" if found[2] == "[" else "inline"))

    page.write_text(MATHS.sub(drawn, page.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> int:
    """Build the site; fail on a link that does not resolve."""
    gather(ROOT / "build" / "pages")
    command = [str(Path(sys.executable).parent / "zensical"), "build", "--clean", "--strict"]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "NO_COLOR": "1"})
    for page in (ROOT / "build" / "site").rglob("*.html"):
        draw_formulas(page)
    return done.returncode


if __name__ == "__main__":
    sys.exit(main())
