"""Kill the process that owns a vLLM engine, at any moment, and count what is left of the engine after 20 s.

    python -m lab.torture.engine_owner              20 kills each; half an hour; writes rows gpu.5.*
    python -m lab.torture.engine_owner --short      2 kills each; records nothing

`mp` has an engine core and one or two workers, `uni` one process that is both, as on a single GPU. Every owner starts
the real vLLM. A third of them are killed during the start, a third while they generate, the others while idle.
"""

import random
import sys
import tempfile
from pathlib import Path
from typing import Final

from lab.figures import Figure, command_parser, report
from tests.fixtures.engine_owner import LIMIT, SHAPES, Kill, kill_owner
from tests.fixtures.tiny_model import save_llama

KILLS: Final = 20
MOMENTS: Final = ("start", "generate", "idle")


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
