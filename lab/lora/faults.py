"""Faults of an engine that serves adapters, for the probe to notice."""

from collections.abc import Iterator

from torch import Tensor

from offbeat.rollout.vllm_worker import WorkerPart
from offbeat.weights.adapter import B, layer_of

KINDS = ("stale id", "doubled scale", "missing layer")


class FaultyAdapters(WorkerPart):
    """A worker in which every second adapter is wrong. The kinds of faults take turns, and so do the missing layers."""

    offbeat_loads = 0
    offbeat_previous: dict[str, Tensor]

    def offbeat_weights(self, path: str, table: str) -> Iterator[tuple[str, Tensor]]:
        given = {name: tensor.clone() for name, tensor in super().offbeat_weights(path, table)}
        self.offbeat_loads += 1
        number = self.offbeat_loads // 2 - 1
        if self.offbeat_loads % 2:
            self.offbeat_previous = given
            yield from given.items()
            return
        kind = KINDS[number % len(KINDS)]
        layers = sorted({layer_of(name) for name in given})
        missing = layers[number // len(KINDS) % len(layers)]
        for name, tensor in given.items():
            if kind == "stale id":
                yield name, self.offbeat_previous[name]
            elif kind == "doubled scale":
                yield name, tensor * 2 if name.endswith(B) else tensor
            else:  # vLLM computes with zeros where an adapter has no tensors
                yield name, tensor * 0 if layer_of(name) == missing else tensor
