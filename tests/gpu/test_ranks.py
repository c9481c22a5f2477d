"""Two ranks that hold the model in slices move the policy as one rank does: with NCCL on two GPUs, gloo on CPU."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from offbeat.objective.presets import PRESETS
from offbeat.preflight.gpu_run import doctor_llama, made_groups
from offbeat.trainer.forward import PolicyModel
from offbeat.trainer.fsdp import Ranks, make_mesh, serving_state, shard
from offbeat.trainer.optimizer import MasterAdamW, OptimizerSettings, Schedule
from offbeat.trainer.trainer import StepSettings, Trained, Trainer
from offbeat.types import Json
from tests.fixtures.ranks import run_ranks

SAME_MOVE = 0.02
"""Largest distance of the two moves, relative to one of them. Adam enlarges the rounding of tiny gradients; a rank
whose gradients are missing gives more than 0.3."""
SAME_NORM = 1e-3


def moves(ranks: Ranks, device: str) -> Json:
    """Train a batch alone, then together; return the distance of the two moves and the ratio of gradient norms."""
    torch.set_num_threads(1)
    alone, norm_alone = move(Ranks(), device)
    together, norm = move(ranks, device)
    distance = float((together - alone).norm() / alone.norm()) if ranks.rank == 0 else 0.0
    return {"move": distance, "norm": abs(norm / norm_alone - 1)}


def move(ranks: Ranks, device: str) -> tuple[Tensor, float]:
    """Take one step of two updates; return the change of all weights and the norm of the gradient."""
    policy_model = PolicyModel(doctor_llama().to(device))
    if ranks.size > 1:
        shard(policy_model, compute=torch.float32, mesh=make_mesh(ranks, device))
    optimizer = MasterAdamW(policy_model, OptimizerSettings(Schedule(1e-3)))
    settings = StepSettings(PRESETS["grpo"].objective, updates_per_batch=2, token_budget=256, length_limit=16)
    trainer = Trainer(policy_model, optimizer, settings, ranks=ranks)
    before = weights(policy_model)
    done = trainer.train(made_groups([(6 + g % 5, [8, 16, 3, 11]) for g in range(11)]))
    assert isinstance(done, Trained)
    return weights(policy_model) - before, float(done.metrics["grad_norm"])


def weights(policy_model: PolicyModel) -> Tensor:
    tensors = [tensor.flatten() for _, tensor in serving_state(policy_model, torch.float32)]
    return torch.cat(tensors) if tensors else torch.zeros(1)


def test_two_ranks_move_the_policy_as_one_does(device: str) -> None:
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("a second rank needs a GPU of its own")
    found = cast("list[dict[str, Any]]", run_ranks(moves, 2, (device,), device=device, silence=120.0))
    assert max(one["move"] for one in found) <= SAME_MOVE and max(one["norm"] for one in found) <= SAME_NORM, found
