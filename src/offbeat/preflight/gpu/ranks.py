"""Check ranks: a step of two ranks that hold the model in slices moves the policy as one rank does."""

import select
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor

from offbeat.errors import DeadlinePassed
from offbeat.objective.presets import PRESETS
from offbeat.preflight.gpu.child import ChildFailed, DoctorChild
from offbeat.preflight.gpu.finding import ATTACH, GpuFinding, broken, passed, skipped
from offbeat.preflight.gpu.models import doctor_llama, made_groups
from offbeat.trainer.forward import PolicyModel
from offbeat.trainer.fsdp import Ranks, make_mesh, serving_state, shard
from offbeat.trainer.optimizer import MasterAdamW, OptimizerSettings, Schedule
from offbeat.trainer.rendezvous import join, leave
from offbeat.trainer.trainer import StepSettings, Trained, Trainer
from offbeat.types import Json

LIMIT: Final = 240.0
"""Seconds for both ranks together. On a GPU most of it is compiling."""
SAME_MOVE: Final = 0.02
"""Largest distance of the two moves, relative to one of them. Adam enlarges the rounding of tiny gradients; a rank
whose gradients are missing gives more than 0.3."""
SAME_NORM: Final = 1e-3
STEP: Final = "offbeat.preflight.gpu.ranks:step"


def check_ranks(device: str, *, _step: str = STEP) -> Iterator[GpuFinding]:
    """Start two ranks: with NCCL on two GPUs, with gloo on CPU."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        yield skipped("ranks", "there is one GPU; a second rank needs a GPU of its own")
        return
    backend = "NCCL" if device == "cuda" else "gloo"
    fix = f"set NCCL_DEBUG=INFO and try NCCL_P2P_DISABLE=1; give a container --shm-size=8g; else {ATTACH}"
    fix = fix if device == "cuda" else ATTACH
    with tempfile.TemporaryDirectory(prefix="offbeat-ranks-") as folder:
        settings: dict[str, Json] = {"size": 2, "rendezvous": f"file://{folder}/meet", "device": device}
        with DoctorChild(_step, rank=0, **settings) as first, DoctorChild(_step, rank=1, **settings) as second:
            try:
                found, other = _receive_all([first, second])
            except (ChildFailed, DeadlinePassed) as error:
                log = "\n".join([first.log(), second.log()])
                yield replace(broken("ranks", f"two ranks with {backend}: {error}", fix), log=log)
                return
    norms = max(abs(one["norm"] / one["norm_alone"] - 1) for one in (found, other))
    numbers: dict[str, Json] = {"move": found["move"], "norm": norms, "backend": backend}
    if not (found["move"] <= SAME_MOVE and norms <= SAME_NORM):
        what = f"two ranks moved the policy differently than one: {found['move']:.2g} of the move (limit {SAME_MOVE})"
        yield broken("ranks", f"{what}, gradient norm off by {norms:.2g} (limit {SAME_NORM:g})", fix, **numbers)
        return
    detail = f"two ranks with {backend} move the policy as one does, within {found['move']:.1g} of the move"
    yield passed("ranks", f"{detail} (limit {SAME_MOVE})", **numbers)


def _receive_all(ranks: Sequence[DoctorChild]) -> list[dict[str, Any]]:
    """Return the result of each rank; raise as soon as one fails, because the others would wait for it."""
    deadline, found = time.monotonic() + LIMIT, dict[DoctorChild, dict[str, Any]]()
    while missing := [child for child in ranks if child not in found]:
        left = max(0.1, deadline - time.monotonic())
        ready, _, _ = select.select(missing, [], [], left)
        for child in ready or missing:
            found[child] = child.receive(left if ready else 0.0) or {}
    return [found[child] for child in ranks]


def step(rank: int, size: int, rendezvous: str, device: str) -> Iterator[dict[str, Json]]:
    """Be one rank: train a batch alone, then together, and yield how far the two moves are apart."""
    torch.set_num_threads(1)
    ranks = join(rank, size, rendezvous, device=device, timeout=timedelta(seconds=LIMIT))
    alone, norm_alone = _move(Ranks(), device)
    together, norm = _move(ranks, device)
    leave()
    distance = float((together - alone).norm() / alone.norm()) if rank == 0 else 0.0
    yield {"move": distance, "norm": norm, "norm_alone": norm_alone}


def _move(ranks: Ranks, device: str) -> tuple[Tensor, float]:
    """Take one step of two updates; return the change of all weights and the norm of the gradient."""
    policy_model = PolicyModel(doctor_llama().to(device))
    if ranks.size > 1:
        shard(policy_model, compute=torch.float32, mesh=make_mesh(ranks, device))
    optimizer = MasterAdamW(policy_model, OptimizerSettings(Schedule(1e-3)))
    settings = StepSettings(PRESETS["grpo"].objective, updates_per_batch=2, token_budget=256, length_limit=16)
    trainer = Trainer(policy_model, optimizer, settings, ranks=ranks)
    before = _weights(policy_model)
    done = trainer.train(made_groups([(6 + g % 5, [8, 16, 3, 11]) for g in range(11)]))
    if not isinstance(done, Trained):
        raise RuntimeError(f"the batch was not trained: {done}")
    return _weights(policy_model) - before, float(done.metrics["grad_norm"])


def _weights(policy_model: PolicyModel) -> Tensor:
    tensors = [tensor.flatten() for _, tensor in serving_state(policy_model, torch.float32)]
    return torch.cat(tensors) if tensors else torch.zeros(1)
