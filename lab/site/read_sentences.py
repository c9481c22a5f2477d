"""Count the sentences of the docs that were read beside their rows, and those that were found wrong and are fixed.

    python -m lab.site.read_sentences    seconds; writes row door.2.sentences

A sentence here is a paragraph, list item or table line, outside built parts, that cites a row or has a figure. All of
them were read at commit `READ_AT`, each beside its row and beside the command that made the row. `read_sentences.json`
lists those that said something else than the command did: what the page said, what the command did, what the page says
now. One is fixed if the page no longer says the first and, where the list has it, says the last.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from lab.figures import ROOT, Figure, command_parser, record
from lab.site.pages import DIARY, FIGURE, LINK, NOT_MEASURED, ROW, passages, rows, visible

READ_AT = "9d75e79212b5"
LIST = Path(__file__).with_suffix(".json")


@dataclass(frozen=True)
class WrongSentence:
    """A sentence that said something else than the command did."""

    page: str
    said: str
    did: str
    """What the command of the row did."""
    now: str
    """What the page says instead; empty if the page was written anew."""
    row: str

    @property
    def fixed(self) -> bool:
        text = " ".join((ROOT / self.page).read_text(encoding="utf-8").split())
        return self.said not in text and self.now in text


def wrong_sentences() -> list[WrongSentence]:
    """Return the list."""
    return [WrongSentence(**one) for one in json.loads(LIST.read_text(encoding="utf-8"))]


def citing(page: str, text: str) -> list[str]:
    """Return the passages of a page that cite a row or have a figure."""
    return [passage for passage in passages(text) if _cites(passage) or _figures(page, passage)]


def _cites(passage: str) -> bool:
    named = [*ROW.findall(passage), *(part for target, title in LINK.findall(passage) for part in (target, title))]
    return any(name.partition("#")[2] in rows() or name in rows() for name in named)


def _figures(page: str, passage: str) -> bool:
    found = [match[1] or match[2] for match in FIGURE.finditer(visible(passage))]
    return any(number not in NOT_MEASURED.get(page, ()) for number in found)


def read_then() -> int:
    """Return how many sentences the pages had when they were read."""
    listed = _git("ls-tree", "-r", "--name-only", READ_AT, "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "docs/")
    names = [name for name in listed.splitlines() if name.endswith(".md") and not name.startswith("docs/measured/")]
    return sum(len(citing(name, _git("show", f"{READ_AT}:{name}"))) for name in names if name != DIARY)


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> bool:
    command_parser(__doc__).parse_args()
    wrong, read = wrong_sentences(), read_then()
    left = [one for one in wrong if not one.fixed]
    for one in left:
        print(f"{one.page} is to say something else than: {one.said}\n  {one.did}")
    by_page = ", ".join(
        f"{page} {sum(one.page == page for one in left)}" for page in sorted({one.page for one in left})
    )
    return record(
        Figure(
            "door.2.sentences",
            "sentences of README and docs that cite a row or a figure: read beside the command that made the row",
            "all read; all that are wrong are fixed",
            f"{read} read, {len(wrong)} wrong, {len(wrong) - len(left)} fixed",
            "",
            not left,
            read,
            f"paragraphs, list items and table lines outside built parts, at {READ_AT}; the list of those that said "
            f"something else is lab/site/{LIST.name}" + (f"; not fixed: {by_page}" if left else ""),
        )
    )


if __name__ == "__main__":
    sys.exit(not main())
