"""The memory estimate of a step against what the process really took, SmolLM2-135M."""

import os
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from lab.figures import Figure
from lab.fixtures import smollm2
from lab.fixtures.processes import Say, Work, outcome
from offbeat.objective.presets import PRESETS
from offbeat.trainer.estimate import StepShape, check_worst_case, estimate_memory
from offbeat.trainer.forward import PolicyModel
from offbeat.trainer.optimizer import MasterAdamW, OptimizerSettings
from offbeat.trainer.trainer import StepSettings, Trainer


@dataclass(frozen=True)
class Arm:
    """A way to train."""

    dtype: torch.dtype
    checkpoint_activations: bool
    shape: StepShape
    token_budget: int

    def __str__(self) -> str:
        shape = self.shape
        kept = ", activations recomputed" if self.checkpoint_activations else ""
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}, {shape.prompt}/{shape.completion} × {shape.group}, budget {self.token_budget}{kept}"


ARMS = (
    Arm(torch.bfloat16, False, StepShape(128, 128, 8), 1152),
    Arm(torch.bfloat16, True, StepShape(128, 128, 8), 1152),
    Arm(torch.float32, False, StepShape(128, 128, 8), 1152),
    Arm(torch.bfloat16, False, StepShape(48, 24, 8), 2048),
)


def measuring(arm: Arm) -> Work:
    """Estimate, then the worst micro-batch and an update; says the estimate and the peak, in bytes."""

    def work(say: Say) -> None:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        before = _status("VmRSS")
        model = AutoModelForCausalLM.from_pretrained(smollm2.directory(), dtype=arm.dtype)
        policy_model = PolicyModel(model, checkpoint_activations=arm.checkpoint_activations)
        settings = StepSettings(PRESETS["grpo"].objective, token_budget=arm.token_budget)
        trainer = Trainer(policy_model, MasterAdamW(policy_model, OptimizerSettings()), settings)
        for tensor in trainer.optimizer.tensors().values():
            tensor.add_(0)  # moments that were never written have no pages yet
        estimate = estimate_memory(trainer, arm.shape)
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        check_worst_case(trainer, arm.shape, estimate)
        say(f"{estimate.total} {_status('VmHWM') - before}")

    return work


def _status(key: str) -> int:
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key)]
    return int(line.split()[1]) * 1024


def foretold(short: bool) -> list[Figure]:
    """The figure: how far the estimate is off, the worst of all arms."""
    ratios, told = [], []
    smollm2.directory()
    for arm in ARMS[3:] if short else ARMS:
        [line] = outcome(measuring(arm))
        estimate, peak = map(int, line.split())
        ratios.append(estimate / peak)
        told.append(f"{arm}: {estimate / 2**30:.2f} of {peak / 2**30:.2f} GiB")
    worst = max(ratios, key=lambda ratio: abs(ratio - 1))
    return [
        Figure(
            "trainer.6.memory",
            "memory estimate before the run ÷ measured peak of the worst micro-batch, SmolLM2-135M: the worst arm",
            "0.8 to 1.25",
            round(worst, 3),
            "×",
            0.8 <= worst <= 1.25,
            len(ratios),
            f"{'; '.join(told)}; median {statistics.median(ratios):.2f}. The peak is of resident memory beyond the "
            "imports, forward and backward of the largest micro-batch with AdamW's moments in place",
        )
    ]
