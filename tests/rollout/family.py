"""The descendants of a process, and whether they still run."""

import time
from pathlib import Path


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def descendants(pid: int) -> list[int]:
    """Return the child processes of `pid`, at any depth."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if parent(int(entry.name)) == pid:
                found += [int(entry.name), *descendants(int(entry.name))]
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    return found


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def eventually_gone(family: list[int], within: float = 40.0) -> bool:
    deadline = time.monotonic() + within
    while any(running(pid) for pid in family) and time.monotonic() < deadline:
        time.sleep(0.2)
    return not any(running(pid) for pid in family)
