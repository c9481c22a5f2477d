"""Train the cells of the evidence, block by block, as `lab/learning/protocol.md` says.

    python -m lab.learning.evidence.sweep --minutes 60            until the time is up; the same command continues
    python -m lab.learning.evidence.sweep --block d-sums          one block
    python -m lab.learning.evidence.sweep --block d-sums --cell "replay" 0.0005 1    train one cell again and compare
    python -m lab.learning.evidence.sweep --short                 two cells of 10 steps, nothing kept

A finished cell is one line of `lab/learning/evidence/<block>.jsonl`. Every cell trains on one thread. Learning in
lockstep does not depend on the load of the machine, so this may run beside other work that is not timed.
"""

import sys
import time

import torch

from lab.figures import command_parser
from lab.learning.evidence.blocks import BLOCKS, Block
from lab.learning.evidence.cells import area, final, keep, rows, run


def sweep(blocks: list[Block], minutes: float) -> bool:
    """Train missing cells until the time is up. Return True if none is missing."""
    until = time.monotonic() + 60 * minutes
    for block in blocks:
        done = rows(block.name)
        for arm, rate, seed in block.wanted(done):
            if time.monotonic() > until:
                print(f"the time is up; block {block.name} has {len(done)} cells; the same command continues")
                return False
            row = run(arm.name, arm.settings, rate, seed)
            keep(block.name, row)
            done[arm.name, rate, seed] = row
            result = f"final {final(row):.3f}, area {area(row):.3f}, {row['groups'][-1]} groups, {row['seconds']:.0f} s"
            print(f"{block.name} {arm.name}, rate {rate:g}, seed {seed}: {result}", flush=True)
        print(f"block {block.name} is finished: {len(done)} cells")
    return True


def repeat(block: Block, name: str, rate: float, seed: int) -> bool:
    """Train a cell again. Return True if its curve is that of the kept one."""
    [arm] = [one for one in block.arms if one.name == name]
    row, kept = run(name, arm.settings, rate, seed), rows(block.name).get((name, rate, seed))
    print(f"now   {row['curve']}\nkept  {kept['curve'] if kept else 'none'}")
    return kept is not None and row["curve"] == kept["curve"]


def main() -> None:
    parser = command_parser(__doc__, short="two cells of 10 steps; keep nothing")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no new cell after this many minutes")
    parser.add_argument("--block", choices=list(BLOCKS), help="one block; left out, all of them")
    parser.add_argument("--cell", nargs=3, metavar=("ARM", "RATE", "SEED"), help="train one cell of the block again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    blocks = [BLOCKS[options.block]] if options.block else list(BLOCKS.values())
    if options.short:
        for arm in blocks[0].arms[:1] + blocks[0].arms[-1:]:
            row = run(arm.name, arm.settings, 5e-4, seed=101, steps=10)
            print(f"{arm.name}: {row['curve']}, groups {row['groups']}")
    elif options.cell:
        name, rate, seed = options.cell
        sys.exit(not repeat(blocks[0], name, float(rate), int(seed)))
    else:
        sweep(blocks, options.minutes)


if __name__ == "__main__":
    main()
