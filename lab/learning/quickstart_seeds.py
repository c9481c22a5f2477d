"""Run the quickstart over five seeds, each with a model of its own: greedy and sampled pass rate before and after.

python -m lab.learning.quickstart_seeds           some minutes; rows door.3.quickstart-*
python -m lab.learning.quickstart_seeds --short   one run of two steps, nothing kept
"""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final, cast

from lab.figures import ROOT, Figure, command_parser, machine, record
from lab.learning.statistics import Interval
from offbeat.evaluation import GREEDY
from offbeat.run.journal import read
from offbeat.run.quickstart import make_model
from tests.fixtures.processes import OFFBEAT
from tests.fixtures.runs import scratch

RECIPE: Final = ROOT / "src" / "offbeat" / "recipes" / "quickstart.toml"
SEEDS: Final = (1, 2, 3, 4, 5)

Ends = tuple[float, float, float, float, float]
"""Greedy pass rate before and after, that of samples before and after, and seconds of training and evaluation."""


def train(seed: int, steps: Sequence[str] = ()) -> Ends:
    """Make a model, train it with the recipe of the quickstart and read its first and last evaluation."""
    with scratch() as place:
        make_model(place / "model", seed=seed)
        settings = [f"seed={seed}", f"model.path='{place / 'model'}'", *steps]
        words = ["train", str(RECIPE), "--out", str(place / "run")]
        done = subprocess.run(
            [OFFBEAT, *words, *(word for setting in settings for word in ("--set", setting))],
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"seed {seed} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        return ends(place / "run" / "events.jsonl")


def ends(events: Path) -> Ends:
    """Return the pass rates and seconds of a run."""
    found = list(read(events))
    evaluated = [event for event in found if event["kind"] == "evaluated"]
    first, last = evaluated[0], evaluated[-1]
    greedy = [cast("list[float]", one[GREEDY])[0] for one in (first, last)]
    sampled = [cast("list[float]", one["pass@1"])[0] for one in (first, last)]
    return (*greedy, *sampled, sum(cast("dict[str, float]", found[-1]["seconds"]).values()))  # type: ignore[return-value]


def figures(runs: Sequence[Ends]) -> list[Figure]:
    greedy_before, greedy_after, before, after, seconds = zip(*runs, strict=True)
    what = "quickstart, five seeds, each with a model of its own, on sums that it was not trained on"
    spread = ", ".join(f"{one:.0f}" for one in sorted(seconds))
    return [
        Figure("door.3.quickstart-greedy-before", f"{what}: largest greedy pass rate before training", "<= 0.5",
               max(greedy_before), "", max(greedy_before) <= 0.5, len(runs), f"seeds: {greedy_before}"),
        Figure("door.3.quickstart-greedy-after", f"{what}: smallest greedy pass rate after training", ">= 0.9",
               min(greedy_after), "", min(greedy_after) >= 0.9, len(runs), f"seeds: {greedy_after}"),
        Figure("door.3.quickstart-before", f"{what}: pass@1 of samples before training", "stated",
               str(Interval.of(before)), "", True, len(runs)),
        Figure("door.3.quickstart-after", f"{what}: pass@1 of samples after training", ">= 0.9",
               str(Interval.of(after)), "", Interval.of(after).mean >= 0.9, len(runs)),
        Figure("door.3.quickstart-seconds", "quickstart: seconds of a run, without making the model, median", "<= 300",
               round(median(seconds), 1), "s", median(seconds) <= 300, len(runs), f"{spread} s; {machine()}"),
    ]  # fmt: skip


def main() -> bool:
    if command_parser(__doc__, short="one run of two steps; keep nothing").parse_args().short:
        print(train(1, ("steps=2",)))
        return True
    return record(*figures([train(seed) for seed in SEEDS]))


if __name__ == "__main__":
    sys.exit(not main())
