"""Several runs beside each other, seeds pooled."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offbeat.report.panels import running_mean
from offbeat.report.plot import Plot, Series
from offbeat.report.pools import Pool, differing, flat, interval, mean_curve
from offbeat.report.record import Record
from offbeat.report.words import duration, size
from offbeat.run.live import verdict
from offbeat.types import Json

MOST_NAMED = 4
"""Configurations that fit in one sentence."""
Curve = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Comparison:
    """What a report says about several runs."""

    conclusion: str
    names: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    """What, and one cell for each pool."""
    differences: Sequence[tuple[str, Sequence[Json]]]
    """Knobs that are not the same in all."""
    plots: Sequence[Plot]


def compare(pools: Sequence[Pool[Record]]) -> Comparison:
    """One column for each pool."""
    configs = [flat(pool.runs[0].config) for pool in pools]
    return Comparison(
        _conclusion(pools),
        [pool.name for pool in pools],
        [(name, [cell(pool.runs) for pool in pools]) for name, cell in CELLS],
        [(key, [config[key] for config in configs]) for key in differing(configs)],
        [
            Plot("pass@1", _lines(pools, _pass_rates), note=_over_seeds(pools), y_range=(0, 1)),
            Plot("Training reward", _lines(pools, _rewards), note="Running mean over a twentieth of the run."),
            Plot("Lag", _lines(pools, _lags), note="Mean of the batch."),
            Plot(
                "Drift",
                _lines(pools, lambda run: run.history.series("drift_tv_token")),
                note="Total variation per token from behavior to proximal policy, mean of the batch.",
            ),
        ],
    )


def _conclusion(pools: Sequence[Pool[Record]]) -> str:
    runs = sum(len(pool.runs) for pool in pools)
    ends = [(interval(values), pool.name) for pool in pools if (values := _final(pool.runs))]
    begin = f"{runs} runs of {len(pools)} configurations" if len(pools) > 1 else f"{runs} seeds of one configuration"
    if not ends:
        return f"{begin}, none of them with evaluations."
    if len(ends) > MOST_NAMED:
        ends = [max(ends, key=lambda end: end[0].mean), min(ends, key=lambda end: end[0].mean)]
        return f"{begin}; last pass@1 from {ends[1][0]} ({ends[1][1]}) to {ends[0][0]} ({ends[0][1]})."
    return f"{begin}; last pass@1: " + ", ".join(f"{name} {end}" for end, name in ends) + "."


def _over_seeds(pools: Sequence[Pool[Record]]) -> str:
    if all(len(pool.runs) == 1 for pool in pools):
        return "One run each: the intervals over prompts are in the runs' own sections."
    return "Means over seeds with 95 % t intervals; a line without a band is one run."


def _lines(pools: Sequence[Pool[Record]], curve: Callable[[Record], Curve]) -> list[Series]:
    lines = []
    for colour, pool in enumerate(pools):
        steps, means = mean_curve(curve(run) for run in pool.runs)
        banded = means if len(pool.runs) > 1 else []
        low, high = [one.low for one in banded], [one.high for one in banded]
        lines.append(Series(pool.name, steps, [one.mean for one in means], low, high, colour=colour))
    return lines


def _pass_rates(run: Record) -> Curve:
    found = [(one.step, one.estimates["pass@1"][0]) for one in run.history.evaluations if "pass@1" in one.estimates]
    return [float(step) for step, _ in found], [value for _, value in found]


def _rewards(run: Record) -> Curve:
    steps, values = run.history.series("reward_mean")
    return steps, running_mean(values, max(1, len(values) // 20))


def _lags(run: Record) -> Curve:
    found = [(float(one.step), sum(one.lags) / len(one.lags)) for one in run.history.steps if one.lags]
    return [step for step, _ in found], [lag for _, lag in found]


def _final(runs: Sequence[Record]) -> list[float]:
    return [values[-1] for run in runs if (values := _pass_rates(run)[1])]


def _cell(
    of: Callable[[Record], float | None], show: Callable[[float], str], *, spread: bool = False
) -> Callable[[Sequence[Record]], str]:
    """A mean over seeds, with its interval where the figure is an estimate; – where no run can tell."""

    def cell(runs: Sequence[Record]) -> str:
        values = [value for run in runs if (value := of(run)) is not None]
        if not values:
            return "–"
        found = interval(values)
        return show(found.mean) + (f" ± {show(found.high - found.mean)}" if spread and found.n > 1 else "")

    return cell


def _at(curve: Curve, place: int) -> float | None:
    return curve[1][place] if curve[1] else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


CELLS: Sequence[tuple[str, Callable[[Sequence[Record]], str]]] = (
    ("runs (seeds)", lambda runs: f"{len(runs)} ({', '.join(str(run.config.seed) for run in runs)})"),
    ("state", lambda runs: ", ".join(dict.fromkeys(run.state.value for run in runs))),
    ("steps", _cell(lambda run: float(run.history.last_step), lambda v: f"{v:.0f}")),
    ("pass@1 at the first evaluation", _cell(lambda run: _at(_pass_rates(run), 0), lambda v: f"{v:.3f}", spread=True)),
    ("pass@1 at the last", _cell(lambda run: _at(_pass_rates(run), -1), lambda v: f"{v:.3f}", spread=True)),
    ("reward, last twentieth", _cell(lambda run: _at(_rewards(run), -1), lambda v: f"{v:.3f}", spread=True)),
    ("publishes", _cell(lambda run: float(sum(p.version > 0 for p in run.history.publishes)), lambda v: f"{v:.0f}")),
    ("bytes published", _cell(lambda run: sum(p.bytes for p in run.history.publishes), size)),
    ("lag, mean", _cell(lambda run: _mean(_lags(run)[1]), lambda v: f"{v:.2f}", spread=True)),
    (
        "drift, mean",
        _cell(lambda run: _mean(run.history.series("drift_tv_token")[1]), lambda v: f"{v:.4f}", spread=True),
    ),
    ("ESS, mean", _cell(lambda run: _mean(run.history.series("ess")[1]), lambda v: f"{v:.3f}", spread=True)),
    ("time", _cell(lambda run: run.history.wall, duration)),
    ("verdict", lambda runs: ", ".join(dict.fromkeys(verdict(run.history.seconds).split(":")[0] for run in runs))),
    (
        "alarms",
        _cell(lambda run: float(sum(n.kind.startswith("alarm") for n in run.history.notes)), lambda v: f"{v:.0f}"),
    ),
    ("books", lambda runs: "do not balance" if any(run.imbalance for run in runs) else "balance"),
)
"""What is compared."""
