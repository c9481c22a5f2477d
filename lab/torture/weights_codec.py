"""Run the property test of the codec and count its examples."""

import re

from lab.figures import Figure
from lab.fixtures.pytest_runs import run_tests

TEST = "tests/weights/test_delta.py::test_every_bit_survives_the_round_trip"


def codec() -> list[Figure]:
    """Row weights-rollout.1.codec: how many examples hypothesis tried, and whether every bit survived."""
    run = run_tests("--hypothesis-profile", "thousand", "--hypothesis-show-statistics", TEST)
    failing = sum(int(count) for count in re.findall(r"(\d+) failing", run.output))
    return [
        Figure(
            "weights-rollout.1.codec",
            "pairs of tensors from hypothesis that the codec did not restore bit by bit",
            "0 of ≥ 1,000",
            failing,
            "pairs",
            run.ok and run.examples >= 1000 and not failing,
            run.examples,
            "elements of 1, 2, 4 and 8 bytes; NaN payloads, ±0, denormals, infinities and any other bits; 0 to 100 % "
            "changed, by one unit in the last place or beyond recognition; patched, advanced in place and dense",
        )
    ]
