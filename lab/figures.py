"""How the lab writes a figure: printed last, and kept as a row of `lab/results/<slug>.json`.

A row is replaced by the next run of the same command. Nothing here is edited by hand.
"""

import fcntl
import json
import subprocess
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Figure:
    """One measured number against what was asked for."""

    id: str
    """'foundation.3', or 'foundation.3.backward' where one item has several numbers."""
    what: str
    goal: str
    measured: float | int | str
    unit: str
    holds: bool
    n: int
    """Repetitions, cases or samples behind the number."""
    note: str = ""


def command() -> str:
    """The command line that is running, as a person at the repository's root would type it."""
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    return " ".join(["python", "-m", ".".join(script.with_suffix("").parts), *sys.argv[1:]])


def commit() -> str:
    """The commit measured, marked where the tree differs from it."""
    head = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--", "src", "examples"], cwd=ROOT, capture_output=True, text=True
    )
    return head.stdout.strip() + ("+changes" if changed.stdout.strip() else "")


def _order(row: dict[str, object]) -> list[tuple[int, str]]:
    """foundation.2 before foundation.10."""
    return [(int(part) if part.isdigit() else 0, part) for part in str(row["id"]).split(".")]


def record(*figures: Figure) -> bool:
    """Write the rows, print them, and say whether all hold."""
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
