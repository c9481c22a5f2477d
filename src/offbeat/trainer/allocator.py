"""How the C library's allocator treats the memory of a training step on a CPU."""

import ctypes
from typing import Final

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
"""Parameters of glibc's `mallopt`."""
_NEVER: Final = 2**31 - 1


def keep_freed_memory() -> bool:
    """Keep freed tensors with this process, so that the next step finds its pages mapped. Return whether that works.

    As shipped, glibc maps every large tensor anew and returns it to the system when it is freed. Each step then pays
    for its page faults again. Other C libraries have no such setting.

    >>> isinstance(keep_freed_memory(), bool)
    True
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # One arena: memory that one thread freed is there for all others.
    return all([mallopt(_ARENA_MAX, 1), mallopt(_MMAP_MAX, 0), mallopt(_TRIM_THRESHOLD, _NEVER)])


def return_freed_memory() -> None:
    """Return freed memory to the system, once: what a checkpoint's copy needed is not needed in the next step.

    Memory that is kept lies in pieces between what training allocates: every copy would make the process larger.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
