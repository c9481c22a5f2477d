"""Compare several runs. Runs that differ only in their seed are pooled, with intervals over seeds."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Generic, TypeVar

from offbeat.config import Config
from offbeat.reports.live import bottleneck
from offbeat.reports.panels import running_mean
from offbeat.reports.plot import Plot, Series
from offbeat.reports.record import RunRecord
from offbeat.reports.words import duration, size
from offbeat.types import Json

_T95: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for a two-sided 95 % interval, from 1 degree of freedom on."""
MAX_NAMED: Final = 4
"""Configurations that fit in the conclusion."""
Item = TypeVar("Item")
Curve = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True)
class Interval:
    """A mean over seeds with its 95 % interval. With one seed, both ends are the mean."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.n == 1 else f"{self.mean:.3f} ± {self.high - self.mean:.3f}"


def interval(values: Sequence[float]) -> Interval:
    """Return the mean and its 95 % t interval.

    >>> str(interval([0.9, 0.94, 0.95])), str(interval([0.9]))
    ('0.930 ± 0.066', '0.900')
    """
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return Interval(mean, mean, mean, n)
    factor = _T95[n - 2] if n - 2 < len(_T95) else 1.96
    half = factor * statistics.stdev(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def mean_curve(curves: Iterable[Curve]) -> tuple[list[float], list[Interval]]:
    """Return the mean at every x that at least one curve has.

    >>> steps, means = mean_curve([([1, 2], [0.0, 1.0]), ([1], [0.5])])
    >>> steps, [(one.mean, one.n) for one in means]
    ([1, 2], [(0.25, 2), (1.0, 1)])
    """
    at: dict[float, list[float]] = {}
    for xs, ys in curves:
        for x, y in zip(xs, ys, strict=True):
            at.setdefault(x, []).append(y)
    steps = sorted(at)
    return steps, [interval(at[x]) for x in steps]


@dataclass(frozen=True)
class SeedPool(Generic[Item]):
    """Runs of one configuration."""

    name: str
    runs: Sequence[Item]


def flatten(config: Config) -> dict[str, Json]:
    """Return every setting by its full name, for example `sync.every`."""
    found: dict[str, Json] = {}
    for key, value in config.model_dump(mode="json").items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            found[key] = value
    return found


def differing_settings(configs: Sequence[Mapping[str, Json]]) -> list[str]:
    """Return the settings, except the seed, that are not the same in all configurations.

    >>> differing_settings([{"seed": 0, "steps": 9, "group_size": 8}, {"seed": 1, "steps": 5, "group_size": 8}])
    ['steps']
    """
    return [key for key in configs[0] if key != "seed" and len({json.dumps(one.get(key)) for one in configs}) > 1]


def pool_seeds(named: Sequence[tuple[str, Config, Item]]) -> list[SeedPool[Item]]:
    """Group runs by configuration, in the order given. The name of a pool is the common prefix of its runs' names.

    >>> from offbeat.config import parse
    >>> runs = [(f"lag4-seed{s}", parse({"seed": s, "sync": {"every": 5}}), s) for s in (0, 1)]
    >>> pool_seeds([*runs, ("lag0", parse({}), 7)])
    [SeedPool(name='lag4-seed', runs=[0, 1]), SeedPool(name='lag0', runs=[7])]
    """
    pools: dict[str, list[tuple[str, Item]]] = {}
    for name, config, item in named:
        key = json.dumps(flatten(config) | {"seed": None}, sort_keys=True)
        pools.setdefault(key, []).append((name, item))
    return [SeedPool(_common_prefix([name for name, _ in runs]), [item for _, item in runs]) for runs in pools.values()]


def _common_prefix(names: Sequence[str]) -> str:
    columns = zip(*names, strict=False)
    prefix = "".join(c for c, *_ in takewhile(lambda column: len(set(column)) == 1, columns))
    return prefix.rstrip("-_. ") or names[0]


@dataclass(frozen=True)
class Comparison:
    """The comparison section of a report, one column per pool."""

    conclusion: str
    names: Sequence[str]
    rows: Sequence[tuple[str, Sequence[str]]]
    """The name of a quantity, and one cell per pool."""
    differences: Sequence[tuple[str, Sequence[Json]]]
    """Settings that are not the same in all pools."""
    plots: Sequence[Plot]


def compare(runs: Sequence[RunRecord]) -> Comparison:
    pools = pool_seeds([(run.name, run.config, run) for run in runs])
    configs = [flatten(pool.runs[0].config) for pool in pools]
    note = "Means over seeds with 95 % t intervals. A line without a band is one run."
    if all(len(pool.runs) == 1 for pool in pools):
        note = "One run each. The section of each run shows the intervals over prompts."
    return Comparison(
        _conclusion(pools),
        [pool.name for pool in pools],
        [(name, [cell(pool.runs) for pool in pools]) for name, cell in CELLS],
        [(key, [config[key] for config in configs]) for key in differing_settings(configs)],
        [
            Plot("pass@1", _lines(pools, _pass_rates), note=note, y_range=(0, 1)),
            Plot("Training reward", _lines(pools, _rewards), note="Running mean over 5 % of the run."),
            Plot("Lag", _lines(pools, lambda run: run.history.mean_lags()), note="Mean of each batch."),
            Plot(
                "Drift",
                _lines(pools, lambda run: run.history.series("drift_tv_token")),
                note="Total variation per token from behavior to proximal policy, mean of each batch.",
            ),
        ],
    )


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
        return f"{begin}; final pass@1 from {low[0]} ({low[1]}) to {high[0]} ({high[1]})."
    return f"{begin}; final pass@1: " + ", ".join(f"{name} {final}" for final, name in finals) + "."


def _lines(pools: Sequence[SeedPool[RunRecord]], curve: Callable[[RunRecord], Curve]) -> list[Series]:
    lines = []
    for color, pool in enumerate(pools):
        steps, means = mean_curve(curve(run) for run in pool.runs)
        banded = means if len(pool.runs) > 1 else []
        low, high = [one.low for one in banded], [one.high for one in banded]
        lines.append(Series(pool.name, steps, [one.mean for one in means], low, high, color=color))
    return lines


def _pass_rates(run: RunRecord) -> Curve:
    steps, rates = run.history.pass_rates()
    return steps, [value for value, _, _ in rates]


def _rewards(run: RunRecord) -> Curve:
    steps, values = run.history.series("reward_mean")
    return steps, running_mean(values)


def _cell(
    value_of: Callable[[RunRecord], float | None], show: str | Callable[[float], str], *, spread: bool = False
) -> Callable[[Sequence[RunRecord]], str]:
    """Return a function that shows the mean over seeds, with its interval if `spread`; – if no run has a value.

    `show` is a format or a function.
    """

    def shown(value: float) -> str:
        return format(value, show) if isinstance(show, str) else show(value)

    def cell(runs: Sequence[RunRecord]) -> str:
        values = [value for run in runs if (value := value_of(run)) is not None]
        if not values:
            return "–"
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
    ("reward, last 5 % of steps", _cell(lambda run: _at(_rewards(run), -1), ".3f", spread=True)),
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
