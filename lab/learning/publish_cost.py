"""Compare `sync.by_cost` with every fixed v: simulated seconds until the exact pass rate reaches 0.8.

    python -m lab.learning.publish_cost    seconds; writes rows promises.3.*

The runs are the cells of `lab/learning/publish_cost.jsonl` (`python -m lab.learning.publish_cost_cells`). A step takes
one second. The best fixed v is chosen after the fact, for each learning rate and each cost of a publish; `by_cost`
knows neither and has no setting. The reported seeds are not those of the pilot in which the rule was chosen.
"""

import sys
from statistics import fmean

from lab.figures import Figure, command_parser, record
from lab.learning.publish_cost_cells import COSTS, LONGEST, PERIODS, PILOT, RATES, SEEDS, CostRow, rows

ALLOWED = 1.1


def seconds(row: CostRow, cost: float) -> float:
    """Return the simulated seconds until the goal; a run that did not reach it counts with all its steps."""
    steps = LONGEST if row["reached"] is None else row["reached"]
    return steps + cost * sum(published < steps for published in row["published"])


def compared(rate: float, cost: float) -> Figure:
    """One row: the mean over seeds of `by_cost` against that of the best fixed v."""
    done = rows()
    by_v = {v: fmean(seconds(done[f"v{v}", rate, seed], cost) for seed in SEEDS) for v in PERIODS}
    pilot = fmean(seconds(done[f"cost-{cost:g}", rate, seed], cost) for seed in PILOT)
    pilot /= min(fmean(seconds(done[f"v{v}", rate, seed], cost) for seed in PILOT) for v in PERIODS)
    best = min(by_v, key=by_v.__getitem__)
    own = [done[f"cost-{cost:g}", rate, seed] for seed in SEEDS]
    mine = fmean(seconds(row, cost) for row in own)
    paired = [
        seconds(row, cost) / seconds(done[f"v{best}", rate, seed], cost) for row, seed in zip(own, SEEDS, strict=True)
    ]
    unreached = sum(row["reached"] is None for row in own)
    periods = ", ".join(f"v = {v}: {spent:.1f}" for v, spent in by_v.items())
    publishes = fmean(len(row["published"]) for row in own)
    return Figure(
        f"promises.3.lr-{rate:g}-cost-{cost:g}",
        f"sync.by_cost against the best fixed v: seconds to pass rate 0.8, lr {rate:g}, a publish costs {cost:g} s",
        f"≤ {ALLOWED}",
        round(mine / by_v[best], 3),
        "×",
        mine <= ALLOWED * by_v[best] and not unreached,
        len(SEEDS),
        f"by_cost {mine:.1f} s with {publishes:.1f} publishes, best v = {best}; by seed {min(paired):.2f} to "
        f"{max(paired):.2f} × that v; {periods}; on the seeds of the pilot {pilot:.3f} ×",
    )


if __name__ == "__main__":
    command_parser(__doc__).parse_args()
    sys.exit(not record(*(compared(rate, cost) for rate in RATES for cost in COSTS)))
