"""Draw the two figures of the evidence from its cells.

python -m lab.learning.evidence.figures    seconds; docs/objectives-by-lag.svg from block a-sums and
                                           docs/replay.svg from block d-sums, each if its block is finished
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Final, cast

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt  # after the choice of the backend

from lab.figures import command_parser
from lab.learning.evidence.arms import EvidenceArm
from lab.learning.evidence.blocks import BLOCKS, LAGS
from lab.learning.evidence.claims import Cells
from lab.learning.evidence.rows import final
from lab.learning.plots import COLORS, plain, save
from lab.learning.statistics import Interval
from lab.learning.verdicts import finished
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import Need, OneSide, Ring, TwoSide

SIZE: Final = (5.2, 3.6)
"""Inches. Text of 10 points is readable if the page shows it 400 pixels wide."""
NAMED: Final = {"rec-oneside-nois": 12, "reinforce": -4}
"""Objectives with a name in the figure, the default and the one without any restraint; and its place, in points."""
REUSE_SHOWN: Final = {
    "fresh 16": "16 fresh groups a step",
    "replay": "8 fresh, 8 replayed",
    "fresh 8, i = 2": "8 fresh, two updates",
    "fresh 8": "8 fresh",
}


def family(arm: EvidenceArm) -> str:
    """Return what keeps an objective from following stale data too far."""
    chosen = cast("dict[str, str]", arm.settings["objective"])["preset"]
    objective = PRESETS[chosen].objective
    if isinstance(objective.gate, OneSide | TwoSide | Ring):
        return "clipped ratio"
    return "weighted by the ratio" if Need.BEHAVIOR in objective.needs else "rewards alone"


def by_lag(cells: Cells) -> None:
    """Plot the final pass rate against v with intervals, one line for each objective, colored by its family."""
    _, axes = plt.subplots(figsize=SIZE)
    families = {arm.name.rpartition(" v")[0]: family(arm) for arm in cells.block.arms}
    colors = dict(zip(dict.fromkeys(families.values()), COLORS, strict=False))
    labelled: set[str] = set()
    for place, (name, kind) in enumerate(families.items()):
        finals = [Interval.of([final(row) for row in cells.of(f"{name} v{v}")]) for v in LAGS]
        means, halves = ([getattr(one, part) for one in finals] for part in ("mean", "half"))
        beside = [x + 0.012 * (place - len(families) / 2) for x in range(len(LAGS))]  # intervals side by side
        axes.errorbar(
            beside, means, yerr=halves, color=colors[kind], fmt="o-", capsize=2, markersize=3,
            linewidth=2.4 if name in NAMED else 0.9, label=None if kind in labelled else kind,
        )  # fmt: skip
        labelled.add(kind)
        if name in NAMED:
            where = (len(LAGS) - 1.12, means[-1])
            axes.annotate(name, where, xytext=(-6, NAMED[name]), textcoords="offset points", fontsize=9, ha="right")
    axes.set_xticks(range(len(LAGS)), [str(v) for v in LAGS])
    axes.legend(frameon=False, fontsize=9, loc="lower left")
    plain(axes, "weights published every v steps", "final pass rate")
    save("objectives-by-lag.svg")


def by_groups(cells: Cells) -> None:
    """Plot the mean pass rate against the generated groups, with replay, with two updates, and without."""
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
