"""Train SmolLM2-135M without dithered masters, beside the runs that have them: what does rounding cost?

    python -m lab.learning.evidence.rounding --minutes 60    train missing runs, some minutes each; the same command
                                                             continues; rows transfer.2.dither-v1, transfer.2.dither-v10
                                                             and evidence.smollm2.dither when all are there
    python -m lab.learning.evidence.rounding --short         one run of two steps, nothing kept

The runs with dithered masters are those of `python -m lab.learning.evidence.smollm2`, with the same seeds.
"""

from functools import partial
from typing import Final

from lab.figures import Figure
from lab.learning.evidence.rows import KEPT
from lab.learning.evidence.smollm2 import ARMS as DITHERED
from lab.learning.evidence.smollm2 import EVERY, SEEDS, Runs, command, rows, run, sweep_parser
from lab.learning.statistics import Interval, difference

STEPS: Final = 20
PLAIN: Final = {"v1": "plain", "v10": "plain-v10"}
"""The arm without dithered masters beside each arm that has them."""
ARMS: Final = {plain: (*DITHERED[arm], "optimizer.dither=false") for arm, plain in PLAIN.items()}
FILE: Final = KEPT / "smollm2-plain.jsonl"


def figures(done: Runs) -> list[Figure]:
    """Return what dithered masters gain within `STEPS`."""
    dithered = rows()
    if missing := [one for arm in PLAIN for seed in SEEDS if (one := (arm, seed)) not in dithered]:
        raise SystemExit(f"runs with dithered masters are missing, {missing}: python -m lab.learning.evidence.smollm2")
    ids = {"evidence.smollm2.dither": "v1"} | {f"transfer.2.dither-{arm}": arm for arm in PLAIN}
    return [_gain(row, arm, dithered, done) for row, arm in ids.items()]


def _gain(row: str, arm: str, dithered: Runs, plain: Runs) -> Figure:
    last = STEPS // EVERY
    having = [dithered[arm, seed]["curve"][last] for seed in SEEDS]
    lacking = [plain[PLAIN[arm], seed]["curve"][last] for seed in SEEDS]
    gain = difference(having, lacking)
    return Figure(
        row,
        f"SmolLM2-135M on vLLM, v = {arm[1:]}: pass@1 after {STEPS} steps with dithered masters minus that without",
        "interval above 0",
        f"{gain.mean:.3f} [{gain.low:.3f}, {gain.high:.3f}]",
        "",
        gain.low > 0,
        len(SEEDS),
        f"{Interval.of(having)} with dithered masters, {Interval.of(lacking)} without; paired by seed",
    )


if __name__ == "__main__":
    command(sweep_parser(__doc__).parse_args(), ARMS, FILE, figures, partial(run, steps=STEPS))
