"""Train adapters of SmolLM2-135M on vLLM at v = 1 and v = 10, beside full training: one-digit sums in words.

    python -m lab.lora.curves --minutes 60    train missing runs, about a quarter of an hour each; the same command
                                              continues; rows lora.4.smollm2-* when all are there
    python -m lab.lora.curves --short         one run of two steps, nothing kept

The runs of full training are those of `python -m lab.learning.evidence.smollm2`, with the same seeds. An adapter has
rank 8 and a learning rate of 1e-4: with seed 101 it was at 0.80 after 20 steps, where five seeds of full training are
at 0.75 to 0.82. With 5e-5, ten times the rate of full training, seed 1 was at 0.39. The rate of full
training was chosen below its best.
"""

from collections.abc import Iterable
from statistics import fmean
from typing import Final

from lab.figures import Figure
from lab.learning.evidence.rows import KEPT
from lab.learning.evidence.smollm2 import ARMS as SETTINGS
from lab.learning.evidence.smollm2 import EVERY, SEEDS, Runs, SmolRow, command, describe, final, rows, sweep_parser
from lab.learning.evidence.smollm2 import FILE as FULL
from lab.learning.statistics import Interval, difference

ADAPTER: Final = ("adapter.rank=8", "optimizer.learning_rate=1e-4")
ARMS: Final = {name: (*ADAPTER, *SETTINGS[name]) for name in ("v1", "v10")}
FILE: Final = KEPT / "lora-smollm2.jsonl"


def figures(done: Runs) -> list[Figure]:
    """Return the final pass rate of each arm; the note has its curve beside that of full training."""
    found, full = [], rows(FULL)
    for arm in ARMS:
        adapted, beside = ([runs[arm, seed] for seed in SEEDS] for runs in (done, full))
        finals = [final(row) for row in adapted]
        apart = difference(finals, [final(row) for row in beside])
        what = f"SmolLM2-135M on vLLM, adapter of rank 8, {arm}: final pass@1"
        note = (
            f"every {EVERY} steps {mean_curve(adapted)}, full training {mean_curve(beside)}; final minus full training "
            f"{apart}; {describe(adapted)}"
        )
        found.append(Figure(f"lora.4.smollm2-{arm}", what, "stated", str(Interval.of(finals)), "", True, 5, note))
    return found


def mean_curve(arm_rows: Iterable[SmolRow]) -> str:
    """Return the mean pass@1 of each evaluation."""
    curves = [row["curve"] for row in arm_rows]
    return ", ".join(f"{fmean(evaluation):.3f}" for evaluation in zip(*curves, strict=True))


if __name__ == "__main__":
    command(sweep_parser(__doc__).parse_args(), ARMS, FILE, figures)
