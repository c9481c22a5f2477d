"""Measure the memory of a run over its steps: SmolLM2-135M and vLLM through `offbeat.train`.

    python -m lab.bench.run_memory    200 steps of 2 prompts x 4 completions x 16 tokens, sync every 2 steps: rows
                                      throughput.2.flat and throughput.2.estimate; a quarter of an hour

The memory is what is resident in the process that drives and trains; the engine has a process of its own. `--short`
makes 8 steps and records nothing.
"""

import re
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Final

from lab.bench.training_arms import DTYPE_NAME
from lab.figures import Figure, command_parser, report
from lab.fixtures import smollm2
from offbeat.types import Json
from tests.fixtures.forced_lengths import lottery, prompts
from tests.fixtures.memory import peak_bytes, reset_peak, resident_bytes

STEPS: Final = 200
PROMPT, COMPLETION, GROUPS, SIZE = 24, 16, 2, 4
PERIOD: Final = 2
"""Steps from one sync to the next."""


@dataclass
class Memory:
    """Bytes of this process, sampled during a run."""

    base: int
    """After the imports, before the model is loaded."""
    resident: list[int] = field(default_factory=list)
    """After each step."""
    peaks: dict[str, int] = field(default_factory=dict)
    """The peak between two events of the run, by what happened in between; the largest of all steps."""
    estimate: str = ""
    """What the run itself estimated before its first step."""

    def __call__(self, event: Mapping[str, Json]) -> None:
        """Take a sample; a callback of `offbeat.train`."""
        kind = str(event["kind"])
        if kind == "estimated":
            self.estimate = str(event["memory"])
        self.peaks[kind] = max(self.peaks.get(kind, 0), peak_bytes())
        reset_peak()
        if kind == "step":
            self.resident.append(resident_bytes())
            print(f"{time.strftime('%X')} step {len(self.resident)}: {mebibytes(self.resident[-1])}", flush=True)

    @property
    def peak(self) -> int:
        return max(self.peaks.values())


def settings(steps: int) -> dict[str, Any]:
    return {
        "steps": steps,
        "prompts_per_step": GROUPS,
        "group_size": SIZE,
        "model": {"compute": DTYPE_NAME},
        "objective": {"preset": "rec-oneside-nois"},
        "sampling": {"max_tokens": COMPLETION, "ignore_eos": True},
        "engine": {"kind": "vllm", "max_prompt_tokens": PROMPT, "threads": 2},
        "workers": {"count": 1, "groups_at_once": GROUPS},
        "trainer": {"save_every": max(1, steps // 4), "token_budget": GROUPS * (PROMPT + SIZE * COMPLETION)},
        "sync": {"every": PERIOD},
        "evaluation": {"every": 0},
    }


def estimated(steps: int) -> dict[str, int]:
    """Return the bytes by purpose, copies included, as `offbeat check` estimates them before anything is loaded."""
    from offbeat.config import parse
    from offbeat.preflight.forecast import ModelFiles, forecast

    expected = forecast(parse(settings(steps)), ModelFiles(smollm2.directory()))
    return expected.trainer | {f"copy: {name}": size for name, size in expected.copies.items()}


def measured(steps: int) -> Memory:
    """Train, and return the memory of this process."""
    # What a run imports as it goes: the base must hold it, since an estimate is of tensors alone.
    import vllm.v1.engine.async_llm  # noqa: F401  # isort: skip
    from transformers import AutoTokenizer

    import offbeat
    import offbeat.run.local

    rows = [
        {"prompt": text}
        for text in prompts(AutoTokenizer.from_pretrained(str(smollm2.directory())), PROMPT, steps * GROUPS)
    ]
    memory = Memory(resident_bytes())
    print(f"after the imports: {memory.base / 2**20:.0f} MiB", flush=True)
    with tempfile.TemporaryDirectory(prefix="offbeat-lab-", ignore_cleanup_errors=True) as place:
        reset_peak()
        offbeat.train(
            str(smollm2.directory()), lottery, rows, out=Path(place) / "run", progress=False, callbacks=[memory],
            **settings(steps),
        )  # fmt: skip
    assert len(memory.resident) == steps, f"{len(memory.resident)} steps instead of {steps}"
    return memory


def quarters(values: Sequence[int]) -> list[Sequence[int]]:
    """Cut samples into four equal parts.

    >>> quarters([1, 2, 3, 4, 5, 6, 7, 8])
    [[1, 2], [3, 4], [5, 6], [7, 8]]
    """
    each = len(values) // 4
    return [values[i * each : (i + 1) * each] for i in range(4)]


def figures(memory: Memory, terms: Mapping[str, int]) -> list[Figure]:
    parts = [median(part) for part in quarters(memory.resident)]
    flat = parts[3] / parts[1]
    known = memory.base + sum(terms.values())
    ratio = memory.peak / known
    run = f"SmolLM2-135M in {DTYPE_NAME}, vLLM in bfloat16, {GROUPS} x {SIZE} x {COMPLETION} tokens, v = {PERIOD}"
    found = re.match(r"[\d.]+ \w+", memory.estimate)
    return [
        Figure(
            "throughput.2.flat",
            f"resident memory of the training process, last quarter of {len(memory.resident)} steps over the second: "
            f"{run}",
            "<= 1.05",
            round(flat, 3),
            "ratio",
            flat <= 1.05,
            len(memory.resident),
            f"medians by quarter {', '.join(mebibytes(part) for part in parts)}; sampled after each step; the process "
            "drives, trains and publishes, the engine has its own; a publish every 2 steps, 4 checkpoints",
        ),
        Figure(
            "throughput.2.estimate",
            f"peak of the training process over the estimate of `offbeat check` plus what imports take: {run}",
            "<= 1.15",
            round(ratio, 3),
            "ratio",
            ratio <= 1.15,
            len(memory.resident),
            f"peak {mebibytes(memory.peak)}, of which {mebibytes(memory.base)} after the imports, before the model; "
            f"estimate {mebibytes(sum(terms.values()))} ({listed(terms)}); the run's own estimate of a step "
            f"{found.group() if found else 'missing'}; highest peak before each kind of event: {listed(memory.peaks)}",
        ),
    ]


def mebibytes(size: float) -> str:
    return f"{size / 2**20:.0f} MiB"


def listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {mebibytes(size)}" for name, size in sizes.items())


def main() -> bool:
    short = command_parser(__doc__, short="8 steps; record nothing").parse_args().short
    steps = 8 if short else STEPS
    memory = measured(steps)
    return report(short, *figures(memory, estimated(steps))) or short  # 8 steps are too few to be flat


if __name__ == "__main__":
    sys.exit(not main())
