"""The tests of `tests/breaks` at the commit that was attacked and at this one: `python -m lab.torture.breaks`. Minutes.

Each test is a break that was found at a4ce5e6. There it must fail by what the code does, with an assertion; a test that
cannot import something, or that has another error, proves nothing. Here it must pass. Writes row trust.1.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.etree import ElementTree

from lab.figures import ROOT, Figure, command_parser, machine, report
from lab.house.earlier import BEFORE, earlier_checkout

BREAKS: Final = ROOT / "tests" / "breaks"
LEAST: Final = 14
"""Breaks that the attack found; the folder has at least these."""
BY_BEHAVIOR: Final = ("AssertionError", "assert ", "Failed:")
"""How the message of a failure begins if an expectation of the test was not met."""


@dataclass(frozen=True)
class Verdict:
    """What became of one test."""

    outcome: str
    """`passed`, `failed` by an expectation that was not met, or `error`."""
    message: str = ""


def run_breaks(source: Path, chosen: str) -> Mapping[str, Verdict]:
    """Run the tests against the package in a checkout, and return the verdicts by name."""
    with tempfile.TemporaryDirectory() as place:
        result = Path(place, "result.xml")
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull]
        command += ["--import-mode=importlib", f"--rootdir={ROOT}", f"--junitxml={result}", "-k", chosen, str(BREAKS)]
        environment = os.environ | {"PYTHONPATH": str(source / "src")}
        subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
        found = ElementTree.parse(result).iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": _verdict(case) for case in found}


def _verdict(case: ElementTree.Element) -> Verdict:
    for kind in ("error", "failure", "skipped"):
        if (node := case.find(kind)) is not None:
            message = str(node.get("message"))
            by_behavior = kind == "failure" and message.startswith(BY_BEHAVIOR)
            return Verdict("failed" if by_behavior else "error", " ".join(message.split())[:200])
    return Verdict("passed")


def main() -> bool:
    parser = command_parser(__doc__, short="only the tests about captured rewards; records nothing")
    short = parser.parse_args().short
    chosen = "capture" if short else ""
    with earlier_checkout() as earlier:
        before = run_breaks(earlier, chosen)
    now = run_breaks(ROOT, chosen)
    closed = [name for name in before if before[name].outcome == "failed" and now[name].outcome == "passed"]
    for name in sorted(before.keys() - set(closed)):
        print(f"{name}\n  at {BEFORE}: {before[name]}\n  now: {now.get(name)}")
    listed = "; ".join(name.rpartition("::")[2].removeprefix("test_").replace("_", " ") for name in sorted(closed))
    return report(
        short,
        Figure("trust.1", f"breaks that fail at {BEFORE} by what it does, and pass now", f"all, at least {LEAST}",
               f"{len(closed)} of {len(before)}", "tests",
               len(closed) == len(before) and (short or len(closed) >= LEAST), len(before),
               f"{listed}; {machine()}"),
    )  # fmt: skip


if __name__ == "__main__":
    sys.exit(not main())
