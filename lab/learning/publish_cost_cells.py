"""Train with a fixed v and with `sync.by_cost`, each until the exact pass rate reaches 0.8.

    python -m lab.learning.publish_cost_cells --minutes 60    train the missing cells; the same command continues

A finished cell is one line of `lab/learning/publish_cost.jsonl`. Time is simulated: a step takes one second and a
publish takes `cost` seconds. A fixed v learns the same whatever a publish costs, so one cell serves every cost.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NotRequired, TypedDict, cast

import torch

from lab.figures import command_parser, commit
from lab.learning.cells import Cell, SimulatedSeconds, by_cost, fixed
from lab.learning.rows import LEARNING
from lab.learning.watched_learner import ExactPassRate, WatchedLearner
from offbeat.errors import RunStopped
from offbeat.run.build import load_tokenizer
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import read
from offbeat.run.local import train
from offbeat.run.loop import Loop
from offbeat.trainer.trainer import RefusedBatch, Trained
from offbeat.types import Group, StepContext
from tests.fixtures.own_learner import own_learner

CELLS: Final = LEARNING / "publish_cost.jsonl"
RATES: Final = (2.5e-4, 5e-4, 1e-3)
PILOT: Final = (1, 2, 3, 4, 5)
"""Seeds that were looked at when the rule was chosen: what counts as wasted, and the two costs."""
SEEDS: Final = (6, 7, 8, 9, 10)
"""Seeds that the figures report."""
PERIODS: Final = (1, 2, 3, 5, 8, 12, 20)
COSTS: Final = (0.25, 4.0)
"""What a publish costs, in steps."""
GOAL: Final = 0.8
LONGEST: Final = 160
"""Steps after which a cell ends without having reached the goal."""


class CostRow(TypedDict):
    """One run."""

    arm: str
    rate: float
    seed: int
    reached: int | None
    """The first step whose policy has the goal's pass rate."""
    published: list[int]
    """Steps of the publishes, without the first one."""
    curve: list[float]
    """Exact pass rate by step."""
    seconds: NotRequired[float]
    commit: str


def rows() -> dict[tuple[str, float, int], CostRow]:
    """Return the finished cells."""
    lines = CELLS.read_text(encoding="utf-8").splitlines() if CELLS.exists() else []
    return {(row["arm"], row["rate"], row["seed"]): row for row in map(json.loads, lines)}


def wanted() -> Iterator[Cell]:
    """Yield all cells."""
    for seed in (*PILOT, *SEEDS):
        yield from (Cell(fixed(v), rate, seed, LONGEST) for rate in RATES for v in PERIODS)
        yield from (Cell(by_cost(cost), rate, seed, LONGEST) for rate in RATES for cost in COSTS)


def run(cell: Cell) -> CostRow:
    """Train a cell until it reaches the goal."""
    config, curve = cell.config(cell.arm.sections), dict[int, float]()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="offbeat-cost-") as scratch:
        directory = RunDirectory(Path(scratch, "run"))
        directory.create(config)

        def watch(loop: Loop) -> None:
            own = own_learner(loop)
            rate = ExactPassRate.of(load_tokenizer(config))

            class Until(WatchedLearner):
                async def train(self, groups: Sequence[Group], context: StepContext) -> Trained | RefusedBatch:
                    done = await super().train(groups, context)
                    if self.curve.get(self.step, 0) >= GOAL:
                        loop.stop("goal")
                    return done

            loop.learner = Until(own.rank, rate, 1, lambda step: False, curve)
            if cell.arm.cost is not None:
                loop.evidence = SimulatedSeconds(cost=cell.arm.cost)

        with suppress(RunStopped):  # a policy that collapsed has not reached the goal
            train(config, directory, started=watch)
        events = list(read(directory.events))
    return {
        "arm": cell.arm.name,
        "rate": cell.rate,
        "seed": cell.seed,
        "reached": next((step for step in sorted(curve) if curve[step] >= GOAL), None),
        "published": [cast(int, event["step"]) for event in events if event["kind"] == "published" and event["step"]],
        "curve": [round(curve[step], 5) for step in sorted(curve)],
        "seconds": round(time.monotonic() - began, 1),
        "commit": commit(),
    }


def sweep(minutes: float) -> None:
    until, done = time.monotonic() + 60 * minutes, rows()
    for cell in wanted():
        if cell.key in done or time.monotonic() > until:
            continue
        began = time.monotonic()
        row = run(cell)
        with CELLS.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        spent, load = time.monotonic() - began, os.getloadavg()[0]
        print(
            f"{cell.key}: {row['reached']}, {len(row['published'])} publishes, {spent:.0f} s, load {load:.1f}",
            flush=True,
        )


if __name__ == "__main__":
    parser = command_parser(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="start no new cell after this many minutes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    sweep(args.minutes)
