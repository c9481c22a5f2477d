"""Memory and time of a step are estimated before it; a step that does not fit says why."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offbeat.errors import StepOutOfMemory
from offbeat.trainer.estimate import (
    ADVICE,
    LiveBytes,
    MemoryEstimate,
    StepShape,
    check_worst_case,
    estimate_memory,
    explain_memory_errors,
    worst_micro_batch,
)
from offbeat.trainer.forward import to_model_inputs
from tests.fixtures.small_trainer import digest_of, small_trainer

SHAPE = StepShape(prompt=8, completion=8, group=4)


def test_the_terms_that_can_be_counted_by_hand_are_right() -> None:
    for dtype, expected in (
        (torch.float32, {"master weights": 4, "AdamW": 8, "gradients": 4}),
        (torch.bfloat16, {"master weights": 4, "AdamW": 8, "gradients": 4, "parameters": 2}),
    ):
        trainer = small_trainer(dtype=dtype, reference=True)
        numbers = sum(p.numel() for p in trainer.policy_model.parameters())
        terms = estimate_memory(trainer, SHAPE).terms
        for name, each in (expected | {"reference policy": dtype.itemsize}).items():
            scalars = (
                4 * len(list(trainer.policy_model.parameters())) if name == "AdamW" else 0
            )  # AdamW's step counters
            assert terms[name] == each * numbers + scalars, name
        assert terms.keys() <= ADVICE.keys()


def test_activations_are_estimated_from_shorter_rows() -> None:
    trainer = small_trainer()
    micro = worst_micro_batch(trainer, SHAPE)
    estimated = estimate_memory(trainer, SHAPE).terms["activations"]
    inputs = to_model_inputs(micro, shared_prefix=True, device=trainer.policy_model.device)
    with LiveBytes() as live:
        stats = trainer.policy_model(inputs)
        measured = live.now
    del stats
    assert estimated == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("shape", [SHAPE, StepShape(6, 3, 4), StepShape(40, 2, 2)])
def test_no_term_is_negative_however_many_short_rows_a_micro_batch_has(shape: StepShape) -> None:
    trainer = small_trainer()
    object.__setattr__(trainer.settings, "token_budget", 4000)
    estimate = estimate_memory(trainer, shape)
    assert min(estimate.terms.values()) > 0, estimate
    with LiveBytes() as live:
        check_worst_case(trainer, shape, estimate)
    step = sum(estimate.terms.get(name, 0) for name in ("gradients", "activations", "backward of a layer"))
    assert 0.8 <= step / live.peak <= 1.3


def test_the_worst_micro_batch_fills_the_budget_with_the_longest_rows() -> None:
    trainer = small_trainer()
    for shape, rows, length in ((SHAPE, 1, 40), (StepShape(8, 4, 2), 3, 16), (StepShape(2, 46, 4), 1, 48)):
        micro = worst_micro_batch(trainer, shape)
        assert micro.token_ids_RL.shape == (rows, length)
    with pytest.raises(ValueError, match=r"token_budget = 48: a prompt of 40 .* set at least 60"):
        worst_micro_batch(trainer, StepShape(40, 20, 4))


def test_the_worst_case_runs_and_changes_nothing() -> None:
    trainer = small_trainer(reference=True)
    before = digest_of(trainer)
    worst = check_worst_case(trainer, SHAPE, estimate_memory(trainer, SHAPE))
    assert digest_of(trainer) == before and trainer.optimizer.grad_norm() == 0
    assert worst.tokens == 40 and worst.seconds > 0 and worst.peak > 1 << 20


def test_an_error_that_is_not_about_memory_passes_unchanged() -> None:
    with pytest.raises(RuntimeError, match="shapes differ"), explain_memory_errors(MemoryEstimate({"AdamW": 1})):
        raise RuntimeError("shapes differ")


def test_memory_errors_name_the_largest_terms_and_the_setting() -> None:
    estimate = MemoryEstimate({"activations": 9 << 30, "gradients": 3 << 30, "AdamW": 2 << 30, "parameters": 1 << 30})
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("can't allocate memory: x"),
    ):
        with (
            pytest.raises(StepOutOfMemory, match=r"activations: lower token_budget") as raised,
            explain_memory_errors(estimate),
        ):
            raise error
        assert "parameters" not in str(raised.value) and raised.value.__cause__ is error


ROOT = Path(__file__).parent.parent.parent
LIMITED = """
import resource, torch
from tests.fixtures.small_trainer import small_trainer
from offbeat.trainer.estimate import *
torch.set_num_threads(1)
trainer = small_trainer()
estimate = estimate_memory(trainer, StepShape(8, 8, 4))
object.__setattr__(trainer.settings, "token_budget", 1 << 22)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), used + (256 << 20)))
try:
    check_worst_case(trainer, StepShape(8, 100000, 4), estimate)
except StepOutOfMemory as error:
    print(error)
"""


@pytest.mark.engine
def test_a_process_that_runs_out_of_memory_says_why() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert "a step does not fit into memory" in done.stdout and "activations: lower" in done.stdout, done.stderr


def test_live_bytes_follow_freed_tensors() -> None:
    with LiveBytes() as live:
        a = torch.zeros(10)
        view = a[2:]
        assert live.now == 40, "a view allocates nothing"
        a += 1
        del a
        assert live.now == 40, "the view keeps the storage alive"
        del view
        assert live.now == 0 and live.peak == 40
