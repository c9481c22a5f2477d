"""Check copies: how fast weights move between GPU, host, shared memory and disk, and what a publish would cost."""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Final

import numpy as np
import torch

from offbeat.preflight.gpu.finding import GpuFinding, broken, passed
from offbeat.types import Json

SIZE: Final = 128 << 20
"""Bytes of each copy."""
LEAST_SHARED: Final = 32 << 20
"""Bytes; NCCL and vLLM need a few times this in /dev/shm."""
FLOORS: Final = {
    "host to device": 1.0,
    "device to host": 1.0,
    "shared memory": 0.3,
    "disk write": 0.1,
    "disk read": 0.1,
}
"""GB/s below which something is wrong, not only slow."""
FIXES: Final = {
    "host to device": "look at the PCIe link: nvidia-smi --query-gpu=pcie.link.gen.current,pcie.link.width.current "
    "--format=csv",
    "device to host": "look at the PCIe link, and at what else uses the GPU: nvidia-smi",
    "shared memory": "look for a process that swaps: free -h",
    "disk write": "train in a directory on a local disk: offbeat train run.toml --out DIR",
    "disk read": "train in a directory on a local disk: offbeat train run.toml --out DIR",
}
PUBLISHED: Final = 16.4
"""GB of an 8B model in bfloat16."""


def check_copies(device: str) -> Iterator[GpuFinding]:
    """Measure each copy and compare it with its floor."""
    shared = os.statvfs("/dev/shm")
    free = shared.f_bavail * shared.f_frsize
    numbers: dict[str, Json] = {"shared memory free GB": round(free / 1e9, 2)}
    if free < LEAST_SHARED:
        detail = f"/dev/shm has {free / 1e6:.0f} MB free, and NCCL and vLLM exchange data there"
        yield broken("copies", detail, "give the container more: docker run --shm-size=8g", **numbers)
        return
    speeds = copy_speeds(device, min(SIZE, free // 2))
    numbers |= {name: round(speed, 3) for name, speed in speeds.items()}
    shown = ", ".join(f"{name} {speed:.3g}" for name, speed in speeds.items())
    slow = [name for name, speed in speeds.items() if speed < FLOORS[name]]
    if slow:
        low = ", ".join(f"{name} at {speeds[name]:.2g} GB/s (expected {FLOORS[name]:g} or more)" for name in slow)
        yield broken("copies", f"{low}; all in GB/s: {shown}", FIXES[slow[0]], **numbers)
        return
    seconds = publish_seconds(speeds)
    numbers["publish of 8B in s"] = round(seconds, 1)
    stand_in = "; on CPU, host memory stands in for the device" if device == "cpu" else ""
    detail = f"in GB/s: {shown}; a publish of all weights of an 8B model takes about {seconds:.0f} s{stand_in}"
    yield passed("copies", detail, **numbers)


def publish_seconds(speeds: dict[str, float]) -> float:
    """Return how long 8B weights take from the trainer's GPU over the disk to an engine's GPU.

    >>> round(publish_seconds({"device to host": 20, "disk write": 1, "disk read": 2, "host to device": 20}))
    26
    """
    way = ("device to host", "disk write", "disk read", "host to device")
    return sum(PUBLISHED / speeds[name] for name in way)


def copy_speeds(device: str, shared_bytes: int) -> dict[str, float]:
    """Return GB/s of each copy; where a copy is repeated, of the fastest."""
    host = torch.ones(SIZE // 4, pin_memory=device == "cuda")
    other = torch.zeros(SIZE // 4, device=device)
    found = {
        "host to device": _speed(lambda: copy(other, host), SIZE),
        "device to host": _speed(lambda: copy(host, other), SIZE),
    }
    content = np.ones(SIZE, np.uint8)
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        found["shared memory"] = _speed(lambda: write(file, content[:shared_bytes], durable=False), shared_bytes)
    with disk_file() as file:
        found["disk write"] = _speed(lambda: write(file, content, durable=True), SIZE, times=1)
        found["disk read"] = _speed(lambda: read(file), SIZE, times=1)
    return found


def copy(to: torch.Tensor, source: torch.Tensor) -> None:
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


def disk_file() -> IO[bytes]:
    """Open a file without a name where runs are written: the current directory, if it is writable."""
    here = Path.cwd() if os.access(Path.cwd(), os.W_OK) else Path(tempfile.gettempdir())
    return tempfile.TemporaryFile(dir=here)


def _speed(work: Callable[[], None], size: int, times: int = 3) -> float:
    seconds = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return size / 1e9 / min(seconds)
