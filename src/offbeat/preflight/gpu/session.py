"""Run the parts of `offbeat doctor --gpu`, each in a process of its own with a deadline, and write the report.

A CUDA error cannot be recovered from within a process, a kernel may crash it, and a collective may never return.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, cast

from offbeat.errors import OffbeatError, first_line
from offbeat.imports import resolve
from offbeat.preflight.doctor import Finding, FindingState
from offbeat.preflight.gpu.machine import ATTACH, describe_machine, result_file
from offbeat.sandbox.meter import descendants
from offbeat.storage.files import write_atomically
from offbeat.types import Json

PARTS: Final = {
    "machine": ("offbeat.preflight.gpu.machine:check_machine", 20.0),
    "flex": ("offbeat.preflight.gpu.kernels:check_flex", 80.0),
    "training": ("offbeat.preflight.gpu.run:check_training", 130.0),
    "sleep": ("offbeat.preflight.gpu.run:check_sleep", 70.0),
}
"""The function of each part, and its deadline in seconds: five minutes together."""
LOG_BYTES: Final = 6000


class DoctorSession:
    """The parts to run on one device.

    session = DoctorSession("cuda")
    for finding in session.run(): print(finding)
    session.write(Path("gpu.json"))
    """

    def __init__(self, device: str, parts: Sequence[str] = tuple(PARTS)) -> None:
        self.device = device
        self.parts = parts
        self.findings: list[Finding] = []

    @property
    def passed(self) -> bool:
        """True if every part ran and nothing is broken."""
        states = [finding.state for finding in self.findings]
        return len(states) == len(self.parts) and FindingState.BROKEN not in states

    def run(self) -> Iterator[Finding]:
        """Run all parts; yield each finding as soon as it is known."""
        for part in self.parts:
            began = time.monotonic()
            finding = replace(_run_part(part, self.device), seconds=time.monotonic() - began)
            self.findings.append(finding)
            yield finding

    def report(self) -> dict[str, Json]:
        """Return everything as JSON, made to be attached to an issue."""
        states = [finding.state for finding in self.findings]
        return {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(self.device),
            "passed": self.passed,
            "broken": states.count(FindingState.BROKEN),
            "skipped": states.count(FindingState.SKIPPED),
            "seconds": round(sum(finding.seconds for finding in self.findings), 1),
            "checks": [finding.to_json() for finding in self.findings],
        }

    def write(self, path: Path) -> None:
        """Write the report."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(self.report(), indent=1, ensure_ascii=False).encode() + b"\n", durable=False)

    def keep(self) -> None:
        """Write the report to where a run looks for it."""
        self.write(result_file(describe_machine(self.device)))


def _run_part(part: str, device: str) -> Finding:
    """Run a part in a process; return its finding, or one that says how the process ended."""
    target, limit = PARTS[part]
    with tempfile.TemporaryDirectory(prefix="offbeat-doctor-") as folder:
        found, printed = Path(folder, "finding.json"), Path(folder, "printed")
        command = [sys.executable, "-m", "offbeat.preflight.gpu.session", part, target, device, str(found)]
        with printed.open("wb") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
            try:
                code = process.wait(limit)
                how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            except subprocess.TimeoutExpired:
                how = f"did not end within {limit:.0f} s"
            finally:
                _kill(process)
        finding = Finding(part, FindingState.BROKEN, f"its process {how}", ATTACH)
        if found.is_file():
            finding = Finding.from_json(json.loads(found.read_text(encoding="utf-8")))
        if finding.state is FindingState.BROKEN:
            log_text = printed.read_bytes()[-LOG_BYTES:].decode(errors="replace").strip()
            finding = replace(finding, log=finding.log or log_text)
        return finding


def _kill(process: "subprocess.Popen[bytes]") -> None:
    """Kill a process with its descendants; do nothing if it has ended."""
    for pid in [*descendants(process.pid), process.pid] if process.poll() is None else []:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def examine(part: str, check: Callable[[str], Finding], device: str) -> Finding:
    """Call a check; any error is a finding, whose log has the whole error."""
    try:
        return check(device)
    except Exception as error:  # the boundary to a check: every error is a finding
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        detail, fix = f"{type(error).__name__}: {first_line(error)}"[:300], ATTACH
        if isinstance(error, OffbeatError):
            detail, fix = text, f"do what the error says; else {ATTACH}"
        if "InvalidCxxCompiler" in text:
            detail = "torch finds no C++ compiler, which it needs to compile kernels"
            fix = "install one: apt-get install g++"
        return replace(Finding(part, FindingState.BROKEN, detail, fix), log=text)


if __name__ == "__main__":
    _part, _target, _device, _found = sys.argv[1:]
    _finding = examine(_part, cast("Callable[[str], Finding]", resolve(_target)), _device)
    Path(_found).write_text(json.dumps(_finding.to_json()), encoding="utf-8")
