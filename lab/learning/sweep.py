"""Train the arms of the learning figures, cell by cell.

    python -m lab.learning.sweep --minutes 60     train until all cells are finished, or the time is up; an hour in all
    python -m lab.learning.sweep --short          two small cells, nothing kept, to check that it works

Every arm gets its own learning rate: the best of `RATES` by mean final pass rate over two tuning seeds, which differ
from the reported seeds. The rate that does worst on the first tuning seed is not tried on the second. A finished cell
is one line of `lab/learning/cells.jsonl`, and the same command continues after it.
"""

import os
import time
from collections.abc import Iterator
from typing import Final

import torch

from lab.figures import command_parser
from lab.learning.cells import CONCURRENT, OFFLINE_ONLINE, Cell, by_cost, drift, fixed, preset, run
from lab.learning.rows import BUDGETS, MORE_SEEDS, RATES, REPORTED, TUNING, Key, Row, best_rate, keep, promising, rows

PRIMARY: Final = (fixed(1), *(drift(budget) for budget in BUDGETS), fixed(10), CONCURRENT, OFFLINE_ONLINE)
PROMISED: Final = (drift(BUDGETS[0]), by_cost(0.25))
"""More seeds of these, so that each rule has enough publishes to compare promised with realized gains."""
OTHER_V: Final = (fixed(5), fixed(20), fixed(2))
GATES: Final = (fixed(10), preset("reinforce", 10), preset("rec-oneside-is", 10))
"""With a gate, without a gate, and with a gate and importance sampling: both tuning seeds at every rate."""


def wanted(done: dict[Key, Row]) -> Iterator[Cell]:
    """Yield all cells, the most useful first. Each arm is tuned before it is reported."""
    for arms in (PRIMARY, OTHER_V):
        yield from (Cell(arm, rate, TUNING[0]) for arm in arms for rate in RATES)
        yield from (Cell(arm, rate, TUNING[1]) for arm in arms for rate in promising(arm.name, done))
        yield from (Cell(arm, best_rate(arm.name, done), seed) for seed in REPORTED for arm in arms)
    yield from (Cell(arm, best_rate("v5", done), seed) for seed in (*REPORTED, *MORE_SEEDS) for arm in PROMISED)
    # The lag of concurrent mode depends on the machine, so its tuning is chance: it also runs at the rate of v = 1.
    yield from (Cell(CONCURRENT, best_rate("v1", done), seed) for seed in REPORTED)
    yield from (Cell(preset("reinforce", 1), rate, TUNING[0]) for rate in RATES)
    yield from (Cell(arm, rate, seed) for seed in TUNING for arm in GATES for rate in RATES)


def sweep(minutes: float) -> None:
    """Train the missing cells."""
    until, done = time.monotonic() + 60 * minutes, rows()
    for cell in wanted(done):
        if cell.key in done:
            continue
        if time.monotonic() > until:
            print(f"the time is up with {len(done)} cells; the same command continues")
            return
        began = time.monotonic()
        row = done[cell.key] = run(cell)
        keep(row)
        spent, load = time.monotonic() - began, os.getloadavg()[0]
        print(
            f"{cell.key}: {row['final']:.3f}, {row['publishes']} publishes, {spent:.0f} s, load {load:.1f}", flush=True
        )
    print(f"all {len(done)} cells are finished")


def short() -> None:
    """Train two small cells and keep nothing."""
    for arm in (drift(BUDGETS[0]), OFFLINE_ONLINE):
        row = run(Cell(arm, RATES[0], seed=1, steps=20))
        print(f"{arm.name}: {row['final']:.3f} after {row['steps']} steps, {row['publishes']} publishes")


if __name__ == "__main__":
    parser = command_parser(__doc__, short="two small cells; keep nothing")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no new cell after this many minutes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.short:
        short()
    else:
        sweep(args.minutes)
