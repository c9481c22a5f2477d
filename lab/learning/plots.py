"""The plots of docs/how-it-works/when-to-publish.md."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final, Protocol

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt  # after the choice of the backend

if TYPE_CHECKING:
    from matplotlib.axes import Axes

from lab.figures import ROOT
from lab.learning.pictures import follow_color_scheme

DOCS: Final = ROOT / "docs"
SHOWN: Final = 0.5
"""Larger promises are not drawn but counted in the title: a single ratio of 50 would flatten all others."""
COLORS: Final = ("#1b6ca8", "#d1495b", "#3a7d44", "#8d5a97", "#c98b1b", "#4a4e57", "#17a398", "#a0522d")


class Point(Protocol):
    """The coordinates of a promise."""

    @property
    def gain(self) -> float: ...
    @property
    def realised(self) -> float: ...


def save(name: str) -> None:
    """Write the current plot to docs/."""
    mpl.rcParams["svg.hashsalt"] = name  # the same numbers give the same file, byte for byte
    plt.tight_layout()
    plt.savefig(DOCS / name, metadata={"Date": None})
    follow_color_scheme(DOCS / name)
    plt.close()


def plain(axes: "Axes", x: str, y: str) -> None:
    """Name the axes, and leave out what is not needed."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def curves(arms: Mapping[str, Mapping[int, float]], ends: Mapping[str, tuple[float, float, float]]) -> None:
    """Plot the pass rate by step, and where each arm ends: (publishes, pass rate, half interval)."""
    _, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6))
    for (name, rates), color in zip(arms.items(), COLORS, strict=False):
        left.plot(list(rates), list(rates.values()), label=name, color=color, linewidth=1.4)
    left.legend(frameon=False, fontsize=8)
    plain(left, "step", "pass rate")
    for name, (publishes, rate, half) in ends.items():
        drifting = name.startswith("drift")
        color, place, side = (COLORS[1], (-6, 5), "right") if drifting else (COLORS[0], (6, 5), "left")
        right.errorbar(publishes, rate, yerr=half, fmt="o", color=color, capsize=3, markersize=4)
        right.annotate(name, (publishes, rate), textcoords="offset points", xytext=place, ha=side, fontsize=8)
    right.set_xscale("log")
    right.set_xlim(3.2, 160)
    right.set_xticks([5, 10, 20, 50, 100], ["5", "10", "20", "50", "100"])
    right.minorticks_off()
    plain(right, "publishes", "final pass rate")
    save("adaptive-sync.svg")


def gate_shares(by_lag: Mapping[str, Mapping[str, float]], buckets: Sequence[str]) -> None:
    """Plot the share of tokens that the gate stops by lag, with a line for each learning rate."""
    _, axes = plt.subplots(figsize=(4.6, 3.2))
    for (name, shares), color in zip(by_lag.items(), COLORS, strict=False):
        known = [bucket for bucket in buckets if bucket in shares]
        axes.plot(known, [shares[bucket] for bucket in known], "o-", label=name, color=color, markersize=4)
    axes.legend(frameon=False, fontsize=8, title="learning rate", title_fontsize=8)
    plain(axes, "lag", "share of tokens stopped")
    save("gates-by-lag.svg")


def scatter(sets: Mapping[str, Sequence[Sequence[Point]]]) -> None:
    """Plot promised against realized gain for every publish of every run, with the line on which they are equal."""
    _, panels = plt.subplots(1, len(sets), figsize=(8.4, 3.8), sharex=True, sharey=True)
    for axes, (name, runs), color in zip(panels, sets.items(), COLORS, strict=False):
        points = [point for run in runs for point in run]
        outside = sum(abs(point.gain) > SHOWN for point in points)
        axes.axline((0, 0), slope=1, color="#999999", linewidth=1)
        axes.plot([p.realised for p in points], [p.gain for p in points], ".", color=color, alpha=0.5, markersize=4)
        axes.set_ylim(-SHOWN, SHOWN)
        axes.set_title(f"batch {name}" + (f" ({outside} outside)" if outside else ""), fontsize=9)
        plain(axes, "realized gain in pass rate", "promised gain")
    save("calibration.svg")
