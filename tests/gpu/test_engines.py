"""vLLM serves each version that it loads, labels every token, and leaves nothing behind when its owner is killed.

The reference is the same model in float32 on the CPU. Probes use vLLM's path for prompts, samples its path for single
tokens, which on a GPU is a captured CUDA graph: a graph that kept the previous weights would show only there.
"""

import asyncio
import itertools
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from offbeat.preflight.gpu_run import doctor_llama, save_model
from offbeat.rollout.engine import Engine, Request, Sampling
from offbeat.rollout.parity import FLOOR, SLACK, Prober
from offbeat.rollout.vllm import VllmEngine
from offbeat.rollout.vllm_settings import VllmSettings
from offbeat.run.quickstart import VOCABULARY
from offbeat.trainer.forward import sequence_logprobs
from offbeat.types import UNKNOWN, Completion, VersionSpan
from offbeat.weights.probe import Probe, probe_sequences
from tests.fixtures.engine_owner import LIMIT, session

PROMPT = (3, 12, 4, 13)
CACHE_BYTES = 2 << 30
KEPT_BYTES = 512 << 20
"""GPU memory that may differ before and after: other processes and allocators."""


async def start(directory: Path, device: str, split: int = 1) -> VllmEngine:
    return await VllmEngine.start(
        directory,
        VllmSettings(
            dtype="bfloat16" if device == "cuda" else "float32",
            max_model_len=64,
            max_num_seqs=8,
            gpu_memory_utilization=0.3,
            extra={"kv_cache_memory_bytes": CACHE_BYTES} if device == "cuda" else {},
            tensor_parallel=split,
            devices=tuple(range(split)) if device == "cuda" else None,
        ),
    )


async def load_and_compare(engine: Engine, *, tied: bool) -> list[str]:
    """Load two versions while completions are generated; return what is wrong with probes, samples and labels."""
    prober = await Prober.calibrated(engine, probe_of(doctor_llama(0, tied=tied)))
    tolerance = max(FLOOR, SLACK * sampled_gap(doctor_llama(0, tied=tied), await answers(engine, 0)))
    problems: list[str] = []
    for version in (1, 2):
        model = doctor_llama(version, tied=tied)
        running = asyncio.create_task(answers(engine, 10 * version, tokens=40))
        await asyncio.sleep(0.05)
        await engine.load(version, [(name, tensor.detach().clone()) for name, tensor in model.state_dict().items()])
        problems += span_problems(await running, {version - 1, version})
        verdict = await prober.check(engine, probe_of(model))
        problems += [] if verdict.passed else [f"version {version} was loaded but is not served: {verdict}"]
        found = await answers(engine, version)
        problems += span_problems(found, {version})
        gap = sampled_gap(model, found)
        problems += (
            [] if gap <= tolerance else [f"version {version}: |Δlogp| of samples is {gap:.2g} > {tolerance:.2g}"]
        )
    return problems


async def answers(engine: Engine, seed: int, tokens: int = 24) -> tuple[Completion, ...]:
    [found] = await engine.generate([Request(f"trial-{seed}", PROMPT, 8, Sampling(tokens, ()), seed)])
    return found


def probe_of(model: LlamaForCausalLM) -> Probe:
    sequences = probe_sequences([PROMPT], len(VOCABULARY), seed=0, length=40)
    return Probe(sequences, sequence_logprobs(model, sequences))


def sampled_gap(model: LlamaForCausalLM, completions: Sequence[Completion]) -> float:
    """Return the mean |Δlogp| of sampled tokens to the model."""
    gaps = []
    for one in completions:
        assert one.behavior_logprobs is not UNKNOWN
        [expected] = sequence_logprobs(model, [[*PROMPT, *one.token_ids.tolist()]])
        gaps.append(np.abs(expected[len(PROMPT) - 1 :] - one.behavior_logprobs))
    return float(np.concatenate(gaps).mean())


def span_problems(completions: Sequence[Completion], versions: set[int]) -> list[str]:
    """Return what is wrong with the version labels of some completions; empty if they are exact."""
    for one in completions:
        spans = one.versions
        edges = [0, *(span.end for span in spans)]
        joined = [span.start for span in spans] == edges[:-1] and edges[-1] == len(one.token_ids)
        rising = all(a.version < b.version for a, b in itertools.pairwise(spans))
        if not joined or not rising or not {span.version for span in spans} <= versions:
            return [f"version spans {spans} of {len(one.token_ids)} tokens; expected versions {sorted(versions)}"]
    return []


@pytest.mark.filterwarnings("default")  # imports of vLLM warn
@pytest.mark.parametrize(("tied", "most"), [(True, 1), (False, 2)], ids=["tied", "untied, split"])
def test_an_engine_serves_what_it_loads(tmp_path: Path, device: str, tied: bool, most: int) -> None:
    split = most if device == "cpu" else min(most, torch.cuda.device_count())
    torch.set_num_threads(1)
    save_model(tmp_path, tied=tied)

    async def trial() -> list[str]:
        engine = await start(tmp_path, device, split)
        try:
            return await load_and_compare(engine, tied=tied)
        finally:
            await engine.close()

    assert asyncio.run(trial()) == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU")
def test_the_memory_of_an_engine_comes_back_when_its_owner_is_killed(tmp_path: Path) -> None:
    save_model(tmp_path, tied=True)
    free = torch.cuda.mem_get_info(0)[0]
    command = [sys.executable, "-m", "tests.gpu.test_engines", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as owner:
        assert owner.stdout is not None and any("serving" in line for line in owner.stdout)
        owner.kill()
    deadline = time.monotonic() + LIMIT
    while session(owner.pid) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not session(owner.pid) and free - torch.cuda.mem_get_info(0)[0] < KEPT_BYTES


@pytest.mark.parametrize(
    ("spans", "right"),
    [
        ([(1, 0, 2), (2, 2, 4)], True),
        ([(2, 0, 4)], True),
        ([(1, 0, 2), (2, 3, 4)], False),
        ([(1, 0, 3)], False),
        ([(2, 0, 2), (1, 2, 4)], False),
        ([(0, 0, 4)], False),
    ],
)
def test_version_labels_must_cover_the_tokens_and_name_loaded_versions(
    spans: list[tuple[int, int, int]], right: bool
) -> None:
    one = object.__new__(Completion)  # an engine of another release could return what `Completion` would refuse
    object.__setattr__(one, "token_ids", [5, 6, 7, 8])
    object.__setattr__(one, "versions", tuple(VersionSpan(*span) for span in spans))
    assert (span_problems([one], {1, 2}) == []) is right


if __name__ == "__main__":

    async def own() -> None:
        await start(Path(sys.argv[1]), "cuda")
        print("serving", flush=True)
        await asyncio.sleep(600)

    asyncio.run(own())
