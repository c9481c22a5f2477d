"""The memory of a step with an adapter: estimated before it, measured, and beside full training; SmolLM2-135M.

python -m lab.lora.memory    2 minutes; writes rows lora.5.smollm2 and lora.5.full
"""

import sys
from dataclasses import replace

import torch

from lab.bench.memory_estimate import Arm, measuring
from lab.figures import Figure, command_parser, record
from lab.fixtures import smollm2
from lab.fixtures.processes import run_to_end
from offbeat.config.adapter import LINEAR_LAYERS
from offbeat.trainer.estimate import StepShape
from offbeat.weights.adapter import AdapterSpec

ADAPTER = AdapterSpec(8, 32.0, LINEAR_LAYERS, base="")
FULL = Arm(torch.bfloat16, True, StepShape(96, 64, 8), 608)
ARMS = (replace(FULL, adapter=ADAPTER), replace(FULL, adapter=ADAPTER, checkpoint_activations=False))


def measured(arm: Arm) -> tuple[int, int]:
    """Return the estimate and the peak, in bytes."""
    [line] = run_to_end(measuring(arm))
    estimate, peak = map(int, line.split())
    return estimate, peak


def main() -> bool:
    command_parser(__doc__).parse_args()
    smollm2.directory()
    found = {arm: measured(arm) for arm in ARMS}
    ratios = {arm: estimate / peak for arm, (estimate, peak) in found.items()}
    worst = max(ratios.values(), key=lambda ratio: abs(ratio - 1))
    arms = [f"{arm}: {estimate / 2**30:.2f} of {peak / 2**30:.2f} GiB" for arm, (estimate, peak) in found.items()]
    _, full = measured(FULL)
    share = found[ARMS[0]][1] / full
    return record(
        Figure(
            "lora.5.smollm2",
            "memory estimate before the run ÷ measured peak of the worst micro-batch with an adapter, SmolLM2-135M, "
            "worst arm",
            "0.85 to 1.15",
            round(worst, 3),
            "×",
            0.85 <= worst <= 1.15,
            len(found),
            f"{'; '.join(arms)}. The peak is of resident memory beyond that after a step of a tiny model. Not "
            "estimated: freed memory that the allocator keeps between tensors. A run measures the peak of "
            "its largest micro-batch before the first step",
        ),
        Figure(
            "lora.5.full",
            "measured peak of a step with an adapter of rank 8 ÷ that of full training, SmolLM2-135M",
            "stated",
            round(share, 3),
            "×",
            True,
            2,
            f"both {FULL}; full training {full / 2**30:.2f} GiB",
        ),
    )


if __name__ == "__main__":
    sys.exit(not main())
