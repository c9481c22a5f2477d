"""The codec's property test, run and counted."""

import re
import subprocess
import sys

from lab.figures import ROOT, Figure

TEST = "tests/weights/test_delta.py::test_every_bit_survives_the_round_trip"


def codec() -> list[Figure]:
    """How many examples hypothesis tried, and whether all came back bit by bit."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--hypothesis-show-statistics", TEST],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    examples = sum(int(count) for count in re.findall(r"(\d+) passing", done.stdout))
    failing = sum(int(count) for count in re.findall(r"(\d+) failing", done.stdout))
    return [
        Figure(
            "weights-rollout.1.codec",
            "pairs of tensors that hypothesis made and the codec did not give back bit by bit",
            "0 of ≥ 1,000",
            failing,
            "pairs",
            done.returncode == 0 and examples >= 1000 and not failing,
            examples,
            "elements of 1, 2, 4 and 8 bytes; NaN payloads, ±0, denormals, infinities and any other bits; 0 to 100 % "
            "changed, by one unit in the last place or beyond recognition; patched, advanced in place and dense",
        )
    ]
