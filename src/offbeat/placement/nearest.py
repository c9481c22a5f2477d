"""`plan_devices`: a device plan, or an error that names the nearest thing that fits. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

from offbeat.config import Config
from offbeat.errors import CannotPlace
from offbeat.placement.hardware import Hardware
from offbeat.placement.plan import DevicePlan, engine_count, place
from offbeat.placement.shape import ModelShape

MEMORY_SIZES: Final = (16, 24, 32, 40, 48, 80, 96, 141, 192)
"""Memory of GPUs that people have, in GiB."""
SMALL: Final = (1, 2, 4, 8)
MARGIN: Final = 0.97
MOST_NODES: Final = 128


@dataclass(frozen=True)
class Nearest:
    """A change of settings, of hardware or of both that makes a plan possible."""

    settings: Mapping[str, Any]
    hardware: Hardware | None
    """None if the same hardware does."""

    def __str__(self) -> str:
        """
        >>> print(Nearest({"trainer.checkpoint_activations": True}, Hardware(1, 2, 80)))
        use 2x80 and set trainer.checkpoint_activations = true
        """
        values = [f"{key} = {_toml(value)}" for key, value in self.settings.items()]
        parts = [f"use {self.hardware}"] if self.hardware else []
        parts += [f"set {', '.join(values)}"] if values else []
        return " and ".join(parts)


def plan_devices(config: Config, shape: ModelShape, hardware: Hardware) -> DevicePlan:
    """Place the run on the hardware. Raises `CannotPlace` with the reason and the nearest thing that fits."""
    found = place(config, shape, hardware)
    if isinstance(found, DevicePlan):
        return found
    nearest = find_nearest(config, shape, hardware)
    advice = (
        f"nearest that fits: {nearest}" if nearest else f"nothing up to {MOST_NODES} nodes of 8x192 holds this model"
    )
    raise CannotPlace(f"GPUs {hardware}: {found}; {advice}", nearest)


def find_nearest(config: Config, shape: ModelShape, hardware: Hardware) -> Nearest | None:
    """Return the smallest change that fits: first of settings on this hardware, then of hardware."""
    if isinstance(place(config, shape, hardware), DevicePlan):
        return Nearest({}, None)
    for other in [hardware, *_larger(hardware)]:
        # A card reports a little less than it is sold with; advice must hold there too.
        real = replace(other, memory_gib=MARGIN * other.memory_gib)
        for settings in _changes(config, shape, other):
            if isinstance(place(changed(config, settings), shape, real), DevicePlan):
                return Nearest(settings, None if other == hardware else other)
    return None


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the configuration with other values, for instance {"trainer.ranks": 8}."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in settings.items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    )


def _larger(hardware: Hardware) -> Iterator[Hardware]:
    """Yield larger machines: with more memory or more GPUs in each node, or more nodes; those with the fewest first."""
    sizes = [hardware.memory_gib, *(size for size in MEMORY_SIZES if size > hardware.memory_gib)]
    counts = [hardware.gpus, *(count for count in SMALL if count > hardware.gpus)]
    nodes = [hardware.nodes * factor for factor in ((1, 2, 4) if counts[-1] >= 8 else (1,))]
    found = [Hardware(n, count, size) for n in nodes for count in counts for size in sizes if n == hardware.nodes
             or count == counts[-1]]  # fmt: skip
    yield from sorted(found[1:], key=lambda one: (one.total * one.memory_gib, one))
    more = 8 * hardware.nodes
    while more <= MOST_NODES:
        yield Hardware(more, max(8, hardware.gpus), max(hardware.memory_gib, 80))
        more *= 2
    yield Hardware(MOST_NODES, max(8, hardware.gpus), max(hardware.memory_gib, MEMORY_SIZES[-1]))


def _changes(config: Config, shape: ModelShape, hardware: Hardware) -> list[dict[str, Any]]:
    """Return sets of changed settings, those with the fewest changes first."""
    per_node, total = hardware.gpus, hardware.total
    whole_nodes = {per_node * nodes for nodes in range(1, hardware.nodes + 1)}
    ranks = {config.trainer.ranks, *(n for n in SMALL if n <= per_node), *sorted(whole_nodes)[:8], max(whole_nodes)}
    budget, count = config.trainer.token_budget, engine_count(config)
    budgets = {budget, max(budget // 2, _least_budget(config, shape)), _least_budget(config, shape)}
    engines = {count, max(1, count // 2), 1} if count else {config.workers.count}
    options: dict[str, set[Any]] = {
        "trainer.checkpoint_activations": {config.trainer.checkpoint_activations, True},
        "trainer.token_budget": {one for one in budgets if one <= budget},
        "trainer.ranks": {n for n in ranks if n <= total},
        "workers.count": engines,
        "engine.tensor_parallel": {config.engine.tensor_parallel, *(n for n in SMALL if n <= per_node)},
        "run.place": {config.run.place, "ray", "local"},
        "run.mode": {config.run.mode, "lockstep"} if config.run.mode == "concurrent" else {config.run.mode},
    }
    found = []
    for values in product(*options.values()):
        settings = {key: value for key, value in zip(options, values, strict=True) if value != _value(config, key)}
        if changed(config, settings).trainer.ranks == 1 or settings.get("run.place", config.run.place) == "ray":
            found.append(settings)
    return sorted(found, key=lambda one: (len(one), _cost(config, one)))


def _cost(config: Config, settings: Mapping[str, Any]) -> float:
    """Order changes of equal number: those that only cost time first, then by how far a number moves."""
    order = {"trainer.checkpoint_activations": 0.0, "trainer.token_budget": 1.0, "run.mode": 2.0, "run.place": 2.5}
    cost = 0.0
    for key, value in settings.items():
        far = 0.0 if isinstance(value, bool | str) else abs(value - _value(config, key)) / (1 + _value(config, key))
        cost += order.get(key, 3.0) + far
    return cost


def _least_budget(config: Config, shape: ModelShape) -> int:
    """Return the smallest token budget that holds the longest prompt with its completion."""
    return min(config.engine.max_prompt_tokens + config.sampling.max_tokens, shape.context)


def _value(config: Config, key: str) -> Any:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
