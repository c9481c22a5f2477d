"""Compare the memory estimate of a step with the measured peak, SmolLM2-135M (`lab.torture.trainer memory`)."""

import os
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM

from lab.figures import Figure
from lab.fixtures import smollm2
from offbeat.config import parse
from offbeat.objective.presets import PRESETS
from offbeat.placement.hardware import cpu_products
from offbeat.placement.memory import rank_memory
from offbeat.placement.shape import ModelShape
from offbeat.trainer.forward import PolicyModel
from offbeat.trainer.optimizer import MasterAdamW, OptimizerSettings
from offbeat.trainer.trainer import StepSettings, Trainer
from offbeat.trainer.worst_case import StepShape, check_worst_case
from offbeat.weights.adapter import AdapterSpec
from tests.fixtures.memory import peak_bytes, reset_peak, resident_bytes, return_freed_memory
from tests.fixtures.processes import Send, Work, run_to_end
from tests.fixtures.small_trainer import small_trainer


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    dtype: torch.dtype
    checkpoint_activations: bool
    shape: StepShape
    token_budget: int
    adapter: AdapterSpec | None = None

    def __str__(self) -> str:
        shape = self.shape
        recomputed = ", activations recomputed" if self.checkpoint_activations else ""
        name = str(self.dtype).removeprefix("torch.")
        adapter = f", adapter of rank {self.adapter.rank}" if self.adapter else ""
        rows = f"{shape.prompt}/{shape.completion} × {shape.group}"
        return f"{name}, {rows}, budget {self.token_budget}{recomputed}{adapter}"


SMALL = StepShape(8, 8, 4)
HOW = (
    "Measured beyond the memory after a step of a tiny model: forward and backward of the largest micro-batch, with "
    "gradients and moments there, and a malloc that returns freed memory. As it comes, malloc keeps some: resident"
)
ARMS = (
    Arm(torch.bfloat16, False, StepShape(128, 128, 8), 1152),
    Arm(torch.bfloat16, True, StepShape(128, 128, 8), 1152),
    Arm(torch.float32, False, StepShape(128, 128, 8), 1152),
    Arm(torch.bfloat16, False, StepShape(48, 24, 8), 2048),
)


@dataclass(frozen=True)
class Peak:
    """The memory of a step in bytes: estimated, and measured beyond that after a step of a tiny model."""

    estimate: int
    tensors: int
    """With a malloc that returns freed memory at once."""
    resident: int
    """With malloc as it comes."""

    @property
    def ratio(self) -> float:
        return self.estimate / self.tensors

    def __str__(self) -> str:
        return f"{self.estimate / 2**30:.2f} of {self.tensors / 2**30:.2f} GiB, resident {self.resident / 2**30:.2f}"


def estimated(arm: Arm) -> int:
    """Return the bytes of a rank by the one model of memory."""
    config = parse(
        {
            "model": {"path": str(smollm2.directory()), "compute": str(arm.dtype).removeprefix("torch.")},
            "group_size": arm.shape.group,
            "sampling": {"max_tokens": arm.shape.completion},
            "engine": {"max_prompt_tokens": arm.shape.prompt},
            "trainer": {"token_budget": arm.token_budget, "checkpoint_activations": arm.checkpoint_activations},
            "adapter": {"rank": arm.adapter.rank} if arm.adapter else {},
        }
    )
    return rank_memory(config, ModelShape.read(smollm2.directory()), shards=1, on_cpu=True).peak


def measure(arm: Arm) -> Peak:
    """Measure an arm in two processes."""
    [first], [second] = (run_to_end(_measuring(arm, exact=exact)) for exact in (True, False))
    (estimate, tensors), (_, resident) = map(int, first.split()), map(int, second.split())
    return Peak(estimate, tensors, resident)


def _measuring(arm: Arm, *, exact: bool) -> Work:
    """Estimate, then train on the largest micro-batch. The process sends the estimate and the peak, in bytes.

    A CPU without bfloat16 multiplies bfloat16 weights in float32, as in a run.
    """

    def work(send: Send) -> None:
        if exact:
            return_freed_memory()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        products = getattr(torch, cpu_products(str(arm.dtype).removeprefix("torch.")))
        warm = small_trainer(compute=products, dtype=products, adapter=arm.adapter)
        check_worst_case(warm, SMALL)  # reads the code of libraries from disk
        before = resident_bytes()
        model = AutoModelForCausalLM.from_pretrained(smollm2.directory(), dtype=arm.dtype).to(products)
        policy_model = PolicyModel(model, checkpoint_activations=arm.checkpoint_activations, adapter=arm.adapter)
        settings = StepSettings(PRESETS["grpo"].objective, token_budget=arm.token_budget)
        rounds_to = None if products == arm.dtype else arm.dtype
        trainer = Trainer(policy_model, MasterAdamW(policy_model, OptimizerSettings(), rounds_to), settings)
        for tensor in trainer.optimizer.tensors().values():
            tensor.add_(0)  # before the first write, moments have no pages
        reset_peak()
        check_worst_case(trainer, arm.shape)
        send(f"{estimated(arm)} {peak_bytes() - before}")

    return work


def worst_ratio(ratios: Iterable[float]) -> float:
    """Return the one that is farthest from 1."""
    return max(ratios, key=lambda ratio: abs(ratio - 1))


def memory_estimates(short: bool) -> list[Figure]:
    """Row trainer.6.memory: how far the estimate is off, the worst of all arms."""
    smollm2.directory()
    peaks = {arm: measure(arm) for arm in (ARMS[3:] if short else ARMS)}
    ratios = [peak.ratio for peak in peaks.values()]
    worst = worst_ratio(ratios)
    arms = "; ".join(f"{arm}: {peak}" for arm, peak in peaks.items())
    return [
        Figure(
            "trainer.6.memory",
            "memory estimate before the run ÷ measured peak of the worst micro-batch, SmolLM2-135M: the worst arm",
            "0.8 to 1.25",
            round(worst, 3),
            "×",
            0.8 <= worst <= 1.25,
            len(ratios),
            f"{arms}; median {statistics.median(ratios):.2f}. {HOW}",
        )
    ]
