"""Time `scripts/check`, which every contributor runs before every commit.

    python -m lab.house.check_time          about three minutes on two quiet cores; writes row house.6.check

The goal is 5 minutes on two quiet cores without dropping a test; the machine's load is in the note.
"""

import os
import re
import subprocess
import sys
import time

from lab.figures import ROOT, Figure, command_parser, record

BEFORE = 3054
"""Quick tests at 8c24462, where scripts/check took about 7 minutes."""


def main() -> bool:
    """Run it once and record the time."""
    load, start = os.getloadavg()[0], time.perf_counter()
    done = subprocess.run(["scripts/check"], cwd=ROOT, capture_output=True, text=True)
    minutes = (time.perf_counter() - start) / 60
    print(done.stdout[-1500:])
    found = re.search(r"(\d+) passed", done.stdout)
    count = int(found[1]) if found else 0
    holds = done.returncode == 0 and minutes <= 5 and count >= BEFORE
    note = f"{count} quick tests, {BEFORE} at 8c24462; load average {load:.1f} at the start; two pytest processes"
    return record(
        Figure("house.6.check", "scripts/check", "<= 5 minutes", round(minutes, 1), "minutes", holds, 1, note)
    )


if __name__ == "__main__":
    command_parser(__doc__).parse_args()
    sys.exit(not main())
