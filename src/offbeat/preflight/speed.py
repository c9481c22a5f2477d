"""This CPU's speed: the best that was ever measured on this machine, and the part of it that is free now."""

import json
import os
import platform
import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from offbeat.placement.hardware import CPUINFO
from offbeat.preflight.cache import cache_directory

SIZE: Final = 768
PRODUCTS: Final = 12
CALLS: Final = 500


SECONDS: Final = 0.5
"""How long the speed of this moment is measured."""


@dataclass(frozen=True)
class Speed:
    """What a processor computes if nothing else runs on it."""

    products: float
    """Floating-point operations a second in products of matrices."""
    call: float = 0.0
    """Seconds of a call of NumPy with a tiny array: the unit of what does not depend on the size of a model."""
    free: float = 1.0
    """Share of the processor that this process gets now."""


def speed_now(seconds: float = SECONDS) -> Speed:
    """Return the machine's speed, and how much of it is free in the next seconds."""
    tiny, fastest, calls = np.ones(8, np.float32), float("inf"), 0
    begun = last = time.perf_counter()
    while last - begun < seconds:
        for _ in range(CALLS):
            np.add(tiny, tiny)
        now = time.perf_counter()
        fastest, last, calls = min(fastest, (now - last) / CALLS), now, calls + CALLS
    return Speed(machine_speed(), fastest, fastest * calls / (last - begun))


def machine_speed() -> float:
    """Return float32 operations a second: the most that was measured, now or before. A busy machine only takes away."""
    path, machine, speed = cache_directory() / "cpu-speed.json", _processor(), measure_speed()
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["machine"] == machine and kept["flops"] >= speed:
            return float(kept["flops"])
    except (OSError, ValueError, KeyError, TypeError):  # never measured, or the file is damaged
        pass
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine, "flops": speed}), encoding="utf-8")
    except OSError:  # a home that cannot be written: measure again next time
        pass
    return speed


def measure_speed() -> float:
    """Measure the speed of matrix products. The fastest of them counts: others may have shared the CPU."""
    matrix, seconds = np.ones((SIZE, SIZE), np.float32), []
    for _ in range(PRODUCTS):
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return 2 * SIZE**3 / min(seconds)


def _processor() -> str:
    """Return what the speed depends on: the processor's name and how many cores this process may use."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS") or os.environ.get("OPENBLAS_NUM_THREADS") or "all"
    return f"{name}, {cores} cores, {threads} threads"
