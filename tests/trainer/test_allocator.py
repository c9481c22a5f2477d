"""Freed memory stays with the process for the next step and for all its threads, until it is returned."""

import subprocess
import sys

PROGRAM = """
import torch
from tests.fixtures.memory import resident_bytes
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


THREADS = """
import ctypes, sys, threading
from tests.fixtures.memory import resident_bytes
from offbeat.trainer.allocator import share_freed_memory

libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
assert sys.argv[1] == "each its own" or share_freed_memory()
alive, before = threading.Barrier(9), resident_bytes()

def work(turn=threading.Lock()):
    with turn:  # one after the other: what one thread frees is enough for the next
        pieces = [libc.malloc(1000) for _ in range(20_000)]
        for piece in pieces:
            ctypes.memset(piece, 1, 1000)
        last = libc.malloc(1000)  # lies above the others, so that they cannot be returned to the system
        for piece in pieces:
            libc.free(piece)
    alive.wait(60)

threads = [threading.Thread(target=work) for _ in range(8)]
for thread in threads:
    thread.start()
alive.wait(60)
print(resident_bytes() - before)
"""


def grown(mode: str) -> int:
    done = subprocess.run([sys.executable, "-c", THREADS, mode], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_threads_use_what_others_freed() -> None:
    assert grown("shared") < 40e6 < 120e6 < grown("each its own"), "8 threads with 20 MB each, one after the other"
