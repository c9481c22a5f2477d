"""Lines of Markdown: at most 120 characters, so that a page can be read and compared in an editor.

    python -m lab.site.lines    wrap every paragraph and list item of the repository that has a longer line

Code, tables, formulas and headings stay as they are; `tests/site/test_docs.py` finds those that are too long.
"""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lab.figures import ROOT, command_parser

WIDTH: Final = 120
WHOLE: Final = re.compile(
    r"\w+ = \S+|`[^`]*`(?:\]\([^)]*\))?\S*|!?\[[^\[\]]*\]\([^)]*\)\S*|\$[^$\n]+\$\S*|<[^>]*>\S*|\S+"
)
"""What a line must not break: an equation as `v = 5`, code, a link with its text, a formula, a tag, a word."""
ITEM: Final = re.compile(r"(\s*)([-*+]|\d+\.) +")
KEPT: Final = re.compile(r"\s*(\||#|<!--|```|\$\$|!\[|<)")
BEGINS_A_BLOCK: Final = re.compile(r"([-+*>|]|\d+[.)])$|[#>|]")


def markdown_files() -> list[Path]:
    """Return every Markdown file that belongs to the repository."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"]
    names = subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [ROOT / name for name in names if (ROOT / name).exists()]


def too_long(text: str) -> list[int]:
    """Return the numbers of the lines that are too long and could be broken; a single link cannot.

    >>> too_long("short\\n" + "word " * 30 + "\\n- [a](https://" + "x" * 120 + ")")
    [2]
    """
    lines = enumerate(text.splitlines(), start=1)
    return [number for number, line in lines if len(line) > WIDTH and len([*_words(ITEM.sub("", line, 1))]) > 1]


def fill(text: str, begin: str = "", indent: str = "") -> str:
    """Return one paragraph as lines that begin with `indent`, the first one with `begin`.

    >>> print(fill("one " * 40, "- ", "  "))  # doctest: +ELLIPSIS
    - one one ...
      one one ...
    """
    lines = [begin]
    for word in _words(text):
        empty = lines[-1] in (begin, indent)
        if not empty and len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append(indent)
            empty = True
        lines[-1] += word if empty else f" {word}"
    return "\n".join(lines)


def items(texts: list[str]) -> str:
    """Return a list with an item for each text."""
    return "\n".join(fill(text, "- ", "  ") for text in texts) + "\n"


def _words(text: str) -> Iterator[str]:
    """Yield what a line keeps together; a word that would begin a list or a heading stays beside the one before."""
    kept = ""
    for word in WHOLE.findall(" ".join(text.split())):
        if kept and not BEGINS_A_BLOCK.match(word):
            yield kept
            kept = word
        else:
            kept = f"{kept} {word}".strip()
    if kept:
        yield kept


def wrap(page: str) -> str:
    """Return a page with every paragraph and list item wrapped that has a line that is too long."""
    done: list[str] = []
    part: list[str] = []
    fenced = False
    for line in [*page.split("\n"), ""]:
        fence = line.lstrip().startswith("```")
        if fence or fenced or not line.strip() or KEPT.match(line) or ITEM.match(line):
            done += _wrapped(part)
            part = []
        if not fenced and not fence and line.strip() and not KEPT.match(line):
            part.append(line)
        else:
            done.append(line)
        fenced ^= fence
    return "\n".join(done[:-1])


def _wrapped(part: list[str]) -> list[str]:
    if all(len(line) <= WIDTH for line in part):
        return part
    found = ITEM.match(part[0])
    begin = found[0] if found else re.match(r"\s*", part[0])[0]  # type: ignore[index]  # it matches every text
    return fill(" ".join([part[0][len(begin) :], *part[1:]]), begin, " " * len(begin)).split("\n")


def main() -> None:
    """Wrap every Markdown file."""
    for file in markdown_files():
        text = file.read_text(encoding="utf-8")
        if (wrapped := wrap(text)) != text:
            file.write_text(wrapped, encoding="utf-8")


if __name__ == "__main__":
    command_parser(__doc__).parse_args()
    main()
