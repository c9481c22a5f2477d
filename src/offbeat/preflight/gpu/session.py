"""Run the checks one unit after another, each with a deadline, in a process of their own.

The process lives as long as everything is ok, because importing torch and vLLM takes time. After a broken check the
next unit gets a new process: after a CUDA error every later call would fail too.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, cast

from offbeat.errors import DeadlinePassed, OffbeatError
from offbeat.imports import resolve
from offbeat.preflight.doctor import FindingState
from offbeat.preflight.gpu.child import ChildFailed, DoctorChild
from offbeat.preflight.gpu.finding import ATTACH, GpuFinding, broken
from offbeat.preflight.gpu.machine import describe_machine, result_file
from offbeat.storage.files import write_atomically
from offbeat.types import Json

UNITS: Final = {
    "copies": ("offbeat.preflight.gpu.copies:check_copies", 180.0),
    "flex": ("offbeat.preflight.gpu.attention:check_flex", 420.0),
    "ranks": ("offbeat.preflight.gpu.ranks:check_ranks", 300.0),
    "engine": ("offbeat.preflight.gpu.engines:check_engine", 600.0),
    "split engine": ("offbeat.preflight.gpu.engines:check_split_engine", 600.0),
    "training": ("offbeat.preflight.gpu.training:check_training", 660.0),
}
"""The function of each unit, and its limit in seconds. `engine` makes three findings with one start of vLLM."""
Check = Callable[[str], Iterator[GpuFinding]]


class DoctorSession:
    """The checks of one device.

    session = DoctorSession("cuda")
    for finding in session.run(): print(finding)
    session.write(Path("gpu.json"))
    """

    def __init__(self, device: str, units: Sequence[str] = tuple(UNITS)) -> None:
        self.device = device
        self.findings: list[GpuFinding] = []
        self.machine: dict[str, Json] = {}
        self._left = list(units)

    @property
    def passed(self) -> bool:
        """True if every unit ran and nothing is broken."""
        return not self._left and not any(one.broken for one in self.findings)

    def run(self) -> Iterator[GpuFinding]:
        """Run all units; yield each finding as soon as it is known."""
        while self._left:
            with DoctorChild(
                "offbeat.preflight.gpu.session:run_units", device=self.device, units=[*self._left]
            ) as child:
                for finding in self._follow(child):
                    self.findings.append(finding)
                    yield finding

    def _follow(self, child: DoctorChild) -> Iterator[GpuFinding]:
        """Yield the findings of one process, until it ends or something is broken."""
        began, unhealthy = time.monotonic(), False
        while True:
            limit = UNITS[self._left[0]][1] if self._left else 60.0
            try:
                message = child.receive(max(1.0, began + limit - time.monotonic()))
            except (ChildFailed, DeadlinePassed) as error:
                unit = self._left.pop(0) if self._left else "doctor"
                how = f"it did not end within {limit:.0f} s" if isinstance(error, DeadlinePassed) else str(error)
                found = broken(unit, how, ATTACH)
                yield replace(found, log=child.log(), seconds=time.monotonic() - began)
                return
            if message is None:
                self._left.clear()
                return
            if "machine" in message:
                self.machine = message["machine"]
            elif "finding" in message:
                finding = GpuFinding.from_json(message["finding"])
                unhealthy |= finding.broken
                yield replace(finding, log=finding.log or child.log()) if finding.broken else finding
            elif "done" in message:
                self._left.remove(message["done"])
                began = time.monotonic()
                if unhealthy:
                    return

    def report(self) -> dict[str, Json]:
        """Return everything as JSON, made to be attached to an issue."""
        machine = self.machine or describe_machine(self.device)
        states = [finding.state for finding in self.findings]
        return {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine,
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

    def keep(self) -> Path:
        """Write the report to where the next run looks for it, and return the file."""
        path = result_file(self.machine or describe_machine(self.device))
        self.write(path)
        return path


def run_units(device: str, units: Sequence[str]) -> Iterator[dict[str, Json]]:
    """Be the process of the checks: yield the machine, then the findings of each unit."""
    yield {"machine": describe_machine(device)}
    for unit in units:
        for finding in timed(unit, cast(Check, resolve(UNITS[unit][0])), device):
            yield {"finding": finding.to_json()}
        yield {"done": unit}


def timed(unit: str, check: Check, device: str) -> Iterator[GpuFinding]:
    """Run a check; its findings get their seconds, and any error is a finding."""
    began = time.monotonic()
    try:
        for finding in check(device):
            yield replace(finding, seconds=time.monotonic() - began)
            began = time.monotonic()
    except Exception as error:  # the boundary to a check: every error is a finding
        yield replace(_explained(unit, error), seconds=time.monotonic() - began)


def _explained(unit: str, error: Exception) -> GpuFinding:
    """Return a finding whose detail is one line; the whole error is in its log."""
    text = f"{type(error).__name__}: {error}"
    detail = text if isinstance(error, OffbeatError) else text.splitlines()[0][:300]
    fix = f"do what the error says; else {ATTACH}" if isinstance(error, OffbeatError) else ATTACH
    if "InvalidCxxCompiler" in text:
        detail, fix = (
            "torch finds no C++ compiler, which it needs to compile kernels",
            "install one: apt-get install g++",
        )
    return replace(broken(unit, detail, fix), log=text)
