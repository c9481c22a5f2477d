"""Runs that differ in nothing but their seed, taken together: means with intervals over seeds."""

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final, Generic, TypeVar

from offbeat.config import Config
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
