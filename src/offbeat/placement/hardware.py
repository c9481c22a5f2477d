"""The GPUs that a run may use, given as text such as "4x8x80" or found here, and this CPU. No torch at import."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from offbeat.errors import ConfigError

GIB: Final = 2**30
DRIVER: Final = Path("/proc/driver/nvidia/version")
"""Exists where the driver of NVIDIA is loaded, and names its version."""
CPUINFO: Final = Path("/proc/cpuinfo")


@dataclass(frozen=True, order=True)
class Hardware:
    """Equal nodes with equal GPUs.

    >>> Hardware.parse("4x8x80")
    Hardware(nodes=4, gpus=8, memory_gib=80.0)
    >>> str(Hardware.parse("1x24")), Hardware.parse("8x80").total
    ('1x24', 8)
    """

    nodes: int
    gpus: int
    """GPUs of each node."""
    memory_gib: float
    """Memory of each GPU."""

    @classmethod
    def parse(cls, text: str) -> "Hardware":
        """Parse GPUS x GIB, or NODES x GPUS x GIB. Raises `ConfigError`."""
        numbers = re.fullmatch(r"(?:([1-9]\d*)x)?([1-9]\d*)x([1-9]\d*(?:\.\d+)?)", text.strip().lower())
        if numbers is None:
            raise ConfigError(
                [f"--gpus {text!r} is not GPUSxGIB or NODESxGPUSxGIB; write 1x24, 8x80 or 4x8x80, for example"]
            )
        return cls(int(numbers[1] or 1), int(numbers[2]), float(numbers[3]))

    @classmethod
    def detect(cls) -> "Hardware | None":
        """Return the GPUs of this machine, counted as the smallest of them; None without a GPU."""
        import torch

        if not torch.cuda.is_available():
            return None
        memory = [torch.cuda.get_device_properties(i).total_memory for i in range(torch.cuda.device_count())]
        return cls(1, len(memory), min(memory) / GIB)

    @property
    def total(self) -> int:
        """GPUs of all nodes."""
        return self.nodes * self.gpus

    def __str__(self) -> str:
        each = f"{self.gpus}x{self.memory_gib:g}"
        return each if self.nodes == 1 else f"{self.nodes}x{each}"


def cpu_products(dtype: str) -> str:
    """Return the dtype in which a CPU multiplies weights of `dtype`.

    Without instructions for bfloat16 it is several times as fast in float32, with the same weights.
    """
    return "float32" if dtype == "bfloat16" and not multiplies_bfloat16() else dtype


def multiplies_bfloat16() -> bool:
    """Return whether the processor has instructions for bfloat16 products. Others emulate them, at a third of float32.

    True where that cannot be found out.
    """
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
        flags = next(line.partition(":")[2].split() for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return True
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags)


def cache_directory() -> Path:
    """Return where results are kept that hold for a whole machine: `$XDG_CACHE_HOME/offbeat`, or `~/.cache/offbeat`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "offbeat"
