"""`offbeat doctor --gpu --device cpu` as a user runs it: how long it takes, and whether every part is ok.

    python -m lab.bench.gpu_doctor     three minutes; writes rows rooms.7.doctor and gpu.8.passes

That each part notices its fault is in `tests/preflight/test_gpu_doctor.py`.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from lab.figures import Figure, command_parser, machine, record
from tests.fixtures.processes import OFFBEAT

LIMIT = 300
PARTS = 4


def main() -> int:
    """Run the command; return its exit status."""
    command_parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as place:
        used, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        command = [OFFBEAT, "doctor", "--gpu", "--device", "cpu", "--json", "gpu.json"]
        subprocess.run(command, cwd=place, check=False)
        seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        checks = json.loads(Path(place, "gpu.json").read_text(encoding="utf-8"))["checks"]
    cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
    each = ", ".join(f"{check['what']} {check['seconds']:.0f} s" for check in checks)
    ok = sum(check["state"] == "ok" for check in checks)
    wrong = [f"{check['what']}: {check['detail']}" for check in checks if check["state"] != "ok"]
    holds = record(
        Figure(
            "rooms.7.doctor",
            "`offbeat doctor --gpu --device cpu`, with the engine of this machine",
            f"<= {LIMIT}",
            round(seconds),
            "s",
            seconds <= LIMIT and ok == PARTS,
            1,
            f"{each}; {cpu:.0f} s of processor time; {machine()}",
        ),
        Figure(
            "gpu.8.passes",
            "parts of `offbeat doctor --gpu --device cpu` that are ok",
            f"{PARTS} of {PARTS}",
            f"{ok} of {len(checks)}",
            "parts",
            ok == len(checks) == PARTS,
            len(checks),
            "; ".join(wrong) or "none skipped; the transformers engine sleeps and wakes",
        ),
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
