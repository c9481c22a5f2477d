"""How a lab command reports figures: printed at the end, and kept as rows of `lab/results/<slug>.json`.

The next run of the same command replaces its rows. Never edit a row by hand.
"""

import argparse
import fcntl
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Figure:
    """One measured number and its goal."""

    id: str
    """For instance 'foundation.3', or 'foundation.3.backward' if one item has several numbers."""
    what: str
    goal: str
    measured: float | int | str
    unit: str
    holds: bool
    n: int
    """Repetitions, cases or samples behind the number."""
    note: str = ""


def command_parser(doc: str | None, *, short: str = "") -> argparse.ArgumentParser:
    """Return a parser whose help is the module's docstring. `short` is the help of `--short`, if there is one.

    Every lab command parses its arguments before it measures, so that `--help` never runs it.
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if short:
        parser.add_argument("--short", action="store_true", help=short)
    return parser


def command() -> str:
    """Return the running command line as you would type it at the root of the repository."""
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    return " ".join(["python", "-m", ".".join(script.with_suffix("").parts), *sys.argv[1:]])


def commit() -> str:
    """Return the commit that is measured, with `+changes` if the tree differs from it."""
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", "src", "examples"], cwd=ROOT, capture_output=True, text=True
    )
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def machine() -> str:
    """Describe how busy the machine is, for the note of a time that was measured on it."""
    return f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"


def _order(row: dict[str, object]) -> list[tuple[int, str]]:
    """Sort foundation.2 before foundation.10."""
    return [(int(part) if part.isdigit() else 0, part) for part in str(row["id"]).split(".")]


def record(*figures: Figure) -> bool:
    """Write the rows and print them. Return True if all of them hold."""
    origin = {"command": command(), "commit": commit(), "date": datetime.now(UTC).date().isoformat()}
    for figure in figures:
        path = ROOT / "lab" / "results" / f"{figure.id.split('.')[0]}.json"
        with path.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # two commands may finish at once
            file.seek(0)
            rows = [row for row in json.loads(file.read() or "[]") if row["id"] != figure.id]
            rows = sorted([*rows, asdict(figure) | origin], key=_order)
            file.truncate(0)
            file.write(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    for figure in figures:
        verdict = "holds" if figure.holds else "FALLS SHORT"
        print(f"{figure.id}  {figure.what}: {figure.measured} {figure.unit} (goal {figure.goal}) {verdict}")
    return all(figure.holds for figure in figures)


def show(*figures: Figure) -> bool:
    """Print the figures of a short run, which are not recorded. Return True if all of them hold."""
    for figure in figures:
        result = f"{figure.measured} {figure.unit} (goal {figure.goal})"
        print(f"{figure.id}  {figure.what}: {result}, n = {figure.n}, short run, not recorded")
        if figure.note:
            print(f"  {figure.note}")
    return all(figure.holds for figure in figures)


def report(short: bool, *figures: Figure) -> bool:
    """Record the figures of a full run, or show those of a short run. Return True if all of them hold."""
    return show(*figures) if short else record(*figures)
