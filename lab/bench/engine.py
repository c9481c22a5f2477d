"""Measure the vLLM engine: what it serves after a load, and what a load costs.

    python -m lab.bench.engine parity   tied and untied models, perturbed and synced five times, against transformers:
                                        rows weights-rollout.3.tied, .untied and .unrepaired
    python -m lab.bench.engine sync     loads while it generates: version spans, labels and prefix cache;
                                        rows weights-rollout.4.spans, .versions and .cache
    python -m lab.bench.engine pause    how long a load of SmolLM2 pauses generation, against a bare layerwise reload:
                                        rows weights-rollout.4.pause and rooms.4.pause

Minutes each. `--short` runs a small part and records nothing.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from lab.figures import Figure, command_parser, machine, report
from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.vllm import VllmEngine
from offbeat.rollout.vllm_settings import VllmSettings
from offbeat.rollout.vllm_versions import OnUpdate
from offbeat.rollout.vllm_worker import SharedWeights, WorkerPart
from tests.fixtures.engine_runs import (
    PROMPT,
    Unrepaired,
    Verdict,
    engine_for,
    judge,
    load_while_generating,
    probe_of,
    prompts,
    sync_rounds,
)
from tests.fixtures.tiny_model import save_llama


async def parity(short: bool) -> bool:
    """Rows weights-rollout.3.tied, .untied and .unrepaired."""
    rounds = 3 if short else 5
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for kind, tied, worker_part in (
            ("tied", True, WorkerPart),
            ("untied", False, WorkerPart),
            ("unrepaired", True, Unrepaired),
        ):
            directory = Path(scratch, kind)
            model = save_llama(directory, tied=tied, seed=1)
            async with engine_for(directory, worker_part=worker_part) as engine:
                found = await sync_rounds(engine, model, rounds)
            tokens = len(probe_of(model).values)
            if kind == "unrepaired":
                rows.append(
                    Figure(
                        "weights-rollout.3.unrepaired",
                        "syncs of a tied model without the repair of its head that the probe refuses",
                        "all",
                        found.passed.count(False),
                        f"of {rounds}",
                        not any(found.passed),
                        rounds,
                        f"max |Δlogp| after these syncs {min(found.after):.2g} to {max(found.after):.2g}",
                    )
                )
                continue
            rows.append(
                Figure(
                    f"weights-rollout.3.{kind}",
                    f"max |Δlogp| vLLM against transformers after every sync, {kind} head, float32",
                    "≤ 1e-4 after, clearly different before",
                    float(f"{max(found.after):.3g}"),
                    "nats",
                    max(found.after) <= 1e-4 and min(found.before) > 0.1 and all(found.passed),
                    rounds,
                    f"largest of {tokens} probe tokens in each of {rounds} perturb-and-sync rounds; before the sync "
                    f"{min(found.before):.2g} to {max(found.before):.2g}; the probe passed {sum(found.passed)} times",
                )
            )
    return report(short, *rows) or short


async def sync(short: bool) -> bool:
    """Rows weights-rollout.4.spans, .versions and .cache."""
    loads = 6 if short else 60
    found: dict[OnUpdate, Verdict] = {}
    modes: tuple[OnUpdate, ...] = ("keep", "drain")
    with tempfile.TemporaryDirectory() as scratch:
        for mode in modes:
            directory = Path(scratch, mode)
            model = save_llama(directory, tied=True, seed=2)
            async with engine_for(directory, on_update=mode) as engine:
                found[mode] = judge(await load_while_generating(engine, model, loads), model)
    keep, drain = found["keep"], found["drain"]
    count = sum(one.whole + one.spanning for one in found.values())
    what = f"{loads} loads while 16 completions compete for 8 slots, keeping and draining"
    rows = [
        Figure(
            "weights-rollout.4.spans",
            "completions whose version spans are not contiguous, covering and non-decreasing",
            "0; drained: none of two versions",
            keep.faults + drain.faults,
            "completions",
            keep.faults + drain.faults + drain.spanning == 0 and keep.spanning > 0,
            count,
            f"{what}: {keep.spanning} of {keep.whole + keep.spanning} kept and {drain.spanning} of "
            f"{drain.whole + drain.spanning} drained completions are of two versions or more",
        ),
        Figure(
            "weights-rollout.4.versions",
            "tokens labeled with a version that was not loaded",
            "0",
            keep.unloaded + drain.unloaded,
            "tokens",
            keep.unloaded + drain.unloaded == 0 and keep.first_gap <= 1e-4,
            count,
            f"labels are exact: up to the first change of version max |Δlogp| to transformers is {keep.first_gap:.2g}",
        ),
        Figure(
            "weights-rollout.4.cache",
            "max |Δlogp| to transformers of completions of one version, prompts repeated across versions",
            "≤ 1e-4: no key or value of another version",
            float(f"{max(keep.whole_gap, drain.whole_gap):.3g}"),
            "nats",
            max(keep.whole_gap, drain.whole_gap) <= 1e-4,
            keep.whole + drain.whole,
            f"three prompts of {PROMPT} tokens, prefix cache on, blocks of 32",
        ),
    ]
    return report(short, *rows) or short


async def pause(short: bool) -> bool:
    """Rows weights-rollout.4.pause and rooms.4.pause: a bare reload and ours by turns, the same weights."""
    from safetensors.torch import load_file

    from lab.fixtures.smollm2 import directory

    rounds = 2 if short else 12
    weights = load_file(directory() / "model.safetensors")
    engine = await VllmEngine.start(directory(), VllmSettings(max_model_len=512, max_num_seqs=32, threads=2))
    bare, ours = [], []
    try:
        for number in range(rounds + 1):  # the first load of a process is slower and does not count
            seconds = await bare_reload(engine, weights)
            asked = [Request(str(i), one, 4, Sampling(400, ()), i) for i, one in enumerate(prompts(8, number, 32))]
            generating = asyncio.create_task(engine.generate(asked))
            await asyncio.sleep(3.0)
            await engine.load(number + 1, weights.items())
            assert engine.last_pause is not None
            generating.cancel()
            await asyncio.wait([generating])
            if number:
                bare.append(seconds)
                ours.append(engine.last_pause)
    finally:
        await engine.close()
    ratio = statistics.median(ours) / statistics.median(bare)
    pairs = sorted(a / b for a, b in zip(ours, bare, strict=True))
    longest = Figure(
        "rooms.4.pause",
        "median pause of generation for a load of SmolLM2-135M in bf16, 32 completions being generated",
        "< 1",
        round(statistics.median(ours), 3),
        "s",
        statistics.median(ours) < 1.0,
        rounds,
        f"{spread(ours)}; the reload itself takes {spread(bare)} on an idle engine; {machine()}",
    )
    figure = Figure(
        "weights-rollout.4.pause",
        "median pause of generation for a load / median bare layerwise reload, SmolLM2-135M bf16",
        "≤ 1.2",
        round(ratio, 3),
        "ratio",
        ratio <= 1.2,
        rounds,
        f"ours {spread(ours)} with 32 completions being generated, bare {spread(bare)} on an idle engine; pairs "
        f"{pairs[0]:.2f} to {pairs[-1]:.2f}; {machine()}",
    )
    return report(short, figure, longest) or short


async def bare_reload(engine: VllmEngine, weights: Mapping[str, Tensor]) -> float:
    """Return the seconds of the reload alone, in an engine that is paused and idle."""
    llm = engine._llm
    with SharedWeights() as shared:
        shared.write((name, tensor) for name, tensor in weights.items() if name != "lm_head.weight")
        await llm.pause_generation(mode="keep", clear_cache=False)
        start = time.monotonic()
        await llm.collective_rpc("offbeat_reload", args=(shared.path, shared.table))
        seconds = time.monotonic() - start
        await llm.resume_generation()
    return seconds


def spread(seconds: Sequence[float]) -> str:
    """Format the median and the range."""
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


if __name__ == "__main__":
    commands = {"parity": parity, "sync": sync, "pause": pause}
    parser = command_parser(__doc__, short="run a small part and record nothing")
    parser.add_argument("what", choices=commands)
    arguments = parser.parse_args()
    sys.exit(not asyncio.run(commands[arguments.what](arguments.short)))
