"""This CPU's speed, measured once per machine, so that two configurations are compared by the same number."""

import json
import os
import platform
import time
from typing import Final

import numpy as np

from offbeat.placement.hardware import CPUINFO
from offbeat.preflight.cache import cache_directory

SIZE: Final = 768
PRODUCTS: Final = 12


def machine_speed() -> float:
    """Return float32 operations a second: measured the first time, read from the cache afterwards."""
    path, machine = cache_directory() / "cpu-speed.json", _processor()
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["machine"] == machine and kept["flops"] > 0:
            return float(kept["flops"])
    except (OSError, ValueError, KeyError, TypeError):  # never measured, or the file is damaged
        pass
    speed = measure_speed()
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
