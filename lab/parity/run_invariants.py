"""Invariant 3 and the promises of v and i, by the tests that hold them: rows run.1.*

python -m lab.parity.run_invariants
"""

import sys

from lab.bench.foundation import pytest
from lab.figures import Figure, record

TESTS = "tests/run/test_local.py"


def passed(named: str) -> tuple[int, int]:
    """Tests that pass, and that do not."""
    well, badly, _ = pytest("-m", "engine", TESTS, "-k", named)
    return well, badly


def main() -> bool:
    same, other = passed("bit_for_bit")
    kept, broken = passed("exactly_what_they_promise")
    return record(
        Figure(
            "run.1.bitwise",
            "steps for which v=1, i=1 lockstep has the parameters of an independent synchronous loop, bit for bit",
            "20",
            20 if (same, other) == (1, 0) else 0,
            "steps",
            (same, other) == (1, 0),
            20,
            "tests/run/synchronous.py, 73 lines: its own loop, loss and optimiser; engine and forward pass are shared",
        ),
        Figure(
            "run.1.promises",
            "(v, i) of (1,1), (1,4), (10,1), (4,2): promised generations, updates and publishes, lag (s - 1) mod v",
            "4 of 4",
            f"{kept} of {kept + broken}",
            "pairs",
            (kept, broken) == (4, 0),
            12,
            "12 steps each; v = 4 and 10 go through a whole period or more",
        ),
    )


if __name__ == "__main__":
    sys.exit(not main())
