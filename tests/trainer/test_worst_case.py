"""The largest micro-batch of a run is computed before its first step; a step that does not fit says why."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offbeat.errors import StepOutOfMemory
from offbeat.placement.memory import RankMemory, explain_memory_errors
from offbeat.trainer.worst_case import StepShape, check_worst_case, worst_micro_batch
from tests.fixtures.small_trainer import digest_of, small_trainer
from tests.trainer.live_bytes import LiveBytes

SHAPE = StepShape(prompt=8, completion=8, group=4)


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
    assert check_worst_case(trainer, SHAPE) > 0
    assert digest_of(trainer) == before and trainer.optimizer.grad_norm() == 0


def test_an_error_that_is_not_about_memory_passes_unchanged() -> None:
    for error in (RuntimeError("shapes differ"), NotImplementedError("cannot allocate memory on this device")):
        with pytest.raises(type(error)), explain_memory_errors(None):
            raise error


@pytest.mark.parametrize("known", [True, False])
def test_memory_errors_name_the_largest_terms_and_the_setting(known: bool) -> None:
    held = {"gradients": 3 << 30, "AdamW": 2 << 30, "parameters": 1 << 30}
    memory = RankMemory(held, {"layer": {"activations": 9 << 30}}) if known else None
    for error in (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("can't allocate memory: x"),
    ):
        with pytest.raises(StepOutOfMemory, match="lower token_budget") as raised, explain_memory_errors(memory):
            raise error
        assert ("gradients: train on more ranks" in str(raised.value)) == known
        assert "parameters" not in str(raised.value) and raised.value.__cause__ is error


ROOT = Path(__file__).parent.parent.parent
LIMITED = """
import resource, torch
from tests.fixtures.small_trainer import small_trainer
from offbeat.errors import StepOutOfMemory
from offbeat.placement.memory import explain_memory_errors
from offbeat.trainer.worst_case import *
torch.set_num_threads(1)
trainer = small_trainer()
check_worst_case(trainer, StepShape(8, 8, 4))
object.__setattr__(trainer.settings, "token_budget", 1 << 22)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), used + (256 << 20)))
try:
    with explain_memory_errors(None):
        check_worst_case(trainer, StepShape(8, 100000, 4))
except StepOutOfMemory as error:
    print(error)
"""


@pytest.mark.engine
def test_a_process_that_runs_out_of_memory_says_why() -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert "a step does not fit into memory" in done.stdout and "lower token_budget" in done.stdout, done.stderr


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
