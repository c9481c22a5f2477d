"""Serve several versions of an adapter at once, and notice wrong ones.

    python -m lab.lora.serving    four versions in one vLLM batch against merged weights, in float32 and bf16; a stale
                                  id, a doubled scale and a missing layer against the probe: rows lora.2.*

Minutes.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

from lab.figures import Figure, command_parser, report
from lab.fixtures import smollm2
from offbeat.rollout.parity import Prober, ProbeVerdict
from offbeat.weights.probe import Sequences, probe_sequences
from tests.fixtures.adapted_model import AdaptedModel
from tests.fixtures.adapter_faults import KINDS, FaultyAdapters
from tests.fixtures.adapter_runs import Written, adapter_engine, faults_noticed, versions_in_one_batch
from tests.fixtures.engine_runs import VOCABULARY, prompts
from tests.fixtures.tiny_model import save_llama

VERSIONS = 4
SEQUENCES = probe_sequences([list(range(3, 30)), list(range(40, 10, -1))], VOCABULARY, seed=0)


async def exact(directory: Path, *, size: float, count: int) -> tuple[list[Written], AdaptedModel]:
    """Generate with four versions in one float32 batch, `count` completions each."""
    adapted = AdaptedModel.open(directory)
    async with adapter_engine(directory, adapted, slots=VERSIONS - 1, max_num_seqs=VERSIONS * count) as engine:
        written = await versions_in_one_batch(
            engine, adapted, prompts(count, seed=3), versions=VERSIONS, tokens=150, size=size
        )
    return written, adapted


async def in_bf16(directory: Path, sequences: Sequences, *, size: float) -> list[ProbeVerdict]:
    """Return the verdicts of three versions of a bf16 base, each checked while the earlier ones generate."""
    adapted = AdaptedModel.open(directory, dtype="bfloat16")
    verdicts = []
    async with adapter_engine(directory, adapted, slots=VERSIONS, dtype="bfloat16", threads=2) as engine:
        prober = await Prober.calibrated(engine, adapted.probe(sequences))
        for version in range(1, VERSIONS):
            await engine.load(version, adapted.move(version, size).items())
            verdicts.append(await prober.check(engine, adapted.probe(sequences)))
            engine.serve()
    return verdicts


async def noticed(directory: Path, *, each: int, size: float) -> dict[str, int]:
    """Count the wrong versions of each kind that the probe notices."""
    adapted = AdaptedModel.open(directory)
    async with adapter_engine(directory, adapted, worker_part=FaultyAdapters) as engine:
        return await faults_noticed(engine, adapted, SEQUENCES, each=each, size=size)


async def serving(short: bool) -> bool:
    """Rows lora.2.*."""
    each, count = (3, 2) if short else (20, 16)
    figures = []
    with tempfile.TemporaryDirectory() as place:
        tiny = Path(place)
        save_llama(tiny, tied=True)
        written, adapted = await exact(tiny, size=0.02, count=count)
        gap = max(one.gap(adapted) for one in written)
        spans = sum(len(one.completion.versions) == 1 for one in written)
        figures.append(
            Figure(
                "lora.2.batch",
                "largest |Δlogp| to merged weights, base and three adapters in one vLLM batch, float32, tiny Llama",
                "≤ 1e-4",
                float(f"{gap:.2g}"),
                "nats",
                gap <= 1e-4 and spans == len(written),
                len(written),
                f"{sum(len(one.completion.token_ids) for one in written)} tokens; {spans} of {len(written)} "
                "completions have one version span",
            )
        )
        counts = await noticed(tiny, each=each, size=0.002)
        figures += [
            Figure(
                f"lora.2.{kind.replace(' ', '-')}",
                f"adapters with a {kind} that fail their probe, vLLM in float32, tiny Llama",
                f"{each} of {each}",
                counts[kind],
                f"of {each}",
                counts[kind] == each,
                each,
                "every second load is wrong, every right one passed",
            )
            for kind in KINDS
        ]
    if not short:
        figures.append(await bf16_figure())
    return report(short, *figures) or short


async def bf16_figure() -> Figure:
    """Row lora.2.bf16."""
    from transformers import AutoTokenizer

    directory = smollm2.directory()
    tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    texts = [tokenizer(one).input_ids for one in ("The sum of 17 and 25 is 42, because", "A list of primes: 2, 3, 5")]
    verdicts = await in_bf16(directory, probe_sequences(texts, len(tokenizer), seed=0), size=3e-4)
    worst = max(verdict.gap / verdict.tolerance for verdict in verdicts)
    return Figure(
        "lora.2.bf16",
        "largest gap of an adapter to the trainer's log-probs / the probe's tolerance, SmolLM2-135M, bf16, vLLM",
        "≤ 1",
        round(worst, 3),
        "×",
        all(verdict.passed for verdict in verdicts),
        len(verdicts),
        "; ".join(str(verdict) for verdict in verdicts),
    )


if __name__ == "__main__":
    parser = command_parser(__doc__, short="fewer completions and faults, float32 only; records nothing")
    sys.exit(not asyncio.run(serving(parser.parse_args().short)))
