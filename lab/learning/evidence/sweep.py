"""Train the cells of the evidence, block by block, as `lab/learning/protocol.md` says.

    python -m lab.learning.evidence.sweep --minutes 60            until the time is up; the same command continues
    python -m lab.learning.evidence.sweep --block d-sums          one block
    python -m lab.learning.evidence.sweep --jobs 2                two cells at a time
    python -m lab.learning.evidence.sweep --block d-sums --cell "replay" 0.0005 1    train one cell again and compare
    python -m lab.learning.evidence.sweep --short                 two cells of 10 steps, nothing kept

A finished cell is one line of `lab/learning/evidence/<block>.jsonl`. Every cell trains on one thread. Learning in
lockstep does not depend on the load of the machine, so this may run beside other work that is not timed.
"""

import multiprocessing
import sys
import time
from collections.abc import Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

import torch

from lab.figures import command_parser
from lab.learning.evidence.arms import EvidenceArm
from lab.learning.evidence.blocks import BLOCKS, Block
from lab.learning.evidence.cells import run
from lab.learning.evidence.rows import Done, EvidenceRow, Key, area, final, keep, rows


def sweep(blocks: Iterable[Block], minutes: float, jobs: int) -> bool:
    """Train missing cells until the time is up. Return True if none is missing."""
    until = time.monotonic() + 60 * minutes
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        for block in blocks:
            done = rows(block.name)
            while cells := block.ready(done):
                _train(block, cells, done, pool, jobs, until)
                if time.monotonic() > until:
                    missing = block.count_missing(done)
                    print(f"the time is up; block {block.name} lacks {missing} cells; the same command continues")
                    return False
            print(f"block {block.name} is finished: {len(done)} cells")
    return True


def _train(block: Block, cells: list[Key], done: dict[Key, EvidenceRow], pool: ProcessPoolExecutor, jobs: int,
           until: float) -> None:  # fmt: skip
    """Train these cells, `jobs` at a time, and keep each as it ends. Start no new one after `until`."""
    running: set[Future[EvidenceRow]] = set()
    for name, rate, seed in cells:
        if len(running) == jobs:
            running = _keep(block, done, running)
        if time.monotonic() > until:
            break
        arm = block.arm(name)
        running.add(pool.submit(run, block.task, arm, rate, seed, followed=_followed(arm, rate, seed, done)))
    while running:
        running = _keep(block, done, running)


def _keep(block: Block, done: dict[Key, EvidenceRow], running: set[Future[EvidenceRow]]) -> set[Future[EvidenceRow]]:
    """Wait for a cell, keep it, and return the others."""
    finished, others = wait(running, return_when=FIRST_COMPLETED)
    for row in (one.result() for one in finished):
        keep(block.name, row)
        done[row["arm"], row["rate"], row["seed"]] = row
        result = f"final {final(row):.3f}, area {area(row):.3f}, {row['groups'][-1]} groups, {row['seconds']:.0f} s"
        print(f"{block.name} {row['arm']}, rate {row['rate']:g}, seed {row['seed']}: {result}", flush=True)
    return others


def _followed(arm: EvidenceArm, rate: float, seed: int, done: Done) -> EvidenceRow | None:
    """Return the run whose number of publishes a cell has."""
    return done[arm.follow.arm, rate, seed] if arm.follow else None


def repeat(block: Block, name: str, rate: float, seed: int) -> bool:
    """Train a cell again. Return True if its curve is that of the kept one."""
    arm, done = block.arm(name), rows(block.name)
    row, kept = (
        run(block.task, arm, rate, seed, followed=_followed(arm, rate, seed, done)),
        done.get((name, rate, seed)),
    )
    print(f"now   {row['curve']}\nkept  {kept['curve'] if kept else 'none'}")
    return kept is not None and row["curve"] == kept["curve"]


def main() -> None:
    parser = command_parser(__doc__, short="two cells of 10 steps; keep nothing")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no new cell after this many minutes")
    parser.add_argument("--jobs", type=int, default=1, help="how many cells train at the same time")
    parser.add_argument("--block", choices=list(BLOCKS), help="one block; left out, all of them")
    parser.add_argument("--cell", nargs=3, metavar=("ARM", "RATE", "SEED"), help="train one cell of the block again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    blocks = [BLOCKS[options.block]] if options.block else list(BLOCKS.values())
    if options.short:
        for arm in blocks[0].arms[:1] + blocks[0].arms[-1:]:
            row = run(blocks[0].task, arm, 5e-4, 101, steps=10)
            print(f"{arm.name}: {row['curve']}, groups {row['groups']}")
    elif options.cell:
        name, rate, seed = options.cell
        sys.exit(not repeat(blocks[0], name, float(rate), int(seed)))
    else:
        sweep(blocks, options.minutes, options.jobs)


if __name__ == "__main__":
    main()
