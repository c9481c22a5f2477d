"""Check sentences of the docs that were wrong once: each is on its page, and a test or a measured row stands behind it.

    python -m lab.site.corrected    seconds; writes row promises.9

`tests/site/test_corrected_sentences.py` makes the same checks, sentence by sentence. A row that is not recorded yet
counts if it begins with `promises.` and lab/README.md lists the command that writes it.
"""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase

from lab.figures import ROOT, Figure, command_parser, record
from lab.site.pages import rows


@dataclass(frozen=True)
class Corrected:
    """A sentence, or enough of it to recognize it, and its evidence."""

    page: str
    says: str
    evidence: str
    """A test, `tests/….py::name`, or the id of a row of lab/results."""

    @property
    def faults(self) -> list[str]:
        """Return what is wrong: the sentence is not on its page, or its evidence does not exist."""
        text = " ".join((ROOT / self.page).read_text(encoding="utf-8").split())
        found = [] if self.says in text else [f"{self.page} does not say: {self.says}"]
        there = _test_exists(self.evidence) if "::" in self.evidence else _row_exists(self.evidence)
        return found if there else [*found, f"there is no {self.evidence}"]


def sentences() -> list[Corrected]:
    """Read corrected_sentences.txt: for each sentence its page, the sentence, and after an arrow its evidence."""
    text = (ROOT / "lab" / "site" / "corrected_sentences.txt").read_text(encoding="utf-8")
    found = re.findall(r"^== (\S+)\n(.+?)\n-> (\S+)$", text, re.M | re.S)
    return [Corrected(page, " ".join(says.split()), evidence) for page, says, evidence in found]


def _test_exists(name: str) -> bool:
    file, _, test = name.partition("::")
    path = ROOT / file
    if not path.is_file():
        return False
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return any(isinstance(node, ast.FunctionDef) and node.name == test for node in ast.walk(tree))


def _row_exists(row: str) -> bool:
    return row in rows() or (row.startswith("promises.") and any(fnmatchcase(row, one) for one in _listed_rows()))


def _listed_rows() -> Iterator[str]:
    """Yield the rows that commands write, as lab/README.md lists them."""
    for line in (ROOT / "lab" / "README.md").read_text(encoding="utf-8").splitlines():
        if line.startswith("| `python -m lab."):
            yield from re.findall(r"`([^`]+)`", line.split(" | ")[-1])


def main() -> bool:
    command_parser(__doc__).parse_args()
    found = sentences()
    wrong = [one for one in found if one.faults]
    print(*(fault for one in wrong for fault in one.faults), sep="\n")
    by_row = sum("::" not in one.evidence for one in found)
    return record(
        Figure(
            "promises.9",
            "corrected sentences of the docs that are on their page and have a test or a row behind them",
            "all",
            len(found) - len(wrong),
            f"of {len(found)}",
            not wrong,
            len(found),
            f"{len(found) - by_row} rest on tests, {by_row} on rows",
        )
    )


if __name__ == "__main__":
    sys.exit(not main())
