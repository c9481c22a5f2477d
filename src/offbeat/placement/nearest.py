"""`plan_devices`: a device plan, or an error that names the nearest thing that fits. No torch."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
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
    for other in [hardware, *_larger(hardware)]:
        for settings in _changes(config, shape, other):
            if isinstance(place(changed(config, settings), shape, other), DevicePlan):
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
    """Yield larger machines: more GPUs in the node, then more memory, then more nodes."""
    sizes = [size for size in MEMORY_SIZES if size > hardware.memory_gib]
    counts = [count for count in SMALL if count > hardware.gpus]
    for memory in [hardware.memory_gib, *sizes]:
        for gpus in [hardware.gpus, *counts]:
            if (gpus, memory) != (hardware.gpus, hardware.memory_gib):
                yield Hardware(hardware.nodes, gpus, memory)
    nodes = 2 * hardware.nodes
    while nodes <= MOST_NODES:
        yield Hardware(nodes, max(8, hardware.gpus), max(hardware.memory_gib, 80))
        nodes *= 2
    yield Hardware(MOST_NODES, max(8, hardware.gpus), max(hardware.memory_gib, MEMORY_SIZES[-1]))


def _changes(config: Config, shape: ModelShape, hardware: Hardware) -> list[dict[str, Any]]:
    """Return sets of changed settings, those with the fewest changes first."""
    per_node, total = hardware.gpus, hardware.total
    whole_nodes = {per_node * nodes for nodes in range(1, hardware.nodes + 1)}
    ranks = {config.trainer.ranks, *(n for n in SMALL if n <= per_node), *sorted(whole_nodes)[:8], max(whole_nodes)}
    budgets = {config.trainer.token_budget, _least_budget(config, shape)}
    engines = {engine_count(config), 1} if engine_count(config) else {config.workers.count}
    options: dict[str, set[Any]] = {
        "trainer.checkpoint_activations": {config.trainer.checkpoint_activations, True},
        "trainer.token_budget": {budget for budget in budgets if budget <= config.trainer.token_budget},
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
        cost += order[key] if key in order else 3.0 + abs(value - _value(config, key)) / 1000
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
