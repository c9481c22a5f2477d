"""Measure the desk that workers get prompts from.

    python -m lab.bench.desk     the driver's time for one finished group, with up to 16,000 requests that wait: rows
                                 throughput.6.desk.*; a minute

Workers of 64 lanes each wait for a prompt; admission has room for one more group whenever one is finished and read.
`--short` measures few groups and records nothing.
"""

import asyncio
import sys
import time
from typing import Final

import numpy as np

from lab.figures import Figure, command_parser, machine, report
from offbeat.rollout.prompt_leases import PromptLeases
from offbeat.run.admission import ConcurrentAdmission
from offbeat.run.desk import Desk
from offbeat.types import Prompt

LANES: Final = 64
"""Requests of one worker."""


async def per_group(waiting: int, groups: int) -> list[float]:
    """Return milliseconds of processor time for each finished group while `waiting` requests wait."""
    leases = PromptLeases(
        lambda at: Prompt(f"p{at}", np.array([1], np.int32), "arithmetic"), name="run", seed=0, seconds=3600
    )
    desk = Desk(leases, ConcurrentAdmission(max_lag=0, fresh=waiting), time.monotonic)
    await desk.update(k=1, published=1, waiting=0, missing=0, finished=0)

    async def lane(worker: str) -> None:
        while True:
            await desk.take(1, worker)

    tasks = [asyncio.create_task(lane(f"worker {at // LANES}")) for at in range(waiting)]
    for worker in range(-(-waiting // LANES)):
        await desk.serving(f"worker {worker}", 1 - worker % 2)  # every other worker still serves an old version
    while desk.progress.in_flight < waiting:
        await asyncio.sleep(0)
    found = []
    for at in range(groups):
        start = time.process_time()
        await desk.finish([f"run-{at}"])
        await desk.update(k=1, published=1, waiting=0, missing=0, finished=desk.finished)
        for _ in range(3):  # the lane that got a prompt runs
            await asyncio.sleep(0)
        found.append((time.process_time() - start) * 1e3)
    assert desk.admitted == waiting + groups
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return found


def main() -> bool:
    short = command_parser(__doc__, short="few groups").parse_args().short
    groups, sizes = (50, (64, 256)) if short else (2_000, (64, 512, 2_048, 16_384))
    rows = []
    for waiting in sizes:
        took = np.array(asyncio.run(per_group(waiting, groups)))
        goal = "≤ 0.2 ms" if waiting == sizes[-1] else "stated, no goal"
        low, median, high = np.percentile(took, [5, 50, 95])
        rows.append(Figure(
            f"throughput.6.desk.{waiting}", f"driver time per finished group, {waiting:,} requests waiting", goal,
            round(float(took.mean()), 3), "ms", bool(took.mean() <= 0.2) or waiting != sizes[-1], groups,
            f"mean processor time; median {median:.3f}, 5 to 95 % {low:.3f} to {high:.3f}; {machine()}",
        ))  # fmt: skip
    return report(short, *rows)


if __name__ == "__main__":
    sys.exit(not main())
