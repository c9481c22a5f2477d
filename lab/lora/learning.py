"""Does an adapter learn what full training learns? The exact sums of `lab/learning`, five seeds, tuned learning rates.

    python -m lab.lora.learning                         full training and ranks 1, 8, 32: rows lora.4.sums-*; an hour
    python -m lab.lora.learning --minutes 20 --jobs 2   two runs at a time, no new one after 20 minutes
    python -m lab.lora.learning --short                 two runs of 10 steps, nothing kept

A finished run is one line of `lab/learning/evidence/lora-sums.jsonl`, and the same command continues. Each arm has its
own learning rate, tuned on four other seeds as in `lab/learning/protocol.md`; adapters begin at ten times the rates of
full training.
"""

import sys
from typing import Final

from lab.figures import Figure, command_parser, record
from lab.learning.evidence.arms import RATES, EvidenceArm
from lab.learning.evidence.blocks import Block
from lab.learning.evidence.cells import run
from lab.learning.evidence.claims import Cells
from lab.learning.evidence.rows import final, rows
from lab.learning.evidence.sweep import sweep
from lab.learning.statistics import Interval, difference

RANKS: Final = (1, 8, 32)
MUST_MATCH: Final = 8
"""The rank whose mean has to reach the interval of full training."""
FULL: Final = "full"
BLOCK: Final = Block(
    "lora-sums",
    (
        EvidenceArm(FULL),
        *(
            EvidenceArm(f"rank {rank}", {"adapter": {"rank": rank}}, rates=tuple(10 * rate for rate in RATES))
            for rank in RANKS
        ),
    ),
    seeds=5,
)


def figures(cells: Cells) -> list[Figure]:
    """Return one row for each arm."""
    full = Interval.of([final(row) for row in cells.of(FULL)])
    found = []
    for arm in cells.block.arms:
        values = [final(row) for row in cells.of(arm.name)]
        own, asked = Interval.of(values), arm.name == f"rank {MUST_MATCH}"
        apart = "" if arm.name == FULL else f"; minus full training {difference(values, [*map(final, cells.of(FULL))])}"
        found.append(
            Figure(
                f"lora.4.sums-{arm.name.replace(' ', '-')}",
                f"final pass rate on the exact sums, {arm.name if arm.name != FULL else 'full training'}",
                f"mean at least {full.low:.3f}, the lower limit of full training" if asked else "stated, no goal",
                f"{own}",
                "pass rate",
                own.mean >= full.low or not asked,
                len(values),
                f"learning rate {cells.block.best_rate(arm.name, cells.done):g}, tuned on other seeds{apart}",
            )
        )
    return found


def main() -> bool:
    parser = command_parser(__doc__, short="two runs of 10 steps; keep nothing")
    parser.add_argument("--minutes", type=float, default=120.0, help="start no new run after this many minutes")
    parser.add_argument("--jobs", type=int, default=1, help="how many runs train at the same time")
    options = parser.parse_args()
    if options.short:
        curves = [run(BLOCK.task, arm, arm.rates[-1], 101, steps=10)["curve"] for arm in BLOCK.arms[::2]]
        print(curves)
        return all(curve[-1] > curve[0] for curve in curves)
    if not sweep([BLOCK], options.minutes, options.jobs):
        return False
    return record(*figures(Cells(BLOCK, rows(BLOCK.name))))


if __name__ == "__main__":
    sys.exit(not main())
