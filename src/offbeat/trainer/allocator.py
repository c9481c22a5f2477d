"""How the C library's allocator treats the memory of a run: of its many threads, and of a training step on a CPU."""

import ctypes
from typing import Final

_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
"""Parameters of glibc's `mallopt`."""
_NEVER: Final = 2**31 - 1


def share_freed_memory() -> bool:
    """Let all threads allocate from one arena, so that each finds what others freed. Return whether that works.

    As shipped, glibc gives up to eight arenas for each core to the threads of Lance and asyncio. Each keeps what its
    threads have freed, so a process that drives a run grows for days. Other C libraries have no such setting.

    >>> isinstance(share_freed_memory(), bool)
    True
    """
    return _set(_ARENA_MAX, 1)


def keep_freed_memory() -> bool:
    """Keep freed tensors with this process, so that the next step finds its pages mapped. Return whether that works.

    As shipped, glibc maps every large tensor anew and returns it to the system when it is freed. Each step then pays
    for its page faults again.

    >>> isinstance(keep_freed_memory(), bool)
    True
    """
    return all([share_freed_memory(), _set(_MMAP_MAX, 0), _set(_TRIM_THRESHOLD, _NEVER)])


def _set(parameter: int, value: int) -> bool:
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(parameter, value))


def return_freed_memory() -> None:
    """Return freed memory to the system, once: what a checkpoint's copy needed is not needed in the next step.

    Memory that is kept lies in pieces between what training allocates: every copy would make the process larger.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
