"""The memory of a step with an adapter: estimated before it, measured, and beside full training; SmolLM2-135M.

python -m lab.lora.memory    3 minutes; writes rows lora.5.smollm2, lora.5.smollm2-resident and lora.5.full
"""

import sys
from dataclasses import replace

import torch

from lab.bench.memory_estimate import HOW, Arm, measure, worst_ratio
from lab.figures import Figure, command_parser, record
from lab.fixtures import smollm2
from offbeat.config.sections import LINEAR_LAYERS
from offbeat.trainer.worst_case import StepShape
from offbeat.weights.adapter import AdapterSpec

ADAPTER = AdapterSpec(8, 32.0, LINEAR_LAYERS, base="")
FULL = Arm(torch.bfloat16, True, StepShape(96, 64, 8), 608)
ARMS = (replace(FULL, adapter=ADAPTER), replace(FULL, adapter=ADAPTER, checkpoint_activations=False))


def main() -> bool:
    command_parser(__doc__).parse_args()
    smollm2.directory()
    peaks = {arm: measure(arm) for arm in ARMS}
    worst = worst_ratio(peak.ratio for peak in peaks.values())
    resident = worst_ratio(peak.estimate / peak.resident for peak in peaks.values())
    arms = "; ".join(f"{arm}: {peak}" for arm, peak in peaks.items())
    what = "memory estimate before the run ÷ measured peak of the worst micro-batch with an adapter, SmolLM2-135M"
    full = measure(FULL)
    share = peaks[ARMS[0]].tensors / full.tensors
    return record(
        Figure(
            "lora.5.smollm2",
            f"{what}, worst arm",
            "0.85 to 1.15",
            round(worst, 3),
            "×",
            0.85 <= worst <= 1.15,
            len(peaks),
            f"{arms}. {HOW}",
        ),
        Figure(
            "lora.5.smollm2-resident",
            f"{what}, worst arm, with malloc as it comes",
            "0.85 to 1.15",
            round(resident, 3),
            "×",
            0.85 <= resident <= 1.15,
            len(peaks),
            f"{arms}. The rest is freed memory that malloc keeps on a CPU. A run measures the peak of its largest "
            "micro-batch before the first step",
        ),
        Figure(
            "lora.5.full",
            "measured peak of a step with an adapter of rank 8 ÷ that of full training, SmolLM2-135M",
            "stated",
            round(share, 3),
            "×",
            True,
            2,
            f"both {FULL}; full training {full}",
        ),
    )


if __name__ == "__main__":
    sys.exit(not main())
