"""Training on several ranks: how they meet, and FSDP2, in which each holds a slice of every parameter and moment.

    listener = open_listener("127.0.0.1")                                  # rank 0; 127.0.0.1 on one machine
    ranks = join(0, size, listener.rendezvous, listener=listener)
    ranks = join(3, size, "tcp://127.0.0.1:41873")                         # the others, told by whoever started them
    policy_model = load_policy_model(directory, ranks, …)                  # each rank its slices (loading.py)
    shard(policy_model, compute=torch.bfloat16, mesh=make_mesh(ranks, …))  # or shard a model that you have, in place
    trainer = Trainer(policy_model, MasterAdamW(policy_model, …), …, ranks=ranks)
    serving_state(policy_model, torch.bfloat16)                            # whole tensors again, for the weight log
    leave()

torch's own `tcp://` rendezvous listens on every interface. Here the socket is bound first and given to the store, so it
listens on one address, chosen by rank 0.

The slices of what is trained are the float32 master weights. FSDP gathers a block, in the compute dtype, for its
forward and its backward pass, and frees it after each. Gradients are summed over ranks in float32, not averaged: the
loss is already divided by counts of the whole batch.

On several nodes each node holds the whole model in slices (HSDP): parameters are gathered within a node, and only
gradients cross the network, once per update.
"""

import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch._C._distributed_c10d import TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.modeling_layers import GradientCheckpointingLayer

from offbeat.errors import RankSilent, UnsupportedModel, first_line
from offbeat.trainer.adapter import is_adapter, stored_name
from offbeat.trainer.forward import PolicyModel

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those that train together. The default is a process on its own.

    >>> Ranks().share(["a", "b", "c"])
    [('a', True), ('b', True), ('c', True)]
    """

    rank: int = 0
    size: int = 1
    group: distributed.ProcessGroup | None = None
    nodes: tuple[tuple[int, ...], ...] = ()
    """The ranks of each node, if the model is sharded within nodes and replicated across them; see `by_node`."""
    reduce: Literal["once", "scatter"] = "scatter"
    """When gradients are summed over ranks. `scatter`: within a node after every micro-batch, so that a rank keeps only
    its slice; across nodes with the last one. `once`: everywhere with the last micro-batch, which is faster, but until
    then each rank keeps the gradients of the whole model, 4 bytes a parameter."""

    def share(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """Return every `size`-th item, with True if it counts.

        All ranks get the same number of items, because a forward pass of a sharded model needs all ranks. A rank that
        would get one item less repeats the last item, which then does not count.

        >>> [Ranks(rank, 2).share(["a", "b", "c"]) for rank in (0, 1)]
        [[('a', True), ('c', True)], [('b', True), ('c', False)]]
        """
        rounds = -(-len(items) // self.size)
        indices = [turn * self.size + self.rank for turn in range(rounds)]
        return [(items[min(index, len(items) - 1)], index < len(items)) for index in indices]

    def sum(self, values: Tensor) -> Tensor:
        """Sum a tensor over all ranks, in place. It also works as a barrier."""
        if self.size > 1:
            distributed.all_reduce(values, group=self.group)
        return values


LOOPBACK: Final = "127.0.0.1"
COLLECTIVE_TIMEOUT: Final = timedelta(minutes=10)
"""How long a rank waits for the others in one collective. Another rank may be writing a checkpoint or publishing."""
JOIN_TIMEOUT: Final = timedelta(minutes=3)
"""How long a rank waits for all others to arrive."""
_ADDRESS_OF_INTERFACE: Final = 0x8915
"""SIOCGIFADDR of Linux."""


@dataclass(frozen=True)
class Listener:
    """A socket that listens on one address, before the store takes it over."""

    rendezvous: str
    """What the other ranks need: `tcp://address:port`."""
    socket: socket.socket


def open_listener(address: str) -> Listener:
    """Listen on a free port of `address` and of no other interface."""
    listening = socket.create_server((address, 0), backlog=512)
    return Listener(f"tcp://{address}:{listening.getsockname()[1]}", listening)


def join(
    rank: int,
    size: int,
    rendezvous: str,
    *,
    listener: Listener | None = None,
    device: str = "cpu",
    places: Sequence[str] = (),
    patience: timedelta = JOIN_TIMEOUT,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
) -> Ranks:
    """Join the process group as rank `rank` of `size`; return when all ranks have joined.

    With a loopback address or a file, all ranks are on one machine and use only the loopback interface. Otherwise they
    use the interface of this machine's address, or what the environment names (`GLOO_SOCKET_IFNAME`,
    `NCCL_SOCKET_IFNAME`). On CUDA, the rank uses the device of its place among the ranks of its node.

    Args:
        rank: The number of this rank.
        size: The number of all ranks.
        rendezvous: `tcp://address:port` of rank 0's listener, or `file:///…` for ranks on one machine.
        listener: On rank 0, the listener that the address belongs to.
        device: `cpu` or `cuda`.
        places: The node of each rank, in order. Default: all on one node.
        patience: How long to wait for the others. Raises `RankSilent` with the ranks that did not arrive.
        timeout: The limit of each collective afterwards.

    >>> listener = open_listener("127.0.0.1")
    >>> ranks = join(0, 1, listener.rendezvous, listener=listener)
    >>> leave()
    >>> ranks.rank, ranks.size
    (0, 1)
    """
    places = places or ["here"] * size
    if device == "cuda":
        local = [one for one, place in enumerate(places) if place == places[rank]].index(rank)
        torch.cuda.set_device(local % torch.cuda.device_count())  # Ray shows each actor its own devices only
    _choose_interface(rendezvous)
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    if rendezvous.startswith("file://"):
        distributed.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=size, timeout=timeout)
    else:
        store = _meet(rank, size, rendezvous, listener, patience)
        distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    return Ranks(rank, size, distributed.group.WORLD, by_node(places))


def leave() -> None:
    """Leave the process group."""
    distributed.destroy_process_group()


def _meet(rank: int, size: int, rendezvous: str, listener: Listener | None, patience: timedelta) -> TCPStore:
    """Connect to the store of rank 0, and wait there for all ranks."""
    deadline = time.monotonic() + patience.total_seconds()
    address, port = rendezvous.removeprefix("tcp://").rsplit(":", 1)
    descriptor = None if listener is None else listener.socket.detach()  # the store closes it
    try:
        store = TCPStore(
            address, int(port), is_master=rank == 0, timeout=patience, wait_for_workers=False,
            master_listen_fd=descriptor,
        )  # fmt: skip
    except distributed.DistError as error:
        how = f"did not answer at {rendezvous} within {patience.total_seconds():.0f} s: {first_line(error)}"
        raise RankSilent(0, how) from error
    store.set(f"arrived/{rank}", "yes")
    for other in range(size):
        left = timedelta(seconds=max(0.001, deadline - time.monotonic()))
        try:
            store.wait([f"arrived/{other}"], left)
        except distributed.DistError:
            missing = [one for one in range(size) if not store.check([f"arrived/{one}"])] or [other]
            also = f" (nor did {', '.join(f'rank {one}' for one in missing[1:])})" if missing[1:] else ""
            how = f"did not arrive at {rendezvous} within {patience.total_seconds():.0f} s{also}"
            raise RankSilent(missing[0], how) from None
    return store


def _choose_interface(rendezvous: str) -> None:
    """Make gloo and NCCL use loopback, or the interface by which this machine reaches rank 0."""
    address = rendezvous.removeprefix("tcp://").rsplit(":", 1)[0]
    loopback = rendezvous.startswith("file://") or address.startswith("127.")
    own = LOOPBACK if loopback else _own_address(address)
    interface = next((name for _, name in socket.if_nameindex() if _address_of(name) == own), None)
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if interface is not None and (loopback or variable not in os.environ):
            os.environ[variable] = interface


def _own_address(address: str) -> str:
    """Return the address of this machine from which packets to `address` leave; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def _address_of(interface: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            found = fcntl.ioctl(any_socket, _ADDRESS_OF_INTERFACE, struct.pack("256s", interface.encode()[:15]))
        except OSError:  # the interface has no IPv4 address
            return None
    return socket.inet_ntoa(found[20:24])


def by_node(places: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of each node, given the node of each rank; empty if one mesh over all ranks is better.

    That is the case on one node, with one rank per node (nothing could be sharded within it), and if nodes have
    different numbers of ranks.

    >>> by_node(["a", "b", "a", "b"])
    ((0, 2), (1, 3))
    >>> by_node(["a", "a"]), by_node(["a", "b"]), by_node(["a", "a", "b"])
    ((), (), ())
    """
    nodes = {place: tuple(rank for rank, one in enumerate(places) if one == place) for place in places}
    sizes = {len(ranks) for ranks in nodes.values()}
    return tuple(nodes.values()) if len(nodes) > 1 and len(sizes) == 1 and sizes != {1} else ()


def make_mesh(ranks: Ranks, device: str) -> DeviceMesh:
    """Return the mesh to shard over: all ranks, or with `ranks.nodes` replicate across nodes and shard within each."""
    if not ranks.nodes:
        return init_device_mesh(device, (ranks.size,))
    return DeviceMesh(device, torch.tensor(ranks.nodes), mesh_dim_names=("replicate", "shard"))


def shard(policy_model: PolicyModel, *, compute: torch.dtype, mesh: DeviceMesh | None = None) -> None:
    """Shard the parameters over the last dimension of `mesh` (default: all ranks), in place.

    The parameters must be equal on every rank or on the meta device. Those that are trained must be float32; frozen
    ones may be narrower, and are converted to `compute` when they are gathered.

    The root is resharded after the forward pass, like every block. This costs one more all-gather, but no gathered copy
    stays behind that an update, a refresh of the reference policy or a restored checkpoint would make stale.
    """
    parameters = dict(policy_model.named_parameters())
    if wrong := [(n, p.dtype) for n, p in parameters.items() if p.requires_grad and p.dtype != torch.float32]:
        raise ValueError(
            f"{wrong[0][0]} is {wrong[0][1]}: the slices are the master weights, so load the model in float32 and give "
            "the dtype for matrix products as `compute`"
        )
    if mesh is None:
        mesh = init_device_mesh(policy_model.device.type, (distributed.get_world_size(),))
    converted = any(p.dtype != compute for p in parameters.values())
    policy = MixedPrecisionPolicy(param_dtype=compute if converted else None, reduce_dtype=torch.float32)
    for module in [*transformer_blocks(policy_model), policy_model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(policy_model, "logits")
    policy_model.compute_dtype = compute


def sum_gradients(policy_model: PolicyModel, ranks: Ranks, *, last: bool) -> None:
    """Set, before a backward pass, what FSDP sums after it; `last` is True for the last micro-batch of an update.

    Call it for every micro-batch. Outside of an update everything is summed after each pass.
    """
    if not isinstance(policy_model, FSDPModule):
        return
    if ranks.reduce == "once":
        policy_model.set_requires_gradient_sync(last)
    else:
        policy_model.set_requires_all_reduce(last)


def own_rows(name: str, tensor: Tensor) -> tuple[int, Tensor]:
    """Return the first row that this rank holds of a tensor, and its rows: all rows if the tensor is not sharded."""
    if not isinstance(tensor, DTensor):
        return 0, tensor
    mesh, axis = tensor.device_mesh, tensor.device_mesh.ndim - 1
    local, size, rank = tensor.to_local(), mesh.size(axis), mesh.get_local_rank(axis)
    each = -(-tensor.shape[0] // size)
    start, end = min(rank * each, tensor.shape[0]), min((rank + 1) * each, tensor.shape[0])
    if tensor.placements != (*[Replicate()] * axis, Shard(0)) or len(local) != end - start:
        raise UnsupportedModel(
            f"{name} is placed as {tensor.placements}: offbeat reads and writes slices of the first axis only"
        )
    return start, local


def in_first_replica(tensor: Tensor) -> bool:
    """True if this rank's rows of a sharded tensor are the ones to store; with HSDP other nodes hold the same rows."""
    if not isinstance(tensor, DTensor):
        return False
    return all(tensor.device_mesh.get_local_rank(axis) == 0 for axis in range(tensor.device_mesh.ndim - 1))


def transformer_blocks(policy_model: PolicyModel) -> list[nn.Module]:
    """Return the layers that FSDP gathers one at a time."""
    return [module for module in policy_model.modules() if isinstance(module, GradientCheckpointingLayer)]


def serving_state(policy_model: PolicyModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors for the weight log, by the names of `named_tensors`.

    Each parameter is rounded to what the trainer computes with and to `dtype`, then gathered, one at a time. Every rank
    must iterate to the end; only rank 0 receives tensors.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    >>> policy_model = PolicyModel(LlamaForCausalLM(LlamaConfig(**sizes)))
    >>> {name: tensor.dtype for name, tensor in serving_state(policy_model, torch.bfloat16)}["lm_head.weight"]
    torch.bfloat16
    """
    for name, tensor in named_tensors(policy_model):
        rounded = tensor.to(policy_model.compute_dtype).to(dtype) if tensor.is_floating_point() else tensor
        if not isinstance(rounded, DTensor):
            yield name, rounded.cpu()
            continue
        whole = rounded.full_tensor()
        if distributed.get_rank() == 0:
            yield name, whole.cpu()


@contextmanager
def as_served(policy_model: PolicyModel, dtype: torch.dtype) -> Iterator[None]:
    """Let the model compute with the weights of `serving_state`, rounded to `dtype`, for the length of the block."""
    wider = [one for _, one in named_tensors(policy_model) if one.is_floating_point() and one.itemsize > dtype.itemsize]
    exact = [tensor.clone() for tensor in wider]
    try:
        for tensor in wider:
            tensor.copy_(tensor.to(dtype))
        yield
    finally:
        for tensor, value in zip(wider, exact, strict=True):
            tensor.copy_(value)


def named_tensors(policy_model: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Yield what is trained, saved and published, by the names that it has there.

    That is an adapter's A and B under peft's names, or all parameters and persistent buffers by their names in a
    Hugging Face state dict, a tied one once.
    """
    if policy_model.adapter is None:
        yield from model_tensors(policy_model)
        return
    yield from ((stored_name(name), tensor) for name, tensor in model_tensors(policy_model) if is_adapter(name))


def model_tensors(policy_model: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers by their names in the model, a tied one once."""
    stored = policy_model.model.state_dict().keys()
    yield from ((name, parameter.detach()) for name, parameter in policy_model.model.named_parameters())
    yield from ((name, buffer) for name, buffer in policy_model.model.named_buffers() if name in stored)
