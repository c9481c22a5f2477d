"""Draw the figure of the README: the model of the quickstart trained with three cadences, from real runs.

    python -m lab.learning.readme_figure           9 runs of 100 steps, minutes each; writes rows
                                                   user-path.5.figure.* and the plot
    python -m lab.learning.readme_figure --draw    draw the plot again from the kept numbers
    python -m lab.learning.readme_figure --short   one run of two steps, nothing kept

`lab/learning/quickstart.json` keeps the numbers, `docs/lag.svg` is the plot.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt  # after the choice of the backend

from lab.figures import ROOT, Figure, command_parser, machine, record
from lab.fixtures.processes import OFFBEAT
from lab.learning.pictures import follow_color_scheme
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
    """The result of one run."""

    arm: str
    seed: int
    steps: list[int]
    rates: list[float]
    published: list[int]
    """Steps of the publishes, without that of the first policy."""
    bytes: int


def run(arm: str, seed: int, model: Path, steps: int) -> Run:
    """Run `offbeat train` with the recipe of the quickstart and read its journal."""
    with tempfile.TemporaryDirectory() as scratch:
        settings = [*ARMS[arm][1], f"seed={seed}", f"steps={steps}", f"model.path='{model}'", "evaluation.every=10"]
        words = ["train", str(ROOT / "src/offbeat/recipes/quickstart.toml"), "--out", f"{scratch}/run"]
        for setting in settings:
            words += ["--set", setting]
        done = subprocess.run([OFFBEAT, *words], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{arm}, seed {seed} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        events = list(read(Path(scratch) / "run" / "events.jsonl"))
    evaluated = [event for event in events if event["kind"] == "evaluated"]
    published = [event for event in events if event["kind"] == "published"][1:]
    return Run(
        arm,
        seed,
        [cast(int, event["version"]) for event in evaluated],
        [cast(list[float], event["pass@1"])[0] for event in evaluated],
        [cast(int, event["version"]) for event in published],
        sum(cast(int, event["bytes"]) for event in published),
    )


def draw(runs: Sequence[Run]) -> None:
    """Plot the pass rates of every seed, and below them the publishes of each arm."""
    mpl.rcParams["svg.hashsalt"] = "lag"  # the same numbers give the same file, byte for byte
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
    follow_color_scheme(PICTURE)
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
                f"{', '.join(str(len(one.published)) for one in seeds)}; {machine()}",
            )
        )
    return found


def main() -> bool:
    parser = command_parser(__doc__, short="one run of two steps; keep nothing")
    parser.add_argument("--draw", action="store_true", help="draw the plot again from the kept numbers")
    args = parser.parse_args()
    if args.draw:
        draw([Run(**kept) for kept in json.loads(KEPT.read_text(encoding="utf-8"))])
        return True
    with tempfile.TemporaryDirectory() as place:
        make_model(Path(place) / "model", steps=20 if args.short else 800)
        if args.short:
            return len(run("v10", 0, Path(place) / "model", 2).rates) > 0
        runs = [run(arm, seed, Path(place) / "model", 100) for seed in SEEDS for arm in ARMS]
    KEPT.write_text(json.dumps([asdict(one) for one in runs]) + "\n", encoding="utf-8")
    draw(runs)
    return record(*figures(runs))


if __name__ == "__main__":
    sys.exit(not main())
