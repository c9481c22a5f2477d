"""Several runs beside each other, seeds pooled."""

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Generic, TypeVar

from offbeat.config import Config
from offbeat.report.live import verdict
from offbeat.report.panels import running_mean
from offbeat.report.plot import Plot, Series
from offbeat.report.record import RunRecord
from offbeat.report.words import duration, size
from offbeat.types import Json

_T95: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131)
"""Student's t for a two-sided 95 % interval, by degrees of freedom from 1 on."""
Item = TypeVar("Item")


@dataclass(frozen=True)
class Interval:
    """A mean over seeds; its ends are the mean itself where there is one seed."""

    mean: float
    low: float
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" if self.n == 1 else f"{self.mean:.3f} ± {self.high - self.mean:.3f}"


def interval(values: Sequence[float]) -> Interval:
    """Mean and 95 % t interval.

    >>> str(interval([0.9, 0.94, 0.95])), str(interval([0.9]))
    ('0.930 ± 0.066', '0.900')
    """
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return Interval(mean, mean, mean, n)
    factor = _T95[n - 2] if n - 2 < len(_T95) else 1.96
    half = factor * statistics.stdev(values) / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def mean_curve(curves: Iterable[tuple[Sequence[float], Sequence[float]]]) -> tuple[list[float], list[Interval]]:
    """Of several (x, y), at every x that any of them has.

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
class Pool(Generic[Item]):
    """Runs of one configuration."""

    name: str
    runs: Sequence[Item]


def flat(config: Config) -> dict[str, Json]:
    """Every knob by its name in the file.

    >>> from offbeat.config import parse
    >>> flat(parse({"sync": {"every": 4}}))["sync.every"]
    4
    """
    found: dict[str, Json] = {}
    for key, value in config.model_dump(mode="json").items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": inner for name, inner in value.items()}
        else:
            found[key] = value
    return found


def differing(configs: Sequence[Mapping[str, Json]]) -> list[str]:
    """Knobs that are not the same in all, the seed left out.

    >>> differing([{"seed": 0, "steps": 9, "group_size": 8}, {"seed": 1, "steps": 5, "group_size": 8}])
    ['steps']
    """
    return [key for key in configs[0] if key != "seed" and len({json.dumps(one.get(key)) for one in configs}) > 1]


def pooled(named: Sequence[tuple[str, Config, Item]]) -> list[Pool[Item]]:
    """Runs gathered by configuration, in the order given; a pool is called by what its names begin with.

    >>> from offbeat.config import parse
    >>> runs = [(f"lag4-seed{s}", parse({"seed": s, "sync": {"every": 5}}), s) for s in (0, 1)]
    >>> pooled([*runs, ("lag0", parse({}), 7)])
    [Pool(name='lag4-seed', runs=[0, 1]), Pool(name='lag0', runs=[7])]
    """
    gathered: dict[str, list[tuple[str, Item]]] = {}
    for name, config, item in named:
        same = json.dumps(flat(config) | {"seed": None}, sort_keys=True)
        gathered.setdefault(same, []).append((name, item))
    return [Pool(_called([name for name, _ in runs]), [item for _, item in runs]) for runs in gathered.values()]


def _called(names: Sequence[str]) -> str:
    alike = zip(*names, strict=False)
    return "".join(c for c, *_ in takewhile(lambda column: len(set(column)) == 1, alike)).rstrip("-_. ") or names[0]


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


def compare(pools: Sequence[Pool[RunRecord]]) -> Comparison:
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


def _conclusion(pools: Sequence[Pool[RunRecord]]) -> str:
    runs = sum(len(pool.runs) for pool in pools)
    ends = [(interval(values), pool.name) for pool in pools if (values := _final(pool.runs))]
    begin = f"{runs} runs of {len(pools)} configurations" if len(pools) > 1 else f"{runs} seeds of one configuration"
    if not ends:
        return f"{begin}, none of them with evaluations."
    if len(ends) > MOST_NAMED:
        ends = [max(ends, key=lambda end: end[0].mean), min(ends, key=lambda end: end[0].mean)]
        return f"{begin}; last pass@1 from {ends[1][0]} ({ends[1][1]}) to {ends[0][0]} ({ends[0][1]})."
    return f"{begin}; last pass@1: " + ", ".join(f"{name} {end}" for end, name in ends) + "."


def _over_seeds(pools: Sequence[Pool[RunRecord]]) -> str:
    if all(len(pool.runs) == 1 for pool in pools):
        return "One run each: the intervals over prompts are in the runs' own sections."
    return "Means over seeds with 95 % t intervals; a line without a band is one run."


def _lines(pools: Sequence[Pool[RunRecord]], curve: Callable[[RunRecord], Curve]) -> list[Series]:
    lines = []
    for colour, pool in enumerate(pools):
        steps, means = mean_curve(curve(run) for run in pool.runs)
        banded = means if len(pool.runs) > 1 else []
        low, high = [one.low for one in banded], [one.high for one in banded]
        lines.append(Series(pool.name, steps, [one.mean for one in means], low, high, colour=colour))
    return lines


def _pass_rates(run: RunRecord) -> Curve:
    found = [(one.step, one.estimates["pass@1"][0]) for one in run.history.evaluations if "pass@1" in one.estimates]
    return [float(step) for step, _ in found], [value for _, value in found]


def _rewards(run: RunRecord) -> Curve:
    steps, values = run.history.series("reward_mean")
    return steps, running_mean(values, max(1, len(values) // 20))


def _lags(run: RunRecord) -> Curve:
    found = [(float(one.step), sum(one.lags) / len(one.lags)) for one in run.history.steps if one.lags]
    return [step for step, _ in found], [lag for _, lag in found]


def _final(runs: Sequence[RunRecord]) -> list[float]:
    return [values[-1] for run in runs if (values := _pass_rates(run)[1])]


def _cell(
    of: Callable[[RunRecord], float | None], show: Callable[[float], str], *, spread: bool = False
) -> Callable[[Sequence[RunRecord]], str]:
    """A mean over seeds, with its interval where the figure is an estimate; – where no run can tell."""

    def cell(runs: Sequence[RunRecord]) -> str:
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


CELLS: Sequence[tuple[str, Callable[[Sequence[RunRecord]], str]]] = (
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
