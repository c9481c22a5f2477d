"""Several runs side by side. Runs that differ only in their seed are pooled, with intervals over seeds."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from offbeat.metrics import METRICS, Reduction
from offbeat.reports.curves import TITLES, running_mean
from offbeat.reports.differences import differences
from offbeat.reports.intervals import Curve, interval, mean_curve
from offbeat.reports.live import bottleneck
from offbeat.reports.plot import Plot, Series
from offbeat.reports.pools import SeedPool, differing_settings, pool_seeds
from offbeat.reports.record import RunRecord
from offbeat.types import Json
from offbeat.words import duration, size

MAX_NAMED: Final = 4
"""Configurations that fit in the conclusion."""


@dataclass(frozen=True)
class Comparison:
    """The comparison section of a report, one column per pool."""

    conclusion: str
    names: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    """The name of a quantity, and one cell per pool."""
    differences: Sequence[str]
    """A sentence for each pool after the first: how much better it is, with the interval."""
    settings: Sequence[tuple[str, Sequence[Json]]]
    """Settings that are not the same in all pools."""
    plots: Sequence[Plot]


def compare(runs: Sequence[RunRecord]) -> Comparison:
    pools = pool_seeds([(run.name, run.config, run) for run in runs])
    configs = [pool.runs[0].config.settings for pool in pools]
    return Comparison(
        _conclusion(pools),
        [pool.name for pool in pools],
        [(name, [cell(pool.runs) for pool in pools]) for name, cell in CELLS],
        differences(pools),
        [(key, [config.get(key) for config in configs]) for key in differing_settings(configs)],
        list(_plots(pools)),
    )


def _plots(pools: Sequence[SeedPool[RunRecord]]) -> Iterator[Plot]:
    note = "Means over seeds with 95 % t intervals; of two seeds, their range. A line without a band is one run."
    if all(len(pool.runs) == 1 for pool in pools):
        note = "One run each. The bands are 95 % intervals over prompts, not over seeds."
    yield Plot("pass@1", _rate_lines(pools), note=note, y_range=(0, 1))
    smooth = "Running mean over 5 % of the run."
    yield Plot("Training reward", _lines(pools, _smooth("reward_mean")), note=smooth)
    for metric, title in TITLES.items():
        most = 1.0 if METRICS[metric].reduction is Reduction.SHARE else math.inf
        yield Plot(title, _lines(pools, _smooth(metric), most), note=smooth)
    known = all(run.history.series("reference_kl")[0] for pool in pools for run in pool.runs)
    metric, policy = ("reference_kl", "reference") if known else ("drift_kl_token", "behavior")
    kl = f"KL divergence per token between policy and {policy} policy. {smooth}"
    yield Plot("KL", _lines(pools, _smooth(metric)), note=kl)
    yield Plot("Lag", _lines(pools, lambda run: run.history.mean_lags()), note="Mean of each batch.")
    drift = "Total variation per token from behavior to proximal policy, mean of each batch."
    yield Plot("Drift", _lines(pools, lambda run: run.history.series("drift_tv_token")), note=drift)


def _conclusion(pools: Sequence[SeedPool[RunRecord]]) -> str:
    runs = sum(len(pool.runs) for pool in pools)
    begin = f"{runs} runs of {len(pools)} configurations" if len(pools) > 1 else f"{runs} seeds of one configuration"
    finals = [
        (interval(values), pool.name)
        for pool in pools
        if (values := [rates[-1] for run in pool.runs if (rates := _pass_rates(run)[1])])
    ]
    if not finals:
        return f"{begin} without evaluations."
    if len(finals) > MAX_NAMED:
        low, high = (pick(finals, key=lambda final: final[0].mean) for pick in (min, max))
        return f"{begin}; last pass@1 from {low[0]} ({low[1]}) to {high[0]} ({high[1]})."
    return f"{begin}; last pass@1: " + ", ".join(f"{name} {final}" for final, name in finals) + "."


def _lines(
    pools: Sequence[SeedPool[RunRecord]], curve: Callable[[RunRecord], Curve], most: float = math.inf
) -> list[Series]:
    """Return the mean curve of each pool with a band over its seeds; no band is above `most`."""
    lines = []
    for color, pool in enumerate(pools):
        steps, means = mean_curve(curve(run) for run in pool.runs)
        banded = means if len(pool.runs) > 1 else []
        low, high = [one.low for one in banded], [min(one.high, most) for one in banded]
        lines.append(Series(pool.name, steps, [one.mean for one in means], low, high, color=color))
    return lines


def _rate_lines(pools: Sequence[SeedPool[RunRecord]]) -> list[Series]:
    """Return the curves of pass@1: with bands over seeds, or over prompts if every pool is one run."""
    lines = _lines(pools, _pass_rates)
    if any(len(pool.runs) > 1 for pool in pools):
        return lines
    rates = [pool.runs[0].history.pass_rates()[1] for pool in pools]
    return [
        replace(line, low=[low for _, low, _ in some], high=[high for _, _, high in some])
        for line, some in zip(lines, rates, strict=True)
    ]


def _pass_rates(run: RunRecord) -> Curve:
    steps, rates = run.history.pass_rates()
    return steps, [value for value, _, _ in rates]


def _smooth(metric: str) -> Callable[[RunRecord], Curve]:
    def curve(run: RunRecord) -> Curve:
        steps, values = run.history.series(metric)
        return steps, running_mean(values)

    return curve


def _cell(
    value_of: Callable[[RunRecord], float | None], show: str | Callable[[float], str], *, spread: bool = False
) -> Callable[[Sequence[RunRecord]], str]:
    """Return a function that shows the mean over seeds, with its interval if `spread`; unknown if no run has a value.

    `show` is a format or a function.
    """

    def shown(value: float) -> str:
        return format(value, show) if isinstance(show, str) else show(value)

    def cell(runs: Sequence[RunRecord]) -> str:
        values = [value for run in runs if (value := value_of(run)) is not None]
        if not values:
            return "unknown"
        found = interval(values)
        return shown(found.mean) + (f" ± {shown(found.high - found.mean)}" if spread and found.n > 1 else "")

    return cell


def _at(curve: Curve, index: int) -> float | None:
    return curve[1][index] if curve[1] else None


def _mean(curve: Curve) -> float | None:
    return sum(curve[1]) / len(curve[1]) if curve[1] else None


CELLS: Sequence[tuple[str, Callable[[Sequence[RunRecord]], str]]] = (
    ("runs (seeds)", lambda runs: f"{len(runs)} ({', '.join(str(run.config.seed) for run in runs)})"),
    ("state", lambda runs: ", ".join(dict.fromkeys(run.state.value for run in runs))),
    ("steps", _cell(lambda run: run.history.last_step, ".0f")),
    ("pass@1, first evaluation", _cell(lambda run: _at(_pass_rates(run), 0), ".3f", spread=True)),
    ("pass@1, last evaluation", _cell(lambda run: _at(_pass_rates(run), -1), ".3f", spread=True)),
    ("reward, last 5 % of steps", _cell(lambda run: _at(_smooth("reward_mean")(run), -1), ".3f", spread=True)),
    ("publishes", _cell(lambda run: len(run.history.updates), ".0f")),
    ("bytes published", _cell(lambda run: sum(p.bytes for p in run.history.publishes), size)),
    ("mean lag", _cell(lambda run: _mean(run.history.mean_lags()), ".2f", spread=True)),
    ("mean drift", _cell(lambda run: _mean(run.history.series("drift_tv_token")), ".4f", spread=True)),
    ("mean ESS", _cell(lambda run: _mean(run.history.series("ess")), ".3f", spread=True)),
    ("time", _cell(lambda run: run.history.wall, duration)),
    (
        "bottleneck",
        lambda runs: ", ".join(dict.fromkeys(bottleneck(run.history.seconds).split(":")[0] for run in runs)),
    ),
    ("alarms", _cell(lambda run: run.history.alarms, ".0f")),
    ("ledger", lambda runs: "does not balance" if any(run.imbalance for run in runs) else "balances"),
)
"""The rows of the comparison table: the name of a quantity, and how to show it for the runs of a pool."""
