"""The policy spread over ranks with FSDP2: every rank holds a slice of each parameter, gradient and moment.

    ranks = join(rank, size, rendezvous)          # the process group
    shard(policy_model, compute=torch.bfloat16)         # in place, before the optimiser is made
    trainer = Trainer(policy_model, MasterAdamW(policy_model, …), …, ranks=ranks)

Slices are the float32 master weights. A block is gathered, in the compute dtype, when its forward or backward runs, and
let go after it. Gradients are summed over ranks in float32, and not averaged: the loss is divided by counts of the
whole batch already.
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
    """This process among those that train together; alone by default.

    >>> alone = Ranks()
    >>> alone.share(["a", "b", "c"])
    [('a', True), ('b', True), ('c', True)]
    """

    rank: int = 0
    size: int = 1
    group: distributed.ProcessGroup | None = None

    def share(self, items: Sequence[T]) -> list[tuple[T, bool]]:
        """Every `size`-th item, and whether it counts. All ranks get equally many: sharded forwards meet in pairs.

        Where items run out, a rank repeats the last one, which then does not count.

        >>> [Ranks(rank, 2).share(["a", "b", "c"]) for rank in (0, 1)]
        [[('a', True), ('c', True)], [('b', True), ('c', False)]]
        """
        rounds = -(-len(items) // self.size)
        places = [turn * self.size + self.rank for turn in range(rounds)]
        return [(items[min(place, len(items) - 1)], place < len(items)) for place in places]

    def sum(self, values: Tensor) -> Tensor:
        """Summed over ranks, in place; as it is when alone."""
        if self.size > 1:
            distributed.all_reduce(values, group=self.group)
        return values


PATIENCE: Final = timedelta(minutes=10)
"""How long a rank waits for the others in one exchange. Somebody may be writing a checkpoint or publishing."""


def join(
    rank: int,
    size: int,
    rendezvous: str,
    *,
    device: str = "cpu",
    loopback: bool = True,
    patience: timedelta = PATIENCE,
) -> Ranks:
    """Become rank `rank` of `size`; returns when all have come.

    Ranks meet at a file that all of them see, `file:///…`. Those of one machine talk over the loopback interface:
    nothing listens beyond it. Those of several machines, with `loopback` off, talk over the interface that the
    environment names (`GLOO_SOCKET_IFNAME`, `NCCL_SOCKET_IFNAME`).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     ranks = join(0, 1, f"file://{place}/meet")
    ...     leave()
    >>> ranks.rank, ranks.size
    (0, 1)
    """
    if loopback:
        inside = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))
        os.environ.update(GLOO_SOCKET_IFNAME=inside, NCCL_SOCKET_IFNAME=inside)
    distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        init_method=rendezvous,
        rank=rank,
        world_size=size,
        timeout=patience,
    )
    return Ranks(rank, size, distributed.group.WORLD)


def leave() -> None:
    """End what `join` began."""
    distributed.destroy_process_group()


def shard(policy_model: PolicyModel, *, compute: torch.dtype) -> None:
    """Spread the parameters over all ranks, in place. They must be the same on every rank, in float32.

    The root is gathered again for the backward pass, like every block: one more exchange, but between two passes
    nothing stays behind that an update, a refresh or a checkpoint could make untrue.
    """
    if wrong := [(name, p.dtype) for name, p in policy_model.named_parameters() if p.dtype != torch.float32]:
        raise ValueError(
            f"{wrong[0][0]} is {wrong[0][1]}: slices are the master weights, so load the model "
            "in float32 and give the dtype to compute in as `compute`"
        )
    mesh = init_device_mesh(policy_model.device.type, (distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=None if compute == torch.float32 else compute, reduce_dtype=torch.float32)
    for module in [*blocks_of(policy_model), policy_model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        assert isinstance(module, FSDPModule)
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(policy_model, "logits")
    policy_model.compute_dtype = compute


def blocks_of(policy_model: PolicyModel) -> list[nn.Module]:
    """The layers that are gathered one after another."""
    return [module for module in policy_model.modules() if isinstance(module, GradientCheckpointingLayer)]


def serving_state(policy_model: PolicyModel, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors as a Hugging Face state dict has them, for the weight log; a tied head comes once.

    One parameter is whole at a time, rounded before it is gathered. Every rank iterates to the end, and rank 0 alone is
    given the tensors; a process that is alone is rank 0.

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
    """Parameters and persistent buffers by their names in a Hugging Face state dict, a tied one once."""
    stored = policy_model.model.state_dict().keys()
    yield from ((name, parameter.detach()) for name, parameter in policy_model.model.named_parameters())
    yield from ((name, buffer) for name, buffer in policy_model.model.named_buffers() if name in stored)
