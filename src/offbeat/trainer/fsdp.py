"""Training on several ranks with FSDP2: each rank holds a slice of every parameter, gradient and Adam moment.

    ranks = join(rank, size, rendezvous)          # the process group
    shard(policy_model, compute=torch.bfloat16)   # in place, before you make the optimizer
    trainer = Trainer(policy_model, MasterAdamW(policy_model, …), …, ranks=ranks)
    serving_state(policy_model, torch.bfloat16)   # whole tensors again, for the weight log

The slices are the float32 master weights. FSDP gathers a block, in the compute dtype, for its forward and its backward
pass, and frees it after each. Gradients are summed over ranks in float32, not averaged: the loss is already divided by
counts of the whole batch.
"""

import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

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


COLLECTIVE_TIMEOUT: Final = timedelta(minutes=10)
"""How long a rank waits for the others in one collective. Another rank may be writing a checkpoint or publishing."""


def join(
    rank: int,
    size: int,
    rendezvous: str,
    *,
    device: str = "cpu",
    loopback: bool = True,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
) -> Ranks:
    """Join the process group as rank `rank` of `size`; return when all ranks have joined.

    The rendezvous is a file that all ranks can see, `file:///…`. With `loopback`, all ranks are on one machine and use
    only the loopback interface. Without it, they use the interface that the environment names
    (`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     ranks = join(0, 1, f"file://{folder}/meet")
    ...     leave()
    >>> ranks.rank, ranks.size
    (0, 1)
    """
    if loopback:
        interface = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=interface)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=size,
        timeout=timeout,
    )
    return Ranks(rank, size, distributed.group.WORLD)


def leave() -> None:
    """Leave the process group."""
    distributed.destroy_process_group()


def shard(policy_model: PolicyModel, *, compute: torch.dtype) -> None:
    """Shard the parameters over all ranks, in place. They must be equal on every rank, and float32.

    The root is resharded after the forward pass, like every block. This costs one more all-gather, but no gathered copy
    stays behind that an update, a refresh of the reference policy or a restored checkpoint would make stale.
    """
    if wrong := [(name, p.dtype) for name, p in policy_model.named_parameters() if p.dtype != torch.float32]:
        raise ValueError(
            f"{wrong[0][0]} is {wrong[0][1]}: the slices are the master weights, so load the model in float32 and give "
            "the dtype for matrix products as `compute`"
        )
    mesh = init_device_mesh(policy_model.device.type, (distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=None if compute == torch.float32 else compute, reduce_dtype=torch.float32)
    for module in [*transformer_blocks(policy_model), policy_model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(policy_model, "logits")
    policy_model.compute_dtype = compute


def transformer_blocks(policy_model: PolicyModel) -> list[nn.Module]:
    """Return the layers that FSDP gathers one at a time."""
    return [module for module in policy_model.modules() if isinstance(module, GradientCheckpointingLayer)]


def serving_state(policy_model: PolicyModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield whole tensors for the weight log, by their names in a Hugging Face state dict. A tied head comes once.

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


def named_tensors(policy_model: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and persistent buffers by their names in a Hugging Face state dict, a tied one once."""
    stored = policy_model.model.state_dict().keys()
    yield from ((name, parameter.detach()) for name, parameter in policy_model.model.named_parameters())
    yield from ((name, buffer) for name, buffer in policy_model.model.named_buffers() if name in stored)
