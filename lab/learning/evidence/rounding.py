"""Train SmolLM2-135M at v = 1 without dithered masters, beside the runs that have them: what does rounding cost?

    python -m lab.learning.evidence.rounding --minutes 60    train missing runs, some minutes each; the same command
                                                             continues; row evidence.smollm2.dither at the end
    python -m lab.learning.evidence.rounding --short         one run of two steps, nothing kept

The runs with dithered masters are those of `python -m lab.learning.evidence.smollm2` at v = 1, with the same seeds.
"""

import sys
from functools import partial
from typing import Final

from lab.figures import Figure
from lab.learning.evidence.rows import KEPT
from lab.learning.evidence.smollm2 import ARMS as SETTINGS
from lab.learning.evidence.smollm2 import EVERY, SEEDS, Runs, command, rows, run, sweep_parser
from lab.learning.statistics import Interval, difference

STEPS: Final = 20
ARMS: Final = {"plain": SETTINGS["v1"]}
FILE: Final = KEPT / "smollm2-plain.jsonl"
PLAIN: Final = (
    sys.executable,
    "-c",
    "from offbeat.run import learner; learner.dither = lambda optimizer, seed: None; "
    "from offbeat.cli.main import main; main()",
)
"""`offbeat`, with masters that start where the weights of the file are."""


def figures(done: Runs) -> list[Figure]:
    """Return what dithered masters gain within `STEPS`."""
    dithered, last = rows(), STEPS // EVERY
    if missing := [seed for seed in SEEDS if ("v1", seed) not in dithered]:
        raise SystemExit(f"the runs at v = 1 lack the seeds {missing}: run python -m lab.learning.evidence.smollm2")
    with_dither = [dithered["v1", seed]["curve"][last] for seed in SEEDS]
    without = [done["plain", seed]["curve"][last] for seed in SEEDS]
    gain = difference(with_dither, without)
    note = f"{Interval.of(with_dither)} with dithered masters, {Interval.of(without)} without; paired by seed"
    return [
        Figure(
            "evidence.smollm2.dither",
            f"SmolLM2-135M on vLLM, v = 1: pass@1 after {STEPS} steps with dithered masters minus that without",
            "interval above 0",
            f"{gain.mean:.3f} [{gain.low:.3f}, {gain.high:.3f}]",
            "",
            gain.low > 0,
            len(SEEDS),
            note,
        )
    ]


if __name__ == "__main__":
    command(sweep_parser(__doc__).parse_args(), ARMS, FILE, figures, partial(run, steps=STEPS, program=PLAIN))
