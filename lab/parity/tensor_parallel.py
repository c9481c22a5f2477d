"""A vLLM engine split over two processes against transformers: versions, version spans, and wrong splits.

    python -m lab.parity.tensor_parallel      5 minutes; writes rows gpu.4.*

The model is a Llama of 4 heads and 2 key-value heads with biases, in float32, tied and untied. On CPU the two processes
stand for two GPUs: the loading, the splitting and the labels are the same code.
"""

import asyncio
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from transformers import LlamaForCausalLM

from lab.figures import Figure, command_parser, record
from tests.fixtures.engine_runs import (
    SHARDED,
    GenerationRun,
    MisSharded,
    Rounds,
    broken_loads,
    engine_for,
    gap,
    load_while_generating,
    span_faults,
    sync_rounds,
)
from tests.fixtures.tiny_model import save_llama

VERSIONS = 5
EXACT = 1e-4
"""Largest |Δlogp| of a token that was sampled by the version of its label; a wrong label gives more than 0.01."""


@dataclass(frozen=True)
class Split:
    """What one model showed on a split engine."""

    rounds: Rounds
    exact: int
    completions: int
    spanning: int
    """Completions of more than one version."""
    noticed: dict[str, bool]


def count_exact(run: GenerationRun, model: LlamaForCausalLM) -> int:
    """Count completions whose spans cover them and whose first span has the log-probs of its version."""
    exact = 0
    for version, state in run.states.items():
        model.load_state_dict(state)
        for prompt, completion in run.completions:
            first = completion.versions[0]
            labeled = not span_faults(completion) and all(span.version in run.states for span in completion.versions)
            exact += first.version == version and labeled and gap(model, prompt, completion, first.end) < EXACT
    return exact


async def measure(directory: Path, *, tied: bool) -> Split:
    """Start a right engine and a wrong one, and compare both with transformers."""
    model = save_llama(directory, tied=tied, heads=4, bias=True)
    async with engine_for(directory, tensor_parallel=2) as engine:
        rounds = await sync_rounds(engine, model, VERSIONS)
        run = await load_while_generating(engine, model, VERSIONS, after=VERSIONS)
    exact = count_exact(run, model)
    spanning = sum(len(completion.versions) > 1 for _, completion in run.completions)
    model = save_llama(directory, tied=tied, heads=4, bias=True)
    async with engine_for(directory, worker_part=MisSharded, tensor_parallel=2) as engine:
        noticed = await broken_loads(engine, model, [kind for kind in SHARDED if not (tied and kind == "lm_head")])
    return Split(rounds, exact, len(run.completions), spanning, noticed)


def main() -> int:
    """Run the command; return its exit status."""
    command_parser(__doc__).parse_args()
    splits = []
    for tied in (True, False):
        with tempfile.TemporaryDirectory() as place:
            splits.append(asyncio.run(measure(Path(place), tied=tied)))
    passed = sum(sum(split.rounds.passed) for split in splits)
    exact, completions = sum(split.exact for split in splits), sum(split.completions for split in splits)
    noticed = [noticed for split in splits for noticed in split.noticed.values()]
    difference = max(mean for split in splits for mean in split.rounds.means)
    setting = "tensor_parallel = 2 on two CPU processes, float32, Llama of 4 and 2 heads with biases, tied and untied"
    before = min(gap for split in splits for gap in split.rounds.before)
    figures = [
        Figure(
            "gpu.4.versions",
            "versions whose probe passed on a split engine",
            f"{2 * VERSIONS} of {2 * VERSIONS}",
            f"{passed} of {2 * VERSIONS}",
            "",
            passed == 2 * VERSIONS,
            2 * VERSIONS,
            f"{setting}; before each load the log-probs differed by at least {before:.2g}",
        ),
        Figure(
            "gpu.4.spans",
            "completions with exact version spans, loaded during generation on a split engine",
            "all",
            f"{exact} of {completions}",
            "",
            exact == completions and all(split.spanning for split in splits),
            completions,
            f"{sum(split.spanning for split in splits)} of them have several versions; first spans within {EXACT:g} of "
            "transformers at their version",
        ),
        Figure(
            "gpu.4.broken",
            "wrongly split weights that the probe noticed",
            "all",
            f"{sum(noticed)} of {len(noticed)}",
            "",
            all(noticed),
            len(noticed),
            f"the second process gets the first one's part of {', '.join(SHARDED)}; right loads in between passed",
        ),
        Figure(
            "gpu.4.difference",
            "largest mean |Δlogp| of a version to transformers on a split engine",
            "<= 1e-5",
            float(f"{difference:.2g}"),
            "nats",
            difference <= 1e-5,
            2 * VERSIONS,
            setting,
        ),
    ]
    return 0 if record(*figures) else 1


if __name__ == "__main__":
    sys.exit(main())
