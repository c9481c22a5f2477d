"""Training on several ranks with FSDP2: each rank holds a slice of every parameter, gradient and Adam moment.

    ranks = join(rank, size, rendezvous)                                   # the process group (rendezvous.py)
    policy_model = load_policy_model(directory, ranks, …)                  # each rank its slices (loading.py)
    shard(policy_model, compute=torch.bfloat16, mesh=make_mesh(ranks, …))  # or shard a model that you have, in place
    trainer = Trainer(policy_model, MasterAdamW(policy_model, …), …, ranks=ranks)
    serving_state(policy_model, torch.bfloat16)                            # whole tensors again, for the weight log

The slices of what is trained are the float32 master weights. FSDP gathers a block, in the compute dtype, for its
forward and its backward pass, and frees it after each. Gradients are summed over ranks in float32, not averaged: the
loss is already divided by counts of the whole batch.

On several nodes each node holds the whole model in slices (HSDP): parameters are gathered within a node, and only
gradients cross the network, once per update.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers.modeling_layers import GradientCheckpointingLayer

from offbeat.errors import UnsupportedModel
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

    Each parameter is rounded, then gathered, one at a time. Every rank must iterate to the end; only rank 0 receives
    tensors.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    >>> policy_model = PolicyModel(LlamaForCausalLM(LlamaConfig(**sizes)))
    >>> {name: tensor.dtype for name, tensor in serving_state(policy_model, torch.bfloat16)}["lm_head.weight"]
    torch.bfloat16
    """
    for name, tensor in named_tensors(policy_model):
        rounded = tensor.to(dtype) if tensor.is_floating_point() else tensor
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
