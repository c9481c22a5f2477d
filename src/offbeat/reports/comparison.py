"""Several runs side by side. Runs that differ only in their seed are pooled, with intervals over seeds."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from statistics import fmean
from typing import Final, Generic, TypeVar

from offbeat.config import Config
from offbeat.errors import RunError
from offbeat.evaluation import Curve, Interval, difference, interval, mean_curve
from offbeat.metrics import METRICS, Reduction
from offbeat.reports.curves import TITLES, running_mean
from offbeat.reports.live import bottleneck
from offbeat.reports.plot import Plot, Series
from offbeat.reports.record import RunRecord
from offbeat.types import Json
from offbeat.words import count, duration, signed, size

Item = TypeVar("Item")


@dataclass(frozen=True)
class SeedPool(Generic[Item]):
    """Runs of one configuration."""

    name: str
    runs: Sequence[Item]


FINAL: Final = 5
"""Last evaluations or steps whose mean is the final result; half of all if there are fewer than ten."""


@dataclass(frozen=True)
class FinalResult:
    """How the final result of a run is computed, the same for all runs that are compared."""

    what: str
    unit: str
    last: int

    @classmethod
    def of(cls, runs: Sequence[RunRecord]) -> "FinalResult | None":
        """Use pass@1 if every run was evaluated after its first step, else the reward; None if a run has neither."""
        for what, unit in (("pass@1", "evaluation"), ("training reward", "step")):
            numbers = [len(cls(what, unit, FINAL)._points(run)) for run in runs]
            if min(numbers):
                return cls(what, unit, min(FINAL, max(1, min(numbers) // 2)))
        return None

    def _points(self, run: RunRecord) -> list[tuple[float, float]]:
        """Return each value with half the width of its interval, without the evaluation before the first step."""
        if self.what == "pass@1":
            steps, rates = run.history.pass_rates()
            return [(v, (high - low) / 2) for step, (v, low, high) in zip(steps, rates, strict=True) if step > 0]
        return [(value, 0.0) for value in run.history.series("reward_mean")[1]]

    def value(self, run: RunRecord) -> float:
        return fmean(value for value, _ in self._points(run)[-self.last :])

    def margin(self, run: RunRecord) -> float:
        """Half the 95 % interval over prompts; every evaluation asks the same ones, so a mean of them has no less."""
        return fmean(half for _, half in self._points(run)[-self.last :])

    def __str__(self) -> str:
        return (
            f"final = mean of the last {count(self.last, self.unit)}" if self.last > 1 else f"of the last {self.unit}"
        )


def differences(pools: Sequence[SeedPool[RunRecord]]) -> list[str]:
    """Compare every pool with the first one, a sentence for each; nothing if there is no result to compare."""
    final = FinalResult.of([run for pool in pools for run in pool.runs])
    return [] if final is None else [_statement(final, pools[0], other) for other in pools[1:]]


def _statement(final: FinalResult, base: SeedPool[RunRecord], other: SeedPool[RunRecord]) -> str:
    values, others = ([final.value(run) for run in pool.runs] for pool in (base, other))
    seeds = f"{len(others)} and {len(values)} seeds" if len(values) != len(others) else f"{len(values)} seeds each"
    if min(len(values), len(others)) > 1:
        return _sentence(final, base, other, difference(values, others), seeds)
    gap = fmean(others) - fmean(values)
    if len(values) == len(others) == 1 and final.what == "pass@1":
        half = math.hypot(final.margin(base.runs[0]), final.margin(other.runs[0]))
        over = "one run each: the interval is over prompts and says nothing about other seeds"
        return _sentence(final, base, other, Interval(gap, gap - half, gap + half, 1), over)
    runs = "one run each" if len(values) == len(others) else seeds
    return (
        f"{other.name} − {base.name} = {signed(gap, 3)} in {final.what} ({runs}; {final}). There is no interval: it "
        "needs at least two seeds of each."
    )


def _sentence(
    final: FinalResult, base: SeedPool[RunRecord], other: SeedPool[RunRecord], found: Interval, over: str
) -> str:
    mean, low, high = (signed(value, 3) for value in (found.mean, found.low, found.high))
    chance = " The interval includes 0: this may be chance." if found.low <= 0 <= found.high else ""
    return f"{other.name} − {base.name} = {mean} [{low}, {high}] in {final.what} ({over}; {final}).{chance}"


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
    [SeedPool(name='lag4', runs=[0, 1]), SeedPool(name='lag0', runs=[7])]
    """
    pools: dict[str, list[tuple[str, Item]]] = {}
    for name, config, item in named:
        pools.setdefault(_without_seed(config), []).append((name, item))
    return [SeedPool(_common_prefix([name for name, _ in runs]), [item for _, item in runs]) for runs in pools.values()]


def _without_seed(config: Config) -> str:
    return json.dumps(config.settings | {"seed": None}, sort_keys=True)


def _common_prefix(names: Sequence[str]) -> str:
    if len(set(names)) == 1:
        return names[0]
    columns = zip(*names, strict=False)
    prefix = "".join(c for c, *_ in takewhile(lambda column: len(set(column)) == 1, columns))
    return re.sub(r"[-_. ]*(seed)?[-_. ]*$", "", prefix) or names[0]


def split_name(given: str) -> tuple[str, Path]:
    """Split `name=path`; the name is empty if there is none, or if a directory has exactly this name.

    >>> [(name, path.as_posix()) for name, path in map(split_name, ("mine=runs/a", "runs/b"))]
    [('mine', 'runs/a'), ('', 'runs/b')]
    """
    name, equals, path = given.partition("=")
    return (name, Path(path)) if equals and "/" not in name and not Path(given).is_dir() else ("", Path(given))


def name_runs(paths: Sequence[Path], configs: Sequence[Config], names: Sequence[str]) -> list[str]:
    """Return a name for each run: the given ones, one for each run or one for each configuration, or the directories'.

    An empty name stands for the directory's. Raises `RunError` if the number of names does not fit, or if one name
    stands for several configurations.
    """
    keys = [_without_seed(config) for config in configs]
    kinds = list(dict.fromkeys(keys))
    if names and len(names) not in (len(paths), len(kinds)):
        raise RunError(
            f"{len(names)} names for {len(paths)} runs of {len(kinds)} configurations; give one name for each run, or "
            "one for each configuration"
        )
    if names and len(names) != len(paths):
        names = [names[kinds.index(key)] for key in keys]
    defaults = _directory_names(paths)
    chosen = [given or default for given, default in zip(names or [""] * len(paths), defaults, strict=True)]
    for name in dict.fromkeys(chosen):
        some = [config.settings for config, own in zip(configs, chosen, strict=True) if own == name]
        if different := differing_settings(some):
            raise RunError(f"the runs named {name!r} differ in {', '.join(different[:5])}; give them different names")
    return chosen


def _directory_names(paths: Sequence[Path]) -> list[str]:
    """Return the names of the directories, with their parent's where two are alike."""
    places = [path.resolve() for path in paths]
    counts = Counter(place.name for place in dict.fromkeys(places))
    return [place.name if counts[place.name] == 1 else f"{place.parent.name}/{place.name}" for place in places]


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
