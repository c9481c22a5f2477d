"""Draw the two figures of the evidence from its cells.

python -m lab.learning.evidence.figures    seconds; docs/objectives-by-lag.svg from block a-sums and
                                           docs/replay.svg from block d-sums, each if its block is finished
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Final

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt  # after the choice of the backend

from lab.figures import command_parser
from lab.learning.evidence.blocks import BLOCKS, LAGS
from lab.learning.evidence.claims import Cells
from lab.learning.evidence.rows import final
from lab.learning.plots import COLORS, plain, save
from lab.learning.statistics import Interval
from lab.learning.verdicts import finished

SIZE: Final = (5.2, 3.6)
"""Inches. Text of 10 points is readable if the page shows it 400 pixels wide."""
NAMED: Final = 4
"""Objectives with a color of their own: those whose final pass rates at the longest lag lie farthest apart."""
REUSE_SHOWN: Final = {"fresh 16": "16 fresh groups a step", "replay": "8 fresh, 8 replayed", "fresh 8": "8 fresh"}


def by_lag(cells: Cells) -> None:
    """Plot the final pass rate against v with intervals, one line for each objective; the extreme ones have names."""
    _, axes = plt.subplots(figsize=SIZE)
    finals = {
        name: [Interval.of([final(row) for row in cells.of(f"{name} v{v}")]) for v in LAGS]
        for name in dict.fromkeys(arm.name.rpartition(" v")[0] for arm in cells.block.arms)
    }
    ranked = sorted(finals, key=lambda name: finals[name][-1].mean)
    colors = dict(zip([*ranked[-NAMED // 2 :][::-1], *ranked[: NAMED // 2]], COLORS, strict=False))
    for name in [*(other for other in ranked if other not in colors), *colors]:
        means, halves = ([getattr(one, part) for one in finals[name]] for part in ("mean", "half"))
        color = colors.get(name, "#b5b8bf")
        axes.errorbar(
            range(len(LAGS)), means, yerr=halves, color=color, fmt="o-", capsize=3, markersize=4, linewidth=1.4,
            label=name if name in colors else None,
        )  # fmt: skip
    axes.set_xticks(range(len(LAGS)), [str(v) for v in LAGS])
    axes.legend(frameon=False, fontsize=9)
    plain(axes, "weights published every v steps", "final pass rate")
    save("objectives-by-lag.svg")


def by_groups(cells: Cells) -> None:
    """Plot the mean pass rate against the generated groups, with and without replay."""
    _, axes = plt.subplots(figsize=SIZE)
    for (arm, label), color in zip(REUSE_SHOWN.items(), COLORS, strict=False):
        rows = cells.of(arm)
        groups = _means([row["groups"] for row in rows])
        points = [Interval.of(rates) for rates in zip(*(row["curve"] for row in rows), strict=True)]
        axes.plot(groups, [point.mean for point in points], color=color, linewidth=1.8, label=label)
        axes.fill_between(
            groups, [p.low for p in points], [p.high for p in points], color=color, alpha=0.2, linewidth=0
        )
    axes.legend(frameon=False, fontsize=9, loc="lower right")
    plain(axes, "generated groups", "pass rate")
    save("replay.svg")


def _means(lists: Sequence[Sequence[float]]) -> list[float]:
    return [fmean(values) for values in zip(*lists, strict=True)]


def main() -> None:
    command_parser(__doc__).parse_args()
    for block, draw in (("a-sums", by_lag), ("d-sums", by_groups)):
        if (cells := finished(BLOCKS[block])) is not None:
            draw(cells)


if __name__ == "__main__":
    main()
