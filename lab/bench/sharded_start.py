"""Start a trainer on two ranks from slices, compare it with a dense load, and measure its memory; try hub names.

    python -m lab.bench.sharded_start    a minute; writes rows gpu.2.bits, gpu.2.memory and gpu.9.hub

Two gloo ranks load SmolLM2-135M as a run does. Each compares every slice with the rows of the model that transformers
loads whole. The memory is the peak resident memory of the rank during the start, above what it had just before. The
last row counts the tests of tests/test_hub.py, which use a stand-in of the hub on loopback.
"""

import sys
from pathlib import Path
from typing import Any, cast

import torch

from lab.figures import Figure, command_parser, record
from lab.fixtures import smollm2
from lab.fixtures.pytest_runs import run_tests
from offbeat.trainer.fsdp import Ranks, named_tensors, own_rows
from offbeat.trainer.loading import load_policy_model
from offbeat.types import Json
from tests.fixtures.memory import peak_bytes, reset_peak, resident_bytes
from tests.fixtures.ranks import run_ranks

RANKS, REPEATS = 2, 3
MEMORY_GOAL = 1.3


def start(ranks: Ranks, directory: str) -> Json:
    """Load this rank's slices; return the growth of memory and the bytes of the slices."""
    torch.set_num_threads(1)
    before = resident_bytes()
    reset_peak()
    policy_model = load_policy_model(Path(directory), ranks, compute=torch.bfloat16)
    grown = peak_bytes() - before
    slices = (own_rows(name, tensor)[1] for name, tensor in named_tensors(policy_model))
    return {"grown": grown, "slice": sum(rows.numel() * rows.element_size() for rows in slices)}


def compare(ranks: Ranks, directory: str) -> Json:
    """Compare slices and buffers with a dense load; return how many are equal, and how many there are."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = load_policy_model(Path(directory), ranks, compute=torch.bfloat16)
    dense = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    whole = {**dict(dense.named_parameters()), **dict(dense.named_buffers())}
    equal = []
    for name, tensor in [*model.model.named_parameters(), *model.model.named_buffers()]:
        first, rows = own_rows(name, tensor.detach())
        equal.append(torch.equal(rows, whole[name][first : first + len(rows)]))
    return {"equal": sum(equal), "total": len(equal)}


def bits(directory: str) -> Figure:
    """Row gpu.2.bits."""
    found = cast(list[dict[str, Any]], run_ranks(compare, RANKS, (directory,), silence=60.0))
    equal, total = sum(rank["equal"] for rank in found), sum(rank["total"] for rank in found)
    return Figure(
        "gpu.2.bits",
        "sharded start from safetensors: slices and buffers that equal the rows of a dense load bit for bit",
        "all",
        f"{equal} of {total}",
        "tensors",
        equal == total > 0,
        total,
        f"SmolLM2-135M, stored in bfloat16, loaded as float32 slices on {RANKS} gloo ranks",
    )


def memory(directory: str) -> Figure:
    """Row gpu.2.memory."""
    found: list[dict[str, Any]] = []
    for _ in range(REPEATS):
        found += cast(list[dict[str, Any]], run_ranks(start, RANKS, (directory,)))
    ratios = [rank["grown"] / rank["slice"] for rank in found]
    return Figure(
        "gpu.2.memory",
        "peak host memory of a rank during a sharded start, above what it had before, as a multiple of its slices",
        f"at most {MEMORY_GOAL}",
        round(max(ratios), 3),
        "×",
        max(ratios) <= MEMORY_GOAL,
        len(ratios),
        f"SmolLM2-135M on {RANKS} gloo ranks, slices of {found[0]['slice'] / 1e6:.0f} MB in float32; the largest of "
        f"{len(ratios)} ratios, the smallest is {min(ratios):.3f}. Resident memory by the kernel, imports of the "
        "model's code included",
    )


def hub() -> Figure:
    """Row gpu.9.hub."""
    done = run_tests("tests/test_hub.py")
    passed, total = done.passed, done.passed + done.failed
    return Figure(
        "gpu.9.hub",
        "checks of model.path = 'owner/name' that pass through a stand-in of the hub on loopback",
        "all",
        f"{passed} of {total}",
        "checks",
        done.ok and passed == total > 0,
        total,
        "training and resume with a pinned commit, a moved branch, refusal of code and pickles before weights are "
        "downloaded, a download that breaks off, unknown names, no network",
    )


def main() -> bool:
    command_parser(__doc__).parse_args()
    directory = str(smollm2.directory())
    return record(memory(directory), bits(directory), hub())


if __name__ == "__main__":
    sys.exit(not main())
