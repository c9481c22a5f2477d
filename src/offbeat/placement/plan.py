"""The device plan: which GPU holds which rank and which engine, and how much memory each of them gets. No torch.

    plan = plan_devices(config, shape, Hardware.parse("8x80"))   # or CannotPlace, with the nearest thing that fits
    print(plan)

Ranks come first, on as few nodes as possible; engines take the other GPUs, each within one node. If there is only one
GPU, trainer and engine share it. In lockstep mode they never work at the same time, so each can have most of the memory
in its turn: the engine sleeps while the trainer works.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from offbeat.config import Config
from offbeat.placement.hardware import GIB, Hardware
from offbeat.placement.memory import (
    CONTEXT_BYTES,
    USABLE,
    EngineMemory,
    RankMemory,
    engine_memory,
    rank_memory,
)
from offbeat.placement.shape import ModelShape
from offbeat.words import count, memory_size

ENGINE_SHARE: Final = 0.9
"""Share of a GPU that an engine takes if it has the GPU for itself."""
ASLEEP_BYTES: Final = GIB
"""What a sleeping engine keeps on the GPU: its context and CUDA graphs."""


@dataclass(frozen=True)
class EnginePlace:
    """Where one engine runs."""

    node: int
    devices: tuple[int, ...]
    """Indices of its GPUs on the node."""
    share: float
    """The share of each GPU's memory that the engine takes: vLLM's `gpu_memory_utilization`."""
    sleeps: bool = False
    """True if it takes turns with the trainer on the same GPU."""


@dataclass(frozen=True)
class DevicePlan:
    """A placement in which everything fits."""

    hardware: Hardware
    ranks: tuple[tuple[int, int], ...]
    """Node and GPU of each rank."""
    engines: tuple[EnginePlace, ...]
    replicas: int
    """Groups of ranks that each hold the whole model in slices."""
    reduce_once: bool
    """True if gradients are summed over ranks once per update, not after every micro-batch."""
    offloads: bool
    """True if master weights, AdamW's moments and frozen weights wait in host memory while the engine has its turn."""
    rank: RankMemory
    engine: EngineMemory | None

    @property
    def shards(self) -> int:
        """Ranks among which the model is sliced."""
        return len(self.ranks) // self.replicas

    @property
    def shared(self) -> bool:
        """True if the trainer and an engine are on the same GPU."""
        return any((one.node, device) in self.ranks for one in self.engines for device in one.devices)

    def used(self) -> Iterator[tuple[tuple[int, int], int]]:
        """Yield the largest number of bytes that each GPU in use holds at one time."""
        total = int(self.hardware.memory_gib * GIB)
        trainer = self.rank.peak + CONTEXT_BYTES
        for one in self.engines:
            for device in one.devices:
                place, engine = (one.node, device), int(one.share * total)
                if place not in self.ranks:
                    yield place, engine
                elif one.sleeps:
                    waiting = self.rank.between_steps - (self.rank.movable if self.offloads else 0) + CONTEXT_BYTES
                    yield place, max(trainer + ASLEEP_BYTES, engine + waiting)
                else:
                    yield place, trainer + engine
        taken = {(one.node, device) for one in self.engines for device in one.devices}
        yield from ((place, trainer) for place in self.ranks if place not in taken)

    def __str__(self) -> str:
        lines = [f"{self.hardware}: {count(len(self.ranks), 'rank')} of the trainer, {self._engines()}"]
        for node in range(self.hardware.nodes):
            users = [self._user_of(node, gpu) for gpu in range(self.hardware.gpus)]
            lines += [f"  node {node} GPU {gpu}: {user}" for gpu, user in enumerate(users) if user]
            lines += [f"  node {node}: {users.count('')} of {len(users)} GPUs free"] if "" in users else []
        lines.append(f"  a rank needs {memory_size(self.rank.peak)}; its largest parts: {_largest(self.rank)}")
        if len(self.ranks) > 1:
            each = "once per update" if self.reduce_once else "after every micro-batch"
            across = f", copies on {self.replicas} nodes" if self.replicas > 1 else ""
            lines.append(f"  weights sliced over {self.shards} ranks{across}; gradients summed {each}")
        if self.engine is not None:
            held = (
                int(self.engines[0].share * self.hardware.memory_gib * GIB)
                - self.engine.weights
                - self.engine.workspace
            )
            room = min(held // self.engine.per_sequence, self.engine.sequences)
            lines.append(
                f"  an engine takes {self.engines[0].share:.2f} of each GPU: weights "
                f"{memory_size(self.engine.weights)}, keys and values of {room} of {self.engine.sequences} "
                "sequences at their greatest length"
            )
        if self.engines and self.engines[0].sleeps:
            weights = "weights" if "frozen weights" in self.rank.held else "master weights"
            moved = f"; {weights} and AdamW wait in host memory meanwhile" if self.offloads else ""
            lines.append(f"  they take turns: the engine sleeps while the trainer works{moved}")
        return "\n".join(lines)

    def _engines(self) -> str:
        if not self.engines:
            return "no engine"
        size = len(self.engines[0].devices)
        each = f" of {size} GPUs" if size > 1 else ""
        where = ", on the same GPU" if self.shared else ""
        return f"{count(len(self.engines), 'engine')}{each}{where}"

    def _user_of(self, node: int, gpu: int) -> str:
        users = [f"rank {i}" for i, place in enumerate(self.ranks) if place == (node, gpu)]
        users += [f"engine {i}" for i, one in enumerate(self.engines) if one.node == node and gpu in one.devices]
        return " and ".join(users)


def place(config: Config, shape: ModelShape, hardware: Hardware) -> DevicePlan | str:
    """Return a plan, or the reason why there is none."""
    split, count = config.engine.tensor_parallel, engine_count(config)
    if count and (reason := cannot_split(shape, split)):
        return reason
    usable = Hardware(1, hardware.gpus, hardware.memory_gib) if config.run.place == "local" else hardware
    ranks = config.trainer.ranks
    places = [(i // usable.gpus, i % usable.gpus) for i in range(ranks)]
    if ranks > usable.gpus and ranks % usable.gpus and ranks <= usable.total:
        return (
            f"trainer.ranks = {ranks} are not whole nodes of {usable.gpus} GPUs: ranks of several nodes must fill them"
        )
    if ranks > usable.total:
        return f"trainer.ranks = {ranks}, but {_there_are(usable.total)}"
    free = [(node, gpu) for node in range(usable.nodes) for gpu in range(usable.gpus) if (node, gpu) not in places]
    engines = _take_gpus(free, count, split)
    if engines is None:
        if (ranks, count, split, usable.total) == (1, 1, 1, 1) and config.run.place == "local":
            return _share_one_gpu(config, shape, hardware)
        return _too_few(config, usable, ranks, count, split)
    rank = _fit_ranks(config, shape, usable)
    if isinstance(rank, str):
        return rank
    memory, replicas, once = rank
    engine = engine_memory(config, shape) if count else None
    share = config.engine.gpu_memory_utilization or ENGINE_SHARE
    if engine is not None and engine.least > share * usable.memory_gib * GIB:
        return (
            f"an engine needs at least {memory_size(engine.least)} on each of its {split} GPUs (weights "
            f"{memory_size(engine.weights)}, keys and values of one sequence {memory_size(engine.per_sequence)}), but "
            f"engine.gpu_memory_utilization gives it {share:.2f} of {usable.memory_gib:g} GiB"
        )
    spots = tuple(EnginePlace(node, devices, share) for node, devices in engines)
    return DevicePlan(hardware, tuple(places), spots, replicas, once, False, memory, engine)


def engine_count(config: Config) -> int:
    """Return the number of engines that the run starts itself."""
    return 0 if config.run.mode == "offline" else config.workers.count


def cannot_split(shape: ModelShape, split: int) -> str:
    """Return why an engine cannot be split over so many GPUs; empty if it can."""
    if split in shape.legal_splits:
        return ""
    nearest = min(shape.legal_splits, key=lambda size: (abs(size - split), size))
    return (
        f"engine.tensor_parallel = {split}: {shape.heads} heads, {shape.kv_heads} key-value heads and an inner width "
        f"of {shape.inner} do not split into {split} equal parts; set engine.tensor_parallel = {nearest}"
    )


def _take_gpus(free: Sequence[tuple[int, int]], count: int, split: int) -> list[tuple[int, tuple[int, ...]]] | None:
    """Give each engine `split` GPUs of one node; None if they do not suffice."""
    found: list[tuple[int, tuple[int, ...]]] = []
    for node in sorted({node for node, _ in free}):
        gpus = [gpu for owner, gpu in free if owner == node]
        found += [(node, tuple(gpus[i : i + split])) for i in range(0, len(gpus) - split + 1, split)]
    return found[:count] if len(found) >= count else None


def _too_few(config: Config, hardware: Hardware, ranks: int, count: int, split: int) -> str:
    each = f" engines of {split} GPUs each" if split > 1 else ""
    what = f"trainer.ranks = {ranks} and workers.count = {count}{each} need {ranks + count * split} GPUs"
    if split > hardware.gpus:
        what = f"engine.tensor_parallel = {split} needs as many GPUs in one node"
    where = (
        _there_are(hardware.total) if hardware.nodes == 1 else f"there are {hardware.nodes} nodes of {hardware.gpus}"
    )
    if (ranks, count, split, hardware.total) == (1, 1, 1, 1):
        where += '; trainer and engine can share it with run.place = "local"'
    return f"{what}, but {where}"


def _fit_ranks(config: Config, shape: ModelShape, hardware: Hardware) -> tuple[RankMemory, int, bool] | str:
    """Choose how the model is sliced: with the least communication that fits."""
    ranks = config.trainer.ranks
    nodes = max(1, ranks // hardware.gpus)
    choices = [(nodes, True), (nodes, False)] + ([(1, False)] if nodes > 1 else [])
    room = int(USABLE * hardware.memory_gib * GIB) - CONTEXT_BYTES
    for replicas, once in choices if ranks > 1 else [(1, False)]:
        memory = rank_memory(config, shape, shards=ranks // replicas, reduce_once=once)
        if memory.peak <= room:
            return memory, replicas, once
    return (
        f"a rank needs {memory_size(memory.peak)} of {memory_size(room)} that can be used; its largest parts: "
        f"{_largest(memory)}"
    )


def _share_one_gpu(config: Config, shape: ModelShape, hardware: Hardware) -> DevicePlan | str:
    """Put trainer and engine on one GPU: both awake, in turns, or in turns with the optimizer in host memory."""
    total = int(hardware.memory_gib * GIB)
    room = int(USABLE * total) - CONTEXT_BYTES
    rank, engine = rank_memory(config, shape, shards=1), engine_memory(config, shape)
    choices = [(False, False, room - rank.peak)]
    if config.run.mode == "lockstep" and rank.peak + ASLEEP_BYTES <= room:
        choices.append((True, False, room - rank.between_steps))
        choices.append((True, True, room - rank.between_steps + rank.movable))
    for needed in (engine.wanted, engine.least):
        for sleeps, offloads, left in choices:
            # An engine without a step of the trainer beside it may still not take more than it would alone.
            share = min(left / total, config.engine.gpu_memory_utilization or ENGINE_SHARE)
            share = int(share * 1000) / 1000
            if needed <= share * total:
                spot = EnginePlace(0, (0,), share, sleeps)
                return DevicePlan(hardware, ((0, 0),), (spot,), 1, False, offloads, rank, engine)
    turns = "" if config.run.mode == "lockstep" else '; in turns (run.mode = "lockstep") they would need less'
    return (
        f"trainer and engine do not fit on one GPU of {hardware.memory_gib:g} GiB: a step needs "
        f"{memory_size(rank.peak)} (largest parts: {_largest(rank)}), the engine at least "
        f"{memory_size(engine.least)}{turns}"
    )


def _largest(memory: RankMemory) -> str:
    terms = sorted(memory.terms.items(), key=lambda term: -term[1])[:4]
    return ", ".join(f"{name} {memory_size(size)}" for name, size in terms)


def _there_are(gpus: int) -> str:
    return "there is 1" if gpus == 1 else f"there are {gpus}"
