"""The line of a measured page that says that its rows are older than the code they measure.

A row keeps the commit it was measured at. It counts as old if more than a quarter of the lines of what its page
measures are not as they were at that commit. The share only grows slowly, so a page changes its line once or twice
between two measurements, not with every commit. Without git or its whole history, pages stay as they are.
"""

import json
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Final

from lab.figures import ROOT
from lab.site.lines import fill

OLD: Final = 0.25
"""Share of lines that changed."""
CODE: Final = ("src/offbeat/",)
MEASURES: Final[Mapping[str, tuple[str, ...]]] = {
    "evidence": tuple(f"src/offbeat/{part}/" for part in ("objective", "trainer", "run", "experience", "rollout")),
    "experience": ("src/offbeat/experience/", "src/offbeat/storage/"),
    "foundation": ("src/offbeat/objective/",),
    "lora": tuple(f"src/offbeat/{part}/" for part in ("trainer", "rollout", "weights", "placement")),
    "tasks": tuple(f"src/offbeat/{part}/" for part in ("tasks", "verify", "sandbox", "scoring", "evaluation")),
    "trainer": ("src/offbeat/trainer/", "src/offbeat/objective/"),
    "weights-rollout": tuple(f"src/offbeat/{part}/" for part in ("weights", "rollout", "storage")),
}
"""What the rows of a page measure, if it is not all of the code."""


def age(slug: str) -> str | None:
    """Return the line for a page of results, empty if no row is old; None if there is no history to compare with.

    It has no count that changes often.
    """
    if (_git("rev-parse", "--is-shallow-repository") or "true").strip() == "true":
        return None
    rows = json.loads((ROOT / "lab" / "results" / f"{slug}.json").read_text(encoding="utf-8"))
    paths = MEASURES.get(slug, CODE)
    old = [row["date"] for row in rows if changed_share(row["commit"], row["date"], paths) > OLD]
    return describe(old, len(rows))


def describe(old: Sequence[str], count: int) -> str:
    """Return the line, given the dates of the rows that are old.

    >>> describe(["2026-11-15", "2026-11-16", "2026-11-15"], 4)[:54]
    '**Most rows are older than the code that they measure**'
    >>> describe([], 4)
    ''
    """
    if not old:
        return ""
    many = "All" if len(old) == count else "Most" if 2 * len(old) > count else "Some"
    dates = " to ".join(sorted({min(old), max(old)}))
    changed = f"more than a quarter of it has changed since they were made, {dates}."
    return fill(f"**{many} rows are older than the code that they measure**: {changed}") + "\n"


def changed_share(commit: str, date: str, paths: tuple[str, ...]) -> float:
    """Return the share of today's lines below `paths` that a commit did not have; 0 if git does not know."""
    added = _added(_known(commit.removesuffix("+changes"), date))
    return sum(count for name, count in added.items() if name.startswith(paths)) / max(_lines(paths), 1)


@cache
def _lines(paths: tuple[str, ...]) -> int:
    """Return how many lines the code below `paths` has."""
    return sum(file.read_bytes().count(b"\n") for path in paths for file in (ROOT / path).rglob("*.py"))


@cache
def _known(commit: str, date: str) -> str:
    """Return a commit of this history: the row's own, or, if it was rebased away, the last one of its day."""
    if commit in _history():
        return commit
    return (_git("rev-list", "-1", f"--until={date}T23:59:59Z", "HEAD") or "").strip()


@cache
def _history() -> frozenset[str]:
    return frozenset((_git("rev-list", "--abbrev-commit", "--abbrev=12", "HEAD") or "").split())


@cache
def _added(commit: str) -> dict[str, int]:
    """Return the lines that files of the code have and did not have at a commit, by path."""
    found = _git("diff", "--numstat", "--no-renames", commit, "--", *CODE) if commit else None
    parts = [line.split("\t") for line in (found or "").splitlines()]
    return {name: int(added) for added, _, name in parts if added != "-"}


def _git(*arguments: str) -> str | None:
    """Return what a git command prints, or None if it fails or there is no git."""
    try:
        return subprocess.run(
            ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
