"""Compute the learning figures and their plots from the cells of the sweep.

python -m lab.learning.figures    seconds; writes rows run.3.* and docs/*.svg
"""

from collections.abc import Sequence
from statistics import fmean
from typing import Final

from lab.figures import Figure, command_parser, record
from lab.learning.plots import curves, gate_shares
from lab.learning.rows import BUDGETS, RATES, REPORTED, TUNING, Key, Row, best_rate, rows
from lab.learning.statistics import Interval, difference

FIXED: Final = ("v1", "v2", "v5", "v10", "v20")
FEWER: Final = 4
"""The goal of drift: this many times fewer publishes than v = 1."""
BUCKETS: Final = ("0", "1", "2-3", "4-7", "8-15", "16-31", "32+")


class Cells:
    """The cells of the sweep, by arm."""

    def __init__(self, done: dict[Key, Row]) -> None:
        self.done = done

    def of(self, arm: str) -> list[Row]:
        """Return the reported seeds at the arm's own learning rate."""
        rate = best_rate(arm, self.done)
        return [self.done[arm, rate, seed] for seed in REPORTED]

    def tuned(self, arm: str, rate: float) -> list[Row]:
        """Return the tuning seeds. The second is missing if the rate did worst on the first."""
        return [self.done[arm, rate, seed] for seed in TUNING if (arm, rate, seed) in self.done]

    def finals(self, arm: str) -> list[float]:
        return [row["final"] for row in self.of(arm)]

    def publishes(self, arm: str) -> float:
        return fmean(row["publishes"] for row in self.of(arm))

    def note(self, arm: str) -> str:
        """Describe how the rate was chosen and what the arm cost."""
        tried = ", ".join(f"{rate:g}: {fmean(row['final'] for row in self.tuned(arm, rate)):.3f}" for rate in RATES)
        fresh = fmean(row["groups"] for row in self.of(arm))
        lag = max((bucket for row in self.of(arm) for bucket in row["by_lag"] if bucket in BUCKETS), key=BUCKETS.index)
        return (
            f"lr {best_rate(arm, self.done):g} (tuning seeds: {tried}); {self.publishes(arm):.1f} publishes; "
            f"lag up to {lag}; {fresh:.0f} fresh groups; 95 % interval over seeds"
        )


def chosen_budget(cells: Cells) -> str:
    """Return the drift arm to report: the best on the tuning seeds among those that publish rarely enough."""

    def rarely(arm: str) -> bool:
        return fmean(row["publishes"] for row in tuned(arm)) * FEWER <= fmean(row["publishes"] for row in tuned("v1"))

    def tuned(arm: str) -> list[Row]:
        return cells.tuned(arm, best_rate(arm, cells.done))

    arms = [f"drift-{budget:g}" for budget in BUDGETS]
    return max(filter(rarely, arms), key=lambda arm: fmean(row["final"] for row in tuned(arm)))


def finals(cells: Cells, names: dict[str, str]) -> list[Figure]:
    """Return the final pass rates with intervals."""
    return [
        Figure(
            f"run.3.{name}",
            f"Final pass rate on the tiny model, {arm}",
            "5 seeds with interval",
            str(Interval.of(cells.finals(arm))),
            "",
            True,
            len(cells.finals(arm)),
            cells.note(arm),
        )
        for name, arm in names.items()
    ]


def concurrent_at_common_rate(cells: Cells) -> Figure:
    """Return concurrent mode at the rate of v = 1, because its own tuning met other lags than its reported runs."""
    rate = best_rate("v1", cells.done)
    found = [cells.done["concurrent", rate, seed] for seed in REPORTED]
    tuning = [row for rate in RATES for row in cells.tuned("concurrent", rate)]
    return Figure(
        "run.3.concurrent-rate",
        f"Final pass rate on the tiny model, concurrent at lr {rate:g}, the rate of the others",
        "5 seeds with interval",
        str(Interval.of([row["final"] for row in found])),
        "",
        True,
        len(found),
        f"lag depends on how busy the machine is: in most steps of these runs {', '.join(map(usual_lag, found))}; "
        f"while tuning, by ascending rate, {', '.join(map(usual_lag, tuning))}. So its tuning is partly chance",
    )


def usual_lag(row: Row) -> str:
    """Return the lag bucket that occurs in the most steps of a run."""
    return max(row["by_lag"], key=lambda bucket: row["by_lag"][bucket]["steps"])


def drift_publishes(cells: Cells, arm: str) -> Figure:
    """Answer whether drift reaches v = 1 with fewer publishes."""
    ratio = cells.publishes("v1") / cells.publishes(arm)
    fresh, own = Interval.of(cells.finals("v1")), Interval.of(cells.finals(arm))
    apart = difference(cells.finals(arm), cells.finals("v1"))
    return Figure(
        "run.3.drift-publishes",
        f"Publishes of v = 1 for each of {arm}, which ends within the interval of v = 1 or above it",
        f">= {FEWER}, and pass rate >= {fresh.low:.3f}",
        round(ratio, 1),
        "×",
        ratio >= FEWER and own.mean >= fresh.low,
        len(REPORTED),
        f"v = 1 ends at {fresh}, {arm} at {own}; difference by seed {apart}",
    )


def drift_against_fixed(cells: Cells, arm: str) -> Figure:
    """Answer whether the fixed v with about as many publishes beats drift."""
    count = cells.publishes(arm)
    rival = min(FIXED, key=lambda name: abs(cells.publishes(name) - count))
    apart = difference(cells.finals(arm), cells.finals(rival))
    return Figure(
        "run.3.drift-vs-fixed",
        f"Final pass rate of {arm} minus that of {rival}, the fixed v with the nearest number of publishes",
        "not below 0 beyond the interval",
        str(apart),
        "",
        apart.high >= 0,
        len(REPORTED),
        f"{count:.1f} against {cells.publishes(rival):.1f} publishes; each at its own learning rate. All fixed: "
        + ", ".join(f"{name} {Interval.of(cells.finals(name))} ({cells.publishes(name):.0f})" for name in FIXED),
    )


def stopped(rows_: Sequence[Row]) -> dict[str, float]:
    """Return the share of tokens that the gate stopped, up or down, by lag."""
    found: dict[str, list[float]] = {}
    for row in rows_:
        for bucket, values in row["by_lag"].items():
            share = (values["gate_stopped_up"] + values["gate_stopped_down"]) / 2
            found.setdefault(bucket, []).extend([share] * values["steps"])
    return {bucket: fmean(found[bucket]) for bucket in BUCKETS if bucket in found}


def gates(cells: Cells) -> Figure:
    """Answer whether a gate helps at v = 10, and whether it stops nothing at lag 0."""
    at_zero = max(stopped(cells.tuned(arm, rate))["0"] for arm in FIXED for rate in RATES)
    shares = {f"{rate:g}": stopped(cells.tuned("v20", rate)) for rate in RATES}
    gate_shares(shares, BUCKETS)
    table = {
        name: [fmean(row["final"] for row in cells.tuned(arm, rate)) for rate in RATES]
        for name, arm in (
            ("v = 1", "v1"),
            ("v = 10, gate", "v10"),
            ("v = 10, gate and importance sampling", "v10-rec-oneside-is"),
            ("v = 10, no gate", "v10-reinforce"),
        )
    }
    rates = "; ".join(f"{name}: {', '.join(f'{one:.3f}' for one in ones)}" for name, ones in table.items())
    by_lag = ", ".join(f"{bucket}: {share:.0%}" for bucket, share in shares[f"{RATES[-1]:g}"].items())
    added = min(one - other for one, other in zip(table["v = 10, gate"], table["v = 10, no gate"], strict=True))
    return Figure(
        "run.3.gates",
        "At v = 10, what a gate adds to the final pass rate: the least over three learning rates",
        "> 0, and 0 tokens stopped at lag 0",
        round(added, 3),
        "",
        added > 0 and at_zero == 0,
        len(TUNING),
        f"final pass rates at lr {', '.join(f'{rate:g}' for rate in RATES)}, tuning seeds: {rates}. Tokens stopped at "
        f"lag 0: {at_zero:.0%}; v = 20 at lr {RATES[-1]:g} by lag: {by_lag}. At v = 1 runs with and without a gate are "
        + ("the same to the fifth decimal of every pass rate" if same_without_gate(cells) else "NOT the same"),
    )


def same_without_gate(cells: Cells) -> bool:
    """Return True if runs with and without a gate are equal at v = 1, where a gate has nothing to stop."""
    pairs = [
        (cells.done["v1", rate, seed]["curve"], row["curve"])
        for (arm, rate, seed), row in cells.done.items()
        if arm == "v1-reinforce" and ("v1", rate, seed) in cells.done
    ]
    return bool(pairs) and all(gated == bare for gated, bare in pairs)


def plot(cells: Cells, arms: Sequence[str]) -> None:
    """Plot learning curves, as means over seeds, and final pass rates by publishes."""
    means = {
        arm: {int(step): fmean(row["curve"][step] for row in cells.of(arm)) for step in cells.of(arm)[0]["curve"]}
        for arm in arms
    }
    ends = {
        arm: (cells.publishes(arm), (one := Interval.of(cells.finals(arm))).mean, one.half)
        for arm in (*FIXED, *(f"drift-{budget:g}" for budget in BUDGETS))
    }
    curves(means, ends)


def main() -> bool:
    command_parser(__doc__).parse_args()
    cells = Cells(rows())
    drift = chosen_budget(cells)
    names = {name: name for name in FIXED} | {"drift": drift, "concurrent": "concurrent"}
    plot(cells, ["v1", drift, "v10", "v20", "concurrent", "offline-online"])
    return record(
        *finals(cells, names | {"offline-online": "offline-online"}),
        concurrent_at_common_rate(cells),
        drift_publishes(cells, drift),
        drift_against_fixed(cells, drift),
        gates(cells),
    )


if __name__ == "__main__":
    raise SystemExit(not main())
