"""The GPUs of a Ray cluster: which there are, and how a run reserves those of its device plan.

Ray believes what a node was started with (`--num-gpus`), and an actor that asks for more than there is waits without a
word. So the run looks first with torch, and reserves everything that it needs at once, with a deadline.

This module imports Ray: import it only after `entry.environment` has run.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from offbeat.errors import RunError
from offbeat.placement.hardware import GIB, Hardware
from offbeat.placement.plan import DevicePlan

WAIT_SECONDS: Final = 25.0
"""How long a run waits for GPUs that the cluster has, but that something else uses."""


@ray.remote(num_cpus=0)
def _gpu_memory() -> tuple[int, str]:
    """Return the memory of this task's GPU in bytes, 0 if torch sees none, and the node's address."""
    import torch

    memory = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    return memory, ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]


def cluster_hardware() -> Hardware | None:
    """Return the GPUs of the cluster, counted as equal to the smallest; None if no node has one.

    Raises `RunError` if torch does not see a GPU that Ray has, or if none becomes free in time.
    """
    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]  # type: ignore[no-untyped-call]
    if not nodes:
        return None
    counts = [int(node["Resources"]["GPU"]) for node in nodes]
    asked: Any = _gpu_memory.options(num_gpus=1)
    waiting = asked.remote()
    try:
        memory, address = ray.get(waiting, timeout=WAIT_SECONDS)
    except GetTimeoutError:
        ray.cancel(waiting, force=True)
        raise RunError(
            f"waited {WAIT_SECONDS:g} s for a GPU of the Ray cluster: it has {sum(counts)}, and all are in use. Stop "
            "what uses them (`ray status` shows it), or start nodes with more"
        ) from None
    if not memory:
        raise RunError(
            f"Ray has {counts[0]} GPUs on node {address}, but torch sees none there: install a driver and a torch with "
            "CUDA on that node, or start it without --num-gpus"
        )
    # A node with fewer GPUs than the others limits what can be placed on each.
    return Hardware(len(nodes), min(counts), memory / GIB)


@dataclass(frozen=True)
class Reservation:
    """The GPUs of a device plan, reserved on the cluster."""

    plan: DevicePlan
    group: PlacementGroup

    @classmethod
    def make(cls, plan: DevicePlan) -> "Reservation":
        """Reserve all GPUs of the plan. Raises `RunError` if they do not become free in time."""
        ranks_per_node = Counter(node for node, _ in plan.ranks)
        bundles = [{"GPU": float(count), "CPU": float(count)} for _, count in sorted(ranks_per_node.items())]
        bundles += [{"GPU": float(len(engine.devices)), "CPU": 1.0} for engine in plan.engines]
        group = placement_group(bundles, strategy="PACK")
        try:
            ray.get(group.ready(), timeout=WAIT_SECONDS)
        except GetTimeoutError:
            remove_placement_group(group)
            wanted = sum(bundle["GPU"] for bundle in bundles)
            free = ray.available_resources().get("GPU", 0.0)  # type: ignore[no-untyped-call]
            raise RunError(
                f"waited {WAIT_SECONDS:g} s for the GPUs of this run: {wanted:g} for {len(plan.ranks)} ranks and "
                f"{len(plan.engines)} engines, of which {free:g} are free on the Ray cluster. Stop what uses the "
                "others (`ray status` shows it), or lower trainer.ranks and workers.count"
            ) from None
        return cls(plan, group)

    def for_rank(self, rank: int) -> dict[str, Any]:
        """Return the options of the actor of a rank."""
        nodes = sorted({node for node, _ in self.plan.ranks})
        return {"num_gpus": 1, "scheduling_strategy": self._bundle(nodes.index(self.plan.ranks[rank][0]))}

    def for_engine(self, number: int) -> dict[str, Any]:
        """Return the options of the actor of a worker."""
        nodes = len({node for node, _ in self.plan.ranks})
        gpus = len(self.plan.engines[number].devices)
        return {"num_gpus": gpus, "scheduling_strategy": self._bundle(nodes + number)}

    def release(self) -> None:
        remove_placement_group(self.group)

    def _bundle(self, index: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(self.group, index)
