"""Run `.ci/run` on a clean clone and record how long it takes: `python -m lab.house.ci`, on an idle machine.

The clone has the last commit and nothing else; the installation counts. Writes rows rooms.5.*. `--output` names a file
for what `.ci/run` prints. Under an hour.
"""

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from lab.figures import ROOT, Figure, command_parser, machine, record

SUMMARY: Final = re.compile(r"^(?P<counts>\d+ (?:failed|passed)\b.*) in (?P<seconds>[\d.]+)s", re.MULTILINE)
"""The last line of a tier: "3599 passed, 1 skipped in 472.26s (0:07:52)"."""
FAILURE: Final = re.compile(r"^_+ (?:ERROR at \w+ of )?(\S+) _+$", re.MULTILINE)
"""The heading of a test that failed."""
MOST_MINUTES: Final = 45
MOST_QUICK_MINUTES: Final = 5


def run_ci(output: Path) -> tuple[bool, float]:
    """Run it in a clean clone; return whether it passed, and its minutes."""
    with tempfile.TemporaryDirectory() as place:
        clone = Path(place, "offbeat")
        subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
        if (shared := ROOT.parent / "shared").exists():
            Path(place, "shared").symlink_to(shared)
        started = time.monotonic()
        with output.open("w", encoding="utf-8") as file:
            done = subprocess.run([".ci/run"], cwd=clone, stdout=file, stderr=subprocess.STDOUT)
        return done.returncode == 0, (time.monotonic() - started) / 60


def figures(text: str, passed: bool, minutes: float) -> list[Figure]:
    """Return the rows, from what `.ci/run` printed."""
    tiers = [(match["counts"], float(match["seconds"]) / 60) for match in SUMMARY.finditer(text)]
    tests = sum(int(number) for counts, _ in tiers for number in re.findall(r"(\d+) (?:passed|failed)", counts))
    said = "; ".join(f"{name}: {counts}" for name, (counts, _) in zip(("quick", "engine"), tiers, strict=False))
    rows = [
        Figure("rooms.5.ci", ".ci/run on a clean clone, installation included", f"≤ {MOST_MINUTES}, passed",
               round(minutes, 1), "minutes", passed and minutes <= MOST_MINUTES, tests,
               f"{', '.join(FAILURE.findall(text)) or 'none'} failed; {said}; no test is left out; {machine()}")
    ]  # fmt: skip
    if tiers:
        quick = tiers[0][1]
        rows.append(Figure("rooms.5.quick", "the quick tier in .ci/run", f"≤ {MOST_QUICK_MINUTES}", round(quick, 1),
                           "minutes", quick <= MOST_QUICK_MINUTES, tests, f"{tiers[0][0]}; {machine()}"))  # fmt: skip
    return rows


def main() -> bool:
    parser = command_parser(__doc__)
    parser.add_argument("--output", type=Path, default=Path("ci.txt"), help="file for what .ci/run prints")
    output = parser.parse_args().output
    passed, minutes = run_ci(output)
    return record(*figures(output.read_text(encoding="utf-8"), passed, minutes)) and passed


if __name__ == "__main__":
    sys.exit(not main())
