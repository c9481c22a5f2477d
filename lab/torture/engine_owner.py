"""Kill the process that owns a vLLM engine, at any moment, and count what is left of the engine after 20 s.

    python -m lab.torture.engine_owner              20 kills each; half an hour; writes rows gpu.5.*
    python -m lab.torture.engine_owner --short      2 kills each; records nothing

`mp` has an engine core and one or two workers, `uni` one process that is both, as on a single GPU. Every owner starts
the real vLLM. A third of them are killed during the start, a third while they generate, the others while idle.
"""

import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from lab.figures import Figure, command_parser, report
from lab.fixtures.engine_owner import SHAPES
from tests.fixtures.tiny_model import save_llama

KILLS: Final = 20
LIMIT: Final = 20.0
LONGEST_START: Final = 180.0
MOMENTS: Final = ("start", "generate", "idle")


@dataclass(frozen=True)
class Kill:
    """One owner, killed."""

    shape: str
    moment: str
    processes: int
    """Processes of the engine when the owner died."""
    left: int
    seconds: float
    """Until nothing was left, at most `LIMIT`."""


def session(leader: int) -> list[int]:
    """Return the running processes of a session, without its leader. Unlike parents, a session survives its leader."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, sid = (entry / "stat").read_text().rsplit(")", 1)[1].split()[:4]
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
        if int(sid) == leader and int(entry.name) != leader and state not in "ZX":
            found.append(int(entry.name))
    return found


def kill_owner(directory: Path, shape: str, moment: str, delay: float) -> Kill:
    """Start an owner, kill it `delay` seconds after a moment, and wait until nothing is left of its engine."""
    with subprocess.Popen(
        [sys.executable, "-m", "lab.fixtures.engine_owner", str(directory), shape],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path or "." for path in sys.path)},
    ) as owner:
        assert owner.stdout is not None
        started = time.monotonic()
        for line in iter(owner.stdout.readline, ""):
            if line.strip() == moment or time.monotonic() - started > LONGEST_START:
                break
        while moment == "start" and len(session(owner.pid)) < 2 and owner.poll() is None:
            time.sleep(0.05)  # until the engine core is there, beside Python's resource tracker
        time.sleep(delay)
        processes = len(session(owner.pid))
        alive = owner.poll() is None
        owner.kill()
    if not alive:
        raise RuntimeError(f"the owner ended by itself, status {owner.returncode}")
    killed = time.monotonic()
    while (left := session(owner.pid)) and time.monotonic() - killed < LIMIT:
        time.sleep(0.1)
    seconds = time.monotonic() - killed
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    return Kill(shape, moment, processes, len(left), seconds)


def torture(shapes: tuple[str, ...], kills: int, seed: int) -> list[Kill]:
    """Kill owners of these shapes in turn."""
    chance, done = random.Random(seed), []
    with tempfile.TemporaryDirectory() as place:
        save_llama(Path(place), tied=True, heads=4)
        for number in range(kills):
            moment = MOMENTS[number % len(MOMENTS)]
            longest = 12.0 if moment == "start" else 0.5
            kill = kill_owner(Path(place), shapes[number % len(shapes)], moment, chance.uniform(0, longest))
            print(kill, flush=True)
            done.append(kill)
    return done


def figure(name: str, kills: list[Kill]) -> Figure:
    """Return the row of one executor."""
    clean = sum(kill.left == 0 for kill in kills)
    started = sum(kill.moment != "start" for kill in kills)
    slowest = max(kill.seconds for kill in kills)
    shapes = ", ".join(
        f"{sum(kill.shape == one for kill in kills)} {one}" for one in SHAPES if one in {k.shape for k in kills}
    )
    return Figure(
        f"gpu.5.{name}",
        f"killed owners that left a process of their engine for {LIMIT:g} s, executor {name}",
        "0",
        len(kills) - clean,
        f"of {len(kills)}",
        clean == len(kills),
        len(kills),
        f"all with the real vLLM on CPU ({shapes}), {started} killed after their start and {len(kills) - started} "
        f"during it; the slowest engine was gone after {slowest:.1f} s",
    )


def main() -> int:
    """Run the command; return its exit status."""
    asked = command_parser(__doc__, short="2 kills each; records nothing").parse_args()
    kills = 2 if asked.short else KILLS
    uni = report(asked.short, figure("uni", torture(("uni",), kills, seed=2)))
    mp = report(asked.short, figure("mp", torture(("mp", "mp2"), kills, seed=1)))
    return 0 if uni and mp else 1


if __name__ == "__main__":
    sys.exit(main())
