"""The device plan of a run on the GPUs at hand, and what this process does to follow it."""

import logging
from collections.abc import Callable

import torch

from offbeat.config import Config
from offbeat.placement.hardware import DRIVER, Hardware
from offbeat.placement.nearest import plan_devices
from offbeat.placement.plan import DevicePlan
from offbeat.placement.shape import ModelShape
from offbeat.run.turns import GpuUser, SharedGpu
from offbeat.trainer.trainer import Trainer

logger = logging.getLogger(__name__)


def plan_run(config: Config, hardware: Hardware | None) -> DevicePlan | None:
    """Return the plan; None without a GPU.

    Raises `CannotPlace` if the run does not fit, and `ModelUnreadable` if the model's memory cannot be estimated.
    """
    if hardware is None:
        return None
    return plan_devices(config, ModelShape.read(config.model.directory()), hardware)


def plan_here(config: Config) -> DevicePlan | None:
    """Plan a run on this machine, and make the trainer's GPU the one that torch uses in this process."""
    plan = plan_run(config, Hardware.detect())
    if plan is None and DRIVER.exists():
        logger.warning("this machine has an NVIDIA driver, but torch %s sees no GPU: the run uses the CPU; install a "
                       "torch with CUDA, and look with `offbeat doctor --gpu`", torch.__version__)  # fmt: skip
    if plan is not None:
        torch.cuda.set_device(plan.ranks[0][1])
    return plan


def shared_gpu(plan: DevicePlan | None, trainer: Trainer, patience: float) -> SharedGpu | None:
    """Return the GPU that trainer and engine share in turns; None if each has a GPU or memory for itself."""
    if plan is None or not any(engine.sleeps for engine in plan.engines):
        return None
    return SharedGpu(_mover(plan, trainer), patience)


def _mover(plan: DevicePlan, trainer: Trainer) -> Callable[[GpuUser], None]:
    device = trainer.policy_model.device

    def move(turn: GpuUser) -> None:
        if plan.offloads:
            to = torch.device("cpu") if turn is GpuUser.ENGINE else device
            trainer.optimizer.move(to)
            trainer.policy_model.move_frozen(to)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps for itself is missing in the engine's turn

    return move
