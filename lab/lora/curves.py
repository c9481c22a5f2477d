"""Train adapters of SmolLM2-135M on vLLM at v = 1 and v = 10, beside full training: one-digit sums in words.

    python -m lab.lora.curves --minutes 60    train missing runs, about a quarter of an hour each; the same command
                                              continues; rows lora.4.smollm2-* when all are there
    python -m lab.lora.curves --short         one run of two steps, nothing kept

The runs of full training are those of `python -m lab.learning.evidence.smollm2`, with the same seeds. An adapter has
rank 8 and a learning rate of 1e-4: with seed 101 it was at 0.80 after 20 steps, where five seeds of full training are
at 0.75 to 0.82. With 5e-5, ten times the rate of full training, seed 1 was at 0.39. The rate of full
training was chosen below its best.
"""

from typing import Final

from lab.figures import Figure
from lab.learning.evidence.rows import KEPT
from lab.learning.evidence.smollm2 import ARMS as SETTINGS
from lab.learning.evidence.smollm2 import FILE as FULL
from lab.learning.evidence.smollm2 import SEEDS, Runs, command, describe, final, rows, sweep_parser
from lab.learning.statistics import Interval, difference

ADAPTER: Final = ("adapter.rank=8", "optimizer.learning_rate=1e-4")
ARMS: Final = {name: (*ADAPTER, *SETTINGS[name]) for name in ("v1", "v10")}
FILE: Final = KEPT / "lora-smollm2.jsonl"


def figures(done: Runs) -> list[Figure]:
    """Return the final pass rate of each arm, with its difference from full training where that is there."""
    found, full = [], rows(FULL)
    for arm in ARMS:
        arm_rows = [done[arm, seed] for seed in SEEDS]
        finals = [final(row) for row in arm_rows]
        beside = [final(full[arm, seed]) for seed in SEEDS if (arm, seed) in full]
        apart = f"; minus full training {difference(finals, beside)}" if len(beside) == len(SEEDS) else ""
        what = f"SmolLM2-135M on vLLM, adapter of rank 8, {arm}: final pass@1"
        note = describe(arm_rows) + apart
        found.append(Figure(f"lora.4.smollm2-{arm}", what, "stated", str(Interval.of(finals)), "", True, 5, note))
    return found


if __name__ == "__main__":
    command(sweep_parser(__doc__).parse_args(), ARMS, FILE, figures)
