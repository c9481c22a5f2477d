"""Replay beside the other uses of eight fresh groups a step, stated beside the verdicts of block d."""

import math
from typing import Final

from lab.figures import Figure
from lab.learning.evidence.block_claims import GOAL, groups_to_goal
from lab.learning.evidence.claims import Cells
from lab.learning.statistics import Interval

REPLAY: Final = "replay"
OTHERS: Final = {"fresh 8, i = 2": "i2", "fresh 8": "fresh-8"}
"""What replay is compared with, and the end of the row's id."""


def reuse_figures(cells: Cells) -> list[Figure]:
    """Return two rows for each other use: groups until 0.80, and the difference at the end."""
    task, found = cells.block.task, []
    for other, short in OTHERS.items():
        ratio = Interval.of(cells.apart(REPLAY, other, lambda row: math.log(groups_to_goal(row))).values)
        apart = Interval.of(cells.apart(REPLAY, other).values)
        for end, what, numbers in (
            ("samples", f"Generated groups until {GOAL}, replay over {other}", [*map(math.exp, _numbers(ratio))]),
            ("final", f"Final pass rate of replay minus that of {other}", _numbers(apart)),
        ):
            mean, low, high = numbers
            found.append(
                Figure(
                    f"evidence.d.{task}.replay-{short}-{end}",
                    f"{what} ({task})",
                    "stated",
                    f"{mean:.3f} [{low:.3f}, {high:.3f}]",
                    "",
                    True,
                    cells.block.seeds,
                    f"paired by seed, interval of 95 % for this row alone; {cells.describe(REPLAY, other)}",
                )
            )
    return found


def _numbers(interval: Interval) -> list[float]:
    return [interval.mean, interval.low, interval.high]
