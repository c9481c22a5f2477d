"""Freed memory stays with the process for the next step, until it is returned."""

import subprocess
import sys

PROGRAM = """
import torch
from lab.fixtures.memory import resident_bytes
from offbeat.trainer.allocator import keep_freed_memory, return_freed_memory

assert keep_freed_memory()
copies = [torch.ones(1 << 20) for _ in range(100)]  # 4 MB each
between = [torch.ones(1 << 10) for _ in range(100)]
full = resident_bytes()
copies = copies[:1]
kept = resident_bytes()
return_freed_memory()
print(full, kept, resident_bytes())
"""


def test_freed_memory_is_kept_until_it_is_returned() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    full, kept, returned = map(int, done.stdout.split())
    assert full - kept < 50e6, "kept for the next step"
    assert full - returned > 350e6, "and returned when asked"
