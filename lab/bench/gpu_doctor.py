"""`offbeat doctor --gpu --device cpu` as a user runs it, and the faults that its checks notice.

    python -m lab.bench.gpu_doctor             10 minutes; writes rows gpu.8.*
    python -m lab.bench.gpu_doctor --short     the faults that need no other process; records nothing

The faults are those of `tests/fixtures/gpu_faults.py`. A fault counts as noticed if exactly the expected checks break.
"""

import json
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.figures import Figure, command_parser, machine, report
from tests.fixtures.gpu_faults import QUICK, SLOW
from tests.fixtures.processes import OFFBEAT

LIMIT = 300.0
CHECKS = 8


@dataclass(frozen=True)
class DoctorRun:
    """One call of the command line."""

    seconds: float
    cpu_seconds: float
    report: dict[str, Any]


def run_doctor() -> DoctorRun:
    """Run the command and read the report it writes."""
    with tempfile.TemporaryDirectory() as place:
        command = [OFFBEAT, "doctor", "--gpu", "--device", "cpu", "--json", "gpu.json"]
        used, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        subprocess.run(command, cwd=place, check=False)
        seconds, after = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - used.ru_utime - used.ru_stime
        return DoctorRun(seconds, cpu, json.loads(Path(place, "gpu.json").read_text(encoding="utf-8")))


def doctor_figures(done: DoctorRun) -> list[Figure]:
    """Rows gpu.8.seconds and gpu.8.passes."""
    checks = done.report["checks"]
    ok = sum(check["state"] == "ok" for check in checks)
    each = ", ".join(f"{check['what']} {check['seconds']:.0f} s" for check in checks)
    wrong = [f"{check['what']}: {check['detail']}" for check in checks if check["state"] != "ok"]
    return [
        Figure(
            "gpu.8.seconds",
            "`offbeat doctor --gpu --device cpu`, all checks",
            f"<= {LIMIT:.0f}",
            round(done.seconds),
            "s",
            done.seconds <= LIMIT,
            1,
            f"{each}; {done.cpu_seconds:.0f} s of processor time; {machine()}",
        ),
        Figure(
            "gpu.8.passes",
            "checks of `offbeat doctor --gpu --device cpu` that are ok",
            f"{CHECKS} of {CHECKS}",
            f"{ok} of {len(checks)}",
            "checks",
            ok == len(checks) == CHECKS,
            len(checks),
            "; ".join(wrong) or "none skipped; sleep and wake with the transformers engine, ranks with gloo",
        ),
    ]


def fault_figure(short: bool) -> Figure:
    """Row gpu.8.faults."""
    noticed, missed = 0, []
    faults = QUICK if short else QUICK | SLOW
    count = sum(len(expected) for _, expected in faults.values())
    for name, (inject, expected) in faults.items():
        findings = inject()
        found = [finding.what for finding in findings if finding.broken]
        print(f"{name}: " + "; ".join(str(one) for one in findings if one.broken), flush=True)
        if found == expected:
            noticed += len(expected)
        else:
            missed.append(f"{name}: expected {expected}, broken {found}")
    return Figure(
        "gpu.8.faults",
        "injected faults that `offbeat doctor --gpu` notices",
        "all",
        f"{noticed} of {count}",
        "faults",
        noticed == count,
        count,
        "; ".join(missed) or f"{', '.join(faults)}; no other check broke",
    )


def main() -> int:
    """Run the command; return its exit status."""
    short = command_parser(__doc__, short="only faults without other processes; record nothing").parse_args().short
    figures = [] if short else doctor_figures(run_doctor())
    return 0 if report(short, *figures, fault_figure(short)) else 1


if __name__ == "__main__":
    sys.exit(main())
