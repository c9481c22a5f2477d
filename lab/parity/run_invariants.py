"""Check invariant 3 and the counts that v and i promise, with the tests of the local run.

python -m lab.parity.run_invariants    minutes; writes rows run.1.bitwise and run.1.promises
"""

import sys

from lab.figures import ROOT, Figure, command_parser, record
from lab.fixtures.pytest_runs import run_tests

TESTS = "tests/run/test_local.py"
LOOP = "tests/run/synchronous.py"


def main() -> bool:
    command_parser(__doc__).parse_args()
    bitwise = run_tests("-m", "engine", TESTS, "-k", "bit_for_bit")
    promises = run_tests("-m", "engine", TESTS, "-k", "exactly_what_they_promise")
    same = (bitwise.passed, bitwise.failed) == (1, 0)
    lines = len((ROOT / LOOP).read_text(encoding="utf-8").splitlines())
    return record(
        Figure(
            "run.1.bitwise",
            "steps for which v=1, i=1 lockstep has the parameters of an independent synchronous loop, bit for bit",
            "20",
            20 if same else 0,
            "steps",
            same,
            20,
            f"{LOOP}, {lines} lines: its own loop, loss and optimizer; engine and forward pass are shared",
        ),
        Figure(
            "run.1.promises",
            "(v, i) of (1,1), (1,4), (10,1), (4,2): promised generations, updates and publishes, lag (s - 1) mod v",
            "4 of 4",
            f"{promises.passed} of {promises.passed + promises.failed}",
            "pairs",
            (promises.passed, promises.failed) == (4, 0),
            12,
            "12 steps each; v = 4 and 10 go through a whole period or more",
        ),
    )


if __name__ == "__main__":
    sys.exit(not main())
