"""The rows about the memory of a run, from samples."""

from lab.bench.run_memory import STEPS, Memory, figures, settings
from lab.bench.training_arms import DTYPE_NAME
from offbeat.config import parse

MIB = 1 << 20


def test_settings_are_valid_and_one_micro_batch_holds_the_batch() -> None:
    config = parse(settings(STEPS))
    assert config.model.compute == DTYPE_NAME and config.longest == 2
    assert config.trainer.token_budget == 2 * (24 + 4 * 16)


def test_rows_compare_quarters_and_add_the_imports_to_the_estimate() -> None:
    resident = [100 * MIB] * 2 + [200 * MIB] * 2 + [300 * MIB] * 2 + [220 * MIB] * 2
    memory = Memory(50 * MIB, resident, {"estimated": 90 * MIB, "step": 240 * MIB}, "1.2 GiB at the peak of a step\n")
    flat, estimate = figures(memory, {"AdamW": 100 * MIB, "gradients": 50 * MIB})
    assert flat.measured == 1.1 and not flat.holds and flat.n == 8
    assert estimate.measured == 1.2 and not estimate.holds
    assert "1.2 GiB" in estimate.note and "AdamW 100 MiB" in estimate.note and "estimated 90 MiB" in estimate.note
