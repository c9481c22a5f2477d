"""Figures of the vLLM engine: what it serves after a load, and what a load costs.

    python -m lab.bench.engine parity   tied and untied models, perturbed and synced five times, against transformers
    python -m lab.bench.engine sync     a load every few tokens while it generates: spans, labels, prefix cache
    python -m lab.bench.engine pause    how long SmolLM2 stands still for a load, against a bare layerwise reload

`--short` runs a small form of each and records nothing.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from lab.bench.engine_runs import (
    PROMPT,
    Judged,
    Unrepaired,
    engine_for,
    judge,
    load_while_generating,
    probe_of,
    prompts,
    sync_rounds,
)
from lab.figures import Figure, record
from lab.fixtures.tiny_model import save_llama
from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.vllm import OnUpdate, VllmEngine
from offbeat.rollout.vllm_worker import SharedWeights, WorkerPart


async def parity(short: bool) -> bool:
    """Must show 3."""
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
    return report(short, *rows)


async def sync(short: bool) -> bool:
    """Must show 4, all but the pause."""
    loads = 6 if short else 60
    found: dict[OnUpdate, Judged] = {}
    modes: tuple[OnUpdate, ...] = ("keep", "drain")
    with tempfile.TemporaryDirectory() as scratch:
        for mode in modes:
            directory = Path(scratch, mode)
            model = save_llama(directory, tied=True, seed=2)
            async with engine_for(directory, on_update=mode) as engine:
                found[mode] = judge(await load_while_generating(engine, model, loads), model)
    keep, drain = found["keep"], found["drain"]
    count = sum(one.whole + one.spanning for one in found.values())
    what = f"{loads} loads while 16 completions are asked for in 8 places, keeping and draining"
    return report(
        short,
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
            "tokens labelled with a version that was not loaded",
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
    )


async def pause(short: bool) -> bool:
    """Must show 4, the pause: bare and ours in turn, the same weights from the same memory."""
    from safetensors.torch import load_file

    from lab.fixtures.smollm2 import directory

    rounds = 2 if short else 12
    weights = load_file(directory() / "model.safetensors")
    engine = await VllmEngine.start(directory(), max_model_len=512, max_num_seqs=32, threads=2)
    bare, ours = [], []
    try:
        for number in range(rounds + 1):  # the first of a process is slower, and left out
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
    return report(
        short,
        Figure(
            "weights-rollout.4.pause",
            "median pause of generation for a load / median bare layerwise reload, SmolLM2-135M bf16",
            "≤ 1.2",
            round(ratio, 3),
            "ratio",
            ratio <= 1.2,
            rounds,
            f"ours {spread(ours)} with 32 completions being written, bare {spread(bare)} on an idle engine; pairs "
            f"{pairs[0]:.2f} to {pairs[-1]:.2f}; load average {os.getloadavg()[0]:.1f}",
        ),
    )


async def bare_reload(engine: VllmEngine, weights: Mapping[str, Tensor]) -> float:
    """Seconds of the recipe alone, called in the worker of a paused idle engine."""
    llm = engine._llm
    with SharedWeights() as shared:
        shared.write((name, tensor) for name, tensor in weights.items() if name != "lm_head.weight")
        await llm.pause_generation(mode="keep", clear_cache=False)
        start = time.monotonic()
        await llm.collective_rpc("offbeat_receive", args=(shared.path, shared.table))
        seconds = time.monotonic() - start
        await llm.resume_generation()
    return seconds


def spread(seconds: Sequence[float]) -> str:
    """Median and range."""
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f})"


def report(short: bool, *figures: Figure) -> bool:
    """Record the figures of a full run; of a short one, only say them."""
    if not short:
        return record(*figures)
    for figure in figures:
        print(f"{figure.id} (short form, not recorded)  {figure.what}: {figure.measured} {figure.unit}; {figure.note}")
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["parity", "sync", "pause"])
    parser.add_argument("--short", action="store_true", help="a small form that records nothing")
    arguments = parser.parse_args()
    command = {"parity": parity, "sync": sync, "pause": pause}[arguments.what]
    sys.exit(0 if asyncio.run(command(arguments.short)) else 1)
