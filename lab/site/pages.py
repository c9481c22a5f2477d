"""What a page of the docs consists of: code blocks, links, headings, and figures in prose."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from lab.figures import ROOT

FENCE: Final = re.compile(r"(<!-- run -->\s*)?^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)
BUILT: Final = re.compile(r"<!-- built: ([\w -]+) -->\n.*?<!-- end -->", re.S)
UNIT: Final = r"(?:×|%|x\b|times\b|fold\b|m?s\b|seconds?\b|minutes?\b|hours?\b|[kMG]i?B\b|nats\b|lines\b)"
NUMBER: Final = r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
DECIMAL: Final = r"(?!\d{4}\.\d{5}\b)\d+\.\d+(?:e-?\d+)?|\d{1,3}(?:,\d{3})+"
FIGURE: Final = re.compile(rf"(?<![\w.-])({NUMBER})\s?{UNIT}|(?<![\w.-])({DECIMAL})(?!\.?\d)")
"""A number with a unit, with decimals, or in the thousands; neither an arXiv number nor a version in a name."""
SOURCE: Final = re.compile(r"\]\(https?://")
ROW: Final = re.compile(r"`([a-z-]+(?:\.[\w-]+)+)`")
DIARY: Final = "log.md"
"""What was tried, with the numbers of the day; its lessons, not its figures, are what other pages rest on."""

NOT_MEASURED: Final = {
    "CONTRIBUTING.md": {"300"},  # a limit
    "README.md": {"2.13"},  # a version
    "adaptive-sync.md": {"0.05", "2.5e-4", "100,000"},  # settings; the size of a model
    "objectives.md": {"2.646", "2.475"},  # arithmetic, and tested as such
    "start.md": {"3.11", "0.1"},  # a version; the size of a model
    "tasks.md": {"110,000"},  # tasks.1.altered on the same page, rounded down
    "weights.md": {"600"},  # a setting
}


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    text: str
    line: int
    run: bool
    """A shell block that is run as it stands, in the page's order, not only looked at."""


def pages() -> list[Path]:
    """Everything that is documentation."""
    top = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"]
    return [*(ROOT / name for name in top), *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str) -> list[Block]:
    """Its code, in order.

    >>> blocks("# A\\n\\n```toml\\nsteps = 3\\n```\\n")
    [Block(language='toml', text='steps = 3\\n', line=3, run=False)]
    """
    return [
        Block(found[2], found[3], text.count("\n", 0, found.start(2)) + 1, bool(found[1]))
        for found in FENCE.finditer(text)
    ]


def anchors(text: str) -> set[str]:
    """Of its headings, as GitHub and the site make them.

    >>> sorted(anchors("# Which lag?\\n## Let drift choose"))
    ['let-drift-choose', 'which-lag']
    """
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links(text: str) -> list[str]:
    """Targets of links and pictures outside code.

    >>> links("[a](b.md#c), ![d](e.svg) and `[x](y)`")
    ['b.md#c', 'e.svg']
    """
    plain = re.sub(r"`[^`\n]*`(?!\]\()", "", FENCE.sub("", text))
    return re.findall(r"\]\(([^)\s]+)\)", plain) + re.findall(r'(?:src|srcset)="([^"]+)"', plain)


def dead_links(page: Path) -> list[str]:
    """Links of a page within the repository that lead nowhere, or to a heading that is not there."""
    text, dead = page.read_text(encoding="utf-8"), []
    for target in links(text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            dead.append(f"{page.name}: {target}")
    return dead


@cache
def rows() -> dict[str, str]:
    """Everything a figure's row says, by its id."""
    found = {}
    for file in (ROOT / "lab" / "results").glob("*.json"):
        for row in json.loads(file.read_text(encoding="utf-8")):
            found[row["id"]] = " ".join(str(row[key]) for key in ("what", "goal", "measured", "unit", "note"))
    return found


def passages(text: str) -> Iterator[str]:
    """Paragraphs, list items and rows of tables, without code, formulas and what is built."""
    plain = re.sub(r"\$\$?[^$]+\$\$?", "", FENCE.sub("", BUILT.sub("", text)))
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*[-*|] ?)|\n(?=\s*\d+\. )", plain):
        if paragraph.strip() and not paragraph.lstrip().startswith("#"):
            yield paragraph.strip()


@dataclass(frozen=True)
class Claim:
    """A figure in prose."""

    page: str
    number: str
    passage: str
    grounded: bool
    """By a row of lab/results that has this number, or by a link to whoever published it."""


def claims(page: Path) -> list[Claim]:
    """Every figure in a page's prose, with whether it says where it comes from."""
    text = page.read_text(encoding="utf-8")
    slugs = re.findall(r"<!-- built: results ([\w-]+) -->", text)
    beside = [said for row, said in rows().items() if row.split(".")[0] in slugs]
    found = []
    for passage in passages(text):
        named = [rows().get(row, "") for row in ROW.findall(passage)]
        prose = re.sub(r"`[^`]*`", "", passage)
        for match in FIGURE.finditer(prose):
            number = match[1] or match[2]
            if number in NOT_MEASURED.get(page.name, ()):
                continue
            grounded = bool(SOURCE.search(passage)) or any(_says(row, number) for row in [*named, *beside])
            found.append(Claim(page.name, number, passage, grounded))
    return found


def _says(row: str, number: str) -> bool:
    """Whether a row has the number, or, for one with decimals, another that rounds to it.

    >>> _says("0.487 % of the size", "0.49"), _says("18.6 ms", "19"), _says("200 of 200 kills", "200")
    (True, False, True)
    """
    digits, asked = len(number.partition(".")[2]), float(number.replace(",", ""))
    values = [float(found.replace(",", "")) for found in re.findall(NUMBER, row)]
    return asked in values or (digits > 0 and "e" not in number and asked in [round(value, digits) for value in values])
