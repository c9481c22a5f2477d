"""The descendants of a process; and, run as a script, an engine that waits to be orphaned."""

import asyncio
import sys
import time
from pathlib import Path

from lab.bench.engine_runs import engine_for


async def wait_with_engine(directory: Path) -> None:
    async with engine_for(directory) as engine:
        await engine.logprobs([[5, 6, 7]])
        print("ready", flush=True)
        await asyncio.sleep(600)


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


if __name__ == "__main__":
    asyncio.run(wait_with_engine(Path(sys.argv[1])))
