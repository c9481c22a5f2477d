"""The largest micro-batch of a run, computed once before its first step: what does not fit fails in the first minute.

seconds = check_worst_case(trainer, StepShape(prompt=512, completion=1024, group=8))
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offbeat.objective.spec import Need
from offbeat.trainer.batch import MicroBatch, build_micro_batch, plan_micro_batches
from offbeat.trainer.forward import UNLIMITED, ModelInputs, synthetic_group, to_model_inputs
from offbeat.trainer.trainer import Trainer
from offbeat.types import Group


@dataclass(frozen=True)
class StepShape:
    """The longest prompt and completion in tokens, and the completions of a group."""

    prompt: int
    completion: int
    group: int


def check_worst_case(trainer: Trainer, shape: StepShape) -> float:
    """Run forward and backward of the largest micro-batch, without an update, and return its seconds.

    A tiny micro-batch goes before it: in a step of several, all but the first have gradients in memory already. It runs
    collectives, so every rank must call it.
    """
    policy_model = trainer.policy_model
    tiny = _first_micro_batch(trainer, [synthetic_group(policy_model.vocab_size, 1, 1, 1)], UNLIMITED)
    micro = worst_micro_batch(trainer, shape)
    policy_model(_inputs(trainer, tiny)).logprobs.sum().backward()
    started = time.perf_counter()
    inputs = _inputs(trainer, micro)
    if Need.REFERENCE in trainer.settings.objective.needs:
        trainer.reference_logprobs(inputs)
    if trainer.settings.objective.needs_first_look:
        with torch.no_grad():
            policy_model(inputs)
    policy_model(inputs).logprobs.sum().backward()
    if policy_model.device.type != "cpu":
        torch.accelerator.synchronize()
    seconds = time.perf_counter() - started
    trainer.optimizer.discard()
    return seconds


def worst_micro_batch(trainer: Trainer, shape: StepShape) -> MicroBatch:
    """Return a micro-batch with as many of the longest rows as the token budget allows."""
    budget, shared = trainer.settings.token_budget, trainer.check.shared_prefix
    if shape.prompt + shape.completion > budget:
        raise ValueError(
            f"token_budget = {budget}: a prompt of {shape.prompt} with a completion of {shape.completion} tokens would "
            f"be refused; set at least {shape.prompt + shape.completion}"
        )
    per_row = min(shape.group, (budget - shape.prompt) // shape.completion) if shared else 1
    rows = max(1, budget // (shape.prompt + per_row * shape.completion))
    vocab_size = trainer.policy_model.vocab_size
    groups = [synthetic_group(vocab_size, shape.prompt, shape.completion, per_row)] * rows
    return _first_micro_batch(trainer, groups, budget)


def _first_micro_batch(trainer: Trainer, groups: Sequence[Group], budget: int) -> MicroBatch:
    check = trainer.check
    plan, *_ = plan_micro_batches(groups, budget, shared_prefix=check.shared_prefix, packed=check.packed)
    return build_micro_batch(plan, groups)


def _inputs(trainer: Trainer, micro: MicroBatch) -> ModelInputs:
    return to_model_inputs(micro, shared_prefix=trainer.check.shared_prefix, device=trainer.policy_model.device)
