"""Which runs belong together: runs that differ only in their seed make one pool, under one name."""

import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Generic, TypeVar

from offbeat.config import Config
from offbeat.errors import RunError
from offbeat.types import Json

Item = TypeVar("Item")


@dataclass(frozen=True)
class SeedPool(Generic[Item]):
    """Runs of one configuration."""

    name: str
    runs: Sequence[Item]


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
