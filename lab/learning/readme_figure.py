"""The README's figure: the quickstart's model by three cadences, from real runs.

    python -m lab.learning.readme_figure  9 runs of 100 steps, one after another; rows user-path.5.figure.*, the picture
    python -m lab.learning.readme_figure --draw    the picture again, from the numbers that were kept
    python -m lab.learning.readme_figure --short   one run of two steps, nothing kept

Numbers are kept in `lab/learning/quickstart.json`, the picture in `docs/lag.svg`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt  # after the choice of what draws

from lab.figures import ROOT, Figure, record
from offbeat.run.journal import read
from offbeat.run.quickstart import make_model

KEPT = ROOT / "lab" / "learning" / "quickstart.json"
PICTURE = ROOT / "docs" / "lag.svg"
SEEDS = (0, 1, 2)
ARMS = {
    "v1": ("every step (lag 0)", ["sync.every=1"]),
    "v10": ("every 10 steps (lag 0 to 9)", ["sync.every=10"]),
    "drift": ("when drift exceeds 0.05", ["sync.every=40", "sync.drift_budget=0.05"]),
}
COLORS = {"v1": "#4a4e57", "v10": "#1b6ca8", "drift": "#d1495b"}
GOAL = 0.9


@dataclass(frozen=True)
class Run:
    """What one run came to."""

    arm: str
    seed: int
    steps: list[int]
    rates: list[float]
    published: list[int]
    """Steps; the first policy is not counted."""
    bytes: int


def run(arm: str, seed: int, model: Path, steps: int) -> Run:
    """`offbeat train` with the quickstart's recipe, read from its journal."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = [*ARMS[arm][1], f"seed={seed}", f"steps={steps}", f"model.path='{model}'", "evaluation.every=10"]
        words = ["train", str(ROOT / "src/offbeat/recipes/quickstart.toml"), "--out", f"{scratch}/run"]
        for setting in settings:
            words += ["--set", setting]
        offbeat = Path(sys.executable).parent / "offbeat"
        done = subprocess.run([offbeat, *words], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{arm}, seed {seed} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        events = list(read(Path(scratch) / "run" / "events.jsonl"))
    evaluated = [event for event in events if event["kind"] == "evaluated"]
    published = [event for event in events if event["kind"] == "published"][1:]
    return Run(
        arm,
        seed,
        [cast(int, event["step"]) for event in evaluated],
        [cast(list[float], event["pass@1"])[0] for event in evaluated],
        [cast(int, event["version"]) for event in published],
        sum(cast(int, event["bytes"]) for event in published),
    )


def draw(runs: Sequence[Run]) -> None:
    """Pass rates of every seed; below them, when each arm published."""
    mpl.rcParams["svg.hashsalt"] = "lag"  # the same picture from the same numbers, byte for byte
    _, (above, below) = plt.subplots(2, 1, figsize=(7.2, 4.2), sharex=True, height_ratios=(4, 1))
    for row, (arm, (name, _)) in enumerate(ARMS.items()):
        seeds = [one for one in runs if one.arm == arm]
        for one in seeds:
            above.plot(one.steps, one.rates, color=COLORS[arm], linewidth=0.8, alpha=0.4)
        means = [sum(rates) / len(seeds) for rates in zip(*(one.rates for one in seeds), strict=True)]
        fewest, most = (pick(len(one.published) for one in seeds) for pick in (min, max))
        label = f"{name}: {fewest if fewest == most else f'{fewest} to {most}'} publishes"
        above.plot(seeds[0].steps, means, color=COLORS[arm], linewidth=2, label=label)
        below.vlines(seeds[0].published, -row - 0.35, -row + 0.35, color=COLORS[arm], linewidth=1)
    above.set_ylabel("pass rate")
    above.legend(frameon=False, fontsize=9, loc="lower right", title="weights are published", title_fontsize=9)
    below.set_yticks([])
    below.set_ylabel("publishes\n(seed 0)")
    below.set_xlabel("step")
    for axes in (above, below):
        axes.grid(alpha=0.25, axis="x" if axes is below else "both")
        axes.spines[["top", "right"]].set_visible(False)
    plt.tight_layout()
    plt.savefig(PICTURE, metadata={"Date": None})
    plt.close()


def figures(runs: Sequence[Run]) -> list[Figure]:
    found = []
    for arm, (name, _) in ARMS.items():
        seeds = [one for one in runs if one.arm == arm]
        ends = [one.rates[-1] for one in seeds]
        found.append(
            Figure(
                f"user-path.5.figure.{arm}",
                f"one-digit sums, weights published {name}: pass rate after 100 steps, lowest of the seeds",
                f">= {GOAL}",
                round(min(ends), 3),
                "pass rate",
                min(ends) >= GOAL,
                len(seeds),
                f"ends at {', '.join(f'{end:.3f}' for end in ends)}, from {seeds[0].rates[0]:.2f}; publishes "
                f"{', '.join(str(len(one.published)) for one in seeds)}; load {os.getloadavg()[0]:.1f}",
            )
        )
    return found


def main() -> bool:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--draw", action="store_true")
    options.add_argument("--short", action="store_true")
    args = options.parse_args()
    if args.draw:
        draw([Run(**kept) for kept in json.loads(KEPT.read_text(encoding="utf-8"))])
        return True
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place) / "model", steps=20 if args.short else 800)
        if args.short:
            return len(run("v10", 0, Path(place) / "model", 2).rates) > 0
        runs = [run(arm, seed, Path(place) / "model", 100) for seed in SEEDS for arm in ARMS]
    KEPT.parent.mkdir(exist_ok=True)
    KEPT.write_text(json.dumps([asdict(one) for one in runs]) + "\n", encoding="utf-8")
    draw(runs)
    return record(*figures(runs))


if __name__ == "__main__":
    sys.exit(not main())
