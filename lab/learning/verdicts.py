"""Give the verdicts of the finished blocks of the evidence, by the rules of `lab/learning/protocol.md`.

    python -m lab.learning.verdicts                   seconds; rows evidence.*
    python -m lab.learning.verdicts --block d-sums    one block

A block without all of its cells has no verdict; the command says how many are missing and how long they take.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from lab.figures import Figure, command_parser, record
from lab.learning.evidence.block_claims import CLAIMS, WAYS
from lab.learning.evidence.blocks import BLOCKS, CONDITION_BLOCKS, REUSE_BLOCKS, Block
from lab.learning.evidence.claims import Cells, Verdict, beside_before, judge
from lab.learning.evidence.regret import regret_figures
from lab.learning.evidence.reuse import reuse_figures
from lab.learning.evidence.rows import area


def finished(block: Block) -> Cells | None:
    """Return the cells of a block; None while some are missing."""
    cells = Cells(block, block.done())
    if missing := block.count_missing(cells.done):
        seconds = fmean(row["seconds"] for row in cells.done.values()) if cells.done else 20.0
        hours = missing * seconds / 3600
        print(f"block {block.name}: {missing} cells or more are missing, about {hours:.1f} h on one core")
        return None
    return cells


def verdicts_of(cells: Cells) -> list[Verdict]:
    """Return the verdicts of a block. One that is tuned by something else than area also has those by area, if kept."""
    block = cells.block
    now = _judged(cells)
    by_area = replace(block, tuned_by=area)
    if block.tuned_by is area or by_area.count_missing(cells.done):
        return now
    return beside_before(now, _judged(Cells(by_area, cells.done)))


def _judged(cells: Cells) -> list[Verdict]:
    """Return the verdicts on what was asked first, and as a family of their own those on the way to the end."""
    families = [claims[cells.block.name](cells) for claims in (CLAIMS, WAYS) if cells.block.name in claims]
    return [verdict for family in families for verdict in judge(list(family))]


def figures(blocks: Sequence[Block]) -> list[Figure]:
    """Return the rows of the finished blocks."""
    cells = {block.name: found for block in blocks if (found := finished(block)) is not None}
    verdicts = [verdict for name in cells if name in CLAIMS for verdict in verdicts_of(cells[name])]
    conditions = [cells[name] for name in CONDITION_BLOCKS if name in cells]
    stated = regret_figures(conditions) if len(conditions) == len(CONDITION_BLOCKS) else []
    stated += [figure for name in REUSE_BLOCKS if name in cells for figure in reuse_figures(cells[name])]
    return [*(verdict.figure() for verdict in verdicts), *stated]


def main() -> bool:
    parser = command_parser(__doc__)
    parser.add_argument("--block", choices=list(BLOCKS), help="one block; left out, all of them")
    chosen = parser.parse_args().block
    blocks = [BLOCKS[chosen]] if chosen else list(BLOCKS.values())
    return record(*figures(blocks))


if __name__ == "__main__":
    main()
    sys.exit()  # what fails its claim is a result, not an error
