"""The parts of a page of the docs: code blocks, links, headings, and figures in prose."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from textwrap import dedent
from typing import Final

from lab.figures import ROOT

FENCE: Final = re.compile(r"(?:<!-- (run|file: \S+) -->\s*)?^([ ]*)```(\w*)[^\n]*\n(.*?)^\2```", re.M | re.S)
"""A code block, possibly indented in a list."""
BUILT: Final = re.compile(r"<!-- built: ([\w -]+) -->\n.*?<!-- end -->", re.S)
UNIT: Final = r"(?:×|%|x\b|times\b|fold\b|m?s\b|seconds?\b|minutes?\b|hours?\b|[kMG]i?B\b|nats\b|lines\b)"
NUMBER: Final = r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
DECIMAL: Final = r"(?!\d{4}\.\d{5}\b)\d+\.\d+(?:e-?\d+)?|\d{1,3}(?:,\d{3})+"
FIGURE: Final = re.compile(rf"(?<![\w.-])({NUMBER})\s?{UNIT}|(?<![\w.-])({DECIMAL})(?!\.?\d)")
"""A number with a unit, with decimals, or in the thousands; neither an arXiv number nor a version in a name."""
SOURCE: Final = re.compile(r"\]\(https?://")
LINK: Final = re.compile(r"""\]\(([^)\s]+)(?:\s+"([^"]*)")?\)""")
"""The target and the title of a Markdown link."""
ROW: Final = re.compile(r"`([a-z-]+(?:\.[\w-]+)+)`")
DIARY: Final = "docs/log.md"
"""What was tried, with the numbers of the day. Other pages rest on its lessons, not on its figures."""

NOT_MEASURED: Final = {
    "CONTRIBUTING.md": {"450"},  # a limit
    "README.md": {"3.11", "1.35", "0.2", "90,000"},  # a version; a figure of P2, said to be theirs; a setting; a size
    "docs/how-it-works/objective.md": {"2.646", "2.475"},  # arithmetic, and tested as such
    "docs/how-it-works/when-to-publish.md": {"0.05", "0.1", "2.5e-4", "0.55"},  # settings, the last one of a simulation
    "docs/evidence.md": {"0.2"},  # a setting
    "docs/how-to/bring-a-reward.md": {"5.0"},  # a message
    "docs/how-to/choose-v-and-i.md": {"0.05", "0.2"},  # settings
    "docs/how-to/earlier-rollouts.md": {"0.2", "0.5"},  # settings
    "docs/how-to/evaluate.md": {"95"},  # the level of an interval
    "docs/reference/weight-log.md": {"600"},  # a setting
    "docs/start.md": {"3.11", "0.1"},  # a version; the size of a model
}
"""Numbers in prose that are settings, versions, arithmetic or measured elsewhere, by page."""


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    language: str
    text: str
    line: int
    run: bool
    """True for a shell block that is marked to run, in the order of the page."""
    file: str = ""
    """The file of the repository that the block shows; the tests of that file run it."""


def pages() -> list[Path]:
    """Return every page of the documentation."""
    top = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"]
    return [*(ROOT / name for name in top), *sorted((ROOT / "docs").rglob("*.md"))]


def page_name(page: Path) -> str:
    """Return the path of a page within the repository, or its file name if it is elsewhere.

    >>> page_name(ROOT / "docs" / "how-to" / "operate.md"), page_name(Path("/tmp/page.md"))
    ('docs/how-to/operate.md', 'page.md')
    """
    return page.relative_to(ROOT).as_posix() if page.is_relative_to(ROOT) else page.name


def blocks(text: str) -> list[Block]:
    """Return the code blocks of a page, in order.

    >>> blocks("# A\\n\\n```toml\\nsteps = 3\\n```\\n")
    [Block(language='toml', text='steps = 3\\n', line=3, run=False, file='')]
    """
    return [
        Block(
            found[3],
            dedent(found[4]),
            text.count("\n", 0, found.start(3)) + 1,
            found[1] == "run",
            (found[1] or "").partition("file: ")[2],
        )
        for found in FENCE.finditer(text)
    ]


def anchors(text: str) -> set[str]:
    """Return the anchors of a page: of its headings, as GitHub and the site make them, and `<a id="…">`.

    >>> sorted(anchors('# Which lag?\\n## Let drift choose\\n<a id="run.1"></a>'))
    ['let-drift-choose', 'run.1', 'which-lag']
    """
    plain = FENCE.sub("", text)
    headings = re.findall(r"^#+ (.*)$", plain, re.M)
    made = {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}
    return made | set(re.findall(r'<a id="([^"]+)">', plain))


def links(text: str) -> list[str]:
    """Return the targets of links and pictures outside code.

    >>> links('[a](b.md#c "title"), ![d](e.svg) and `[x](y)`')
    ['b.md#c', 'e.svg']
    """
    plain = re.sub(r"`[^`\n]*`(?!\]\()", "", FENCE.sub("", text))
    return [target for target, _ in LINK.findall(plain)] + re.findall(r'(?:src|srcset)="([^"]+)"', plain)


def dead_links(page: Path) -> list[str]:
    """Return the links within the repository whose file or heading does not exist."""
    text, dead = page.read_text(encoding="utf-8"), []
    for target in links(text):
        if "://" in target:
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        if not file.exists() or (anchor and anchor not in anchors(file.read_text(encoding="utf-8"))):
            dead.append(f"{page_name(page)}: {target}")
    return dead


@cache
def rows() -> dict[str, str]:
    """Return the text of every row of lab/results, by its id."""
    found = {}
    for file in (ROOT / "lab" / "results").glob("*.json"):
        for row in json.loads(file.read_text(encoding="utf-8")):
            found[row["id"]] = " ".join(str(row[key]) for key in ("what", "goal", "measured", "unit", "note"))
    return found


def passages(text: str) -> Iterator[str]:
    """Yield paragraphs, list items and table rows, without code, formulas and built parts."""
    plain = re.sub(r"\$\$?[^$]+\$\$?", "", FENCE.sub("", BUILT.sub("", text)))
    for paragraph in re.split(r"\n\s*\n|\n(?=\s*(?:[-*] |\d+\. |\|))", plain):
        if paragraph.strip() and not paragraph.lstrip().startswith("#"):
            yield paragraph.strip()


@dataclass(frozen=True)
class Claim:
    """A figure in prose."""

    page: str
    number: str
    passage: str
    grounded: bool
    """True if a link leads to a row of lab/results that has this number, or to the work that published it."""


def claims(page: Path) -> list[Claim]:
    """Return every figure in the prose of a page.

    A figure is grounded by a link whose anchor or title is the id of a row with that number, as in
    `[0.49 %](../measured/weights-rollout.md#weights-rollout.2.size-1e-6.1)`, or by a table of results on the page.
    """
    text = page.read_text(encoding="utf-8")
    slugs = re.findall(r"<!-- built: results ([\w-]+) -->", text)
    beside = [said for row, said in rows().items() if row.split(".")[0] in slugs]
    found = []
    for passage in passages(text):
        cited = [rows().get(row, "") for row in [*_cited(passage), *ROW.findall(passage)]]
        for match in FIGURE.finditer(visible(passage)):
            number = match[1] or match[2]
            if number in NOT_MEASURED.get(page_name(page), ()):
                continue
            grounded = bool(SOURCE.search(passage)) or any(_says(row, number) for row in [*cited, *beside])
            found.append(Claim(page_name(page), number, passage, grounded))
    return found


def _cited(passage: str) -> list[str]:
    """The ids in the anchors and titles of links."""
    return [part for target, title in LINK.findall(passage) for part in (target.partition("#")[2], title) if part]


def visible(passage: str) -> str:
    """Return what a reader sees of a passage, without code and link targets.

    >>> visible("[0.49 %](run.md#run.1) of `x`")
    '[0.49 %] of '
    """
    return re.sub(r"`[^`]*`", "", LINK.sub("]", passage))


def row_names(page: Path) -> list[str]:
    """Return the row ids that a reader would see in the sentences of a page."""
    shown = [LINK.sub("]", passage) for passage in passages(page.read_text(encoding="utf-8"))]
    return [row for row in rows() if re.search(r"\d", row) and any(_names(passage, row) for passage in shown)]


def _names(passage: str, row: str) -> bool:
    return re.search(rf"(?<![\w.-]){re.escape(row)}(?![\w-]|\.\w)", passage) is not None


def _says(row: str, number: str) -> bool:
    """Whether a row has the number, or, for one with decimals, another that rounds to it.

    >>> _says("0.487 % of the size", "0.49"), _says("18.6 ms", "19"), _says("200 of 200 kills", "200")
    (True, False, True)
    """
    digits, asked = len(number.partition(".")[2]), float(number.replace(",", ""))
    values = [float(found.replace(",", "")) for found in re.findall(NUMBER, row)]
    return asked in values or (digits > 0 and "e" not in number and asked in [round(value, digits) for value in values])
