"""Train the cells of the evidence, block by block, as `lab/learning/protocol.md` says.

    python -m lab.learning.evidence.sweep --minutes 60            until the time is up; the same command continues
    python -m lab.learning.evidence.sweep --block d-sums          one block
    python -m lab.learning.evidence.sweep --jobs 2                two cells at a time
    python -m lab.learning.evidence.sweep --short                 two cells of 10 steps, nothing kept

A finished cell is one line of `lab/learning/evidence/<block>.jsonl`. Every cell trains on one thread. Learning in
lockstep does not depend on the load of the machine, so this may run beside other work that is not timed.
"""

import multiprocessing
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, as_completed, wait

import torch

from lab.figures import command_parser
from lab.learning.evidence.arms import EvidenceArm
from lab.learning.evidence.blocks import BLOCKS, Block
from lab.learning.evidence.cells import run
from lab.learning.evidence.rows import Done, EvidenceRow, Key, area, final, keep


def sweep(blocks: Iterable[Block], minutes: float, jobs: int) -> bool:
    """Train missing cells until the time is up, and keep each as it ends. Return True if none is missing."""
    until = time.monotonic() + 60 * minutes
    with training_pool(jobs) as pool:
        for block in blocks:
            done = block.done()
            while cells := block.ready(done):
                for row in train(block, cells, done, pool, jobs, until):
                    keep(block.name, row)
                    done[row["arm"], row["rate"], row["seed"]] = row
                    result = f"final {final(row):.3f}, area {area(row):.3f}, {row['groups'][-1]} groups"
                    print(f"{block.name} {name_of(row)}: {result}, {row['seconds']:.0f} s", flush=True)
                if time.monotonic() > until:
                    missing = block.count_missing(done)
                    print(f"the time is up; block {block.name} lacks {missing} cells; the same command continues")
                    return False
            print(f"block {block.name} is finished: {len(done)} cells")
    return True


def training_pool(jobs: int) -> ProcessPoolExecutor:
    """Return processes that train on one thread each."""
    spawn = multiprocessing.get_context("spawn")
    return ProcessPoolExecutor(jobs, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,))


def train(block: Block, cells: Iterable[Key], done: Done, pool: ProcessPoolExecutor, jobs: int,
          until: float) -> Iterator[EvidenceRow]:  # fmt: skip
    """Train these cells, `jobs` at a time, and yield each as it ends. Start no new one after `until`."""
    running: set[Future[EvidenceRow]] = set()
    for name, rate, seed in cells:
        if len(running) == jobs:
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (one.result() for one in finished)
        if time.monotonic() > until:
            break
        arm = block.arm(name)
        running.add(
            pool.submit(run, arm.task or block.task, arm, rate, seed, followed=_followed(arm, rate, seed, done))
        )
    yield from (one.result() for one in as_completed(running))


def name_of(row: EvidenceRow) -> str:
    """Return how a cell is named in what is printed."""
    return f"{row['arm']}, rate {row['rate']:g}, seed {row['seed']}"


def _followed(arm: EvidenceArm, rate: float, seed: int, done: Done) -> EvidenceRow | None:
    """Return the run whose number of publishes a cell has."""
    return done[arm.follow.arm, rate, seed] if arm.follow else None


def main() -> None:
    parser = command_parser(__doc__, short="two cells of 10 steps; keep nothing")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no new cell after this many minutes")
    parser.add_argument("--jobs", type=int, default=1, help="how many cells train at the same time")
    parser.add_argument("--block", choices=list(BLOCKS), help="one block; left out, all of them")
    options = parser.parse_args()
    torch.set_num_threads(1)
    blocks = [BLOCKS[options.block]] if options.block else list(BLOCKS.values())
    if options.short:
        for arm in blocks[0].arms[:1] + blocks[0].arms[-1:]:
            row = run(arm.task or blocks[0].task, arm, arm.rate or 5e-4, 101, steps=10)
            print(f"{arm.name}: {row['curve']}, groups {row['groups']}")
    else:
        sweep(blocks, options.minutes, options.jobs)


if __name__ == "__main__":
    main()
