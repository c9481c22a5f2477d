"""What an engine must show: it serves each version that it loads, labels every token, and wakes as it fell asleep.

The reference is the same model in float32 on the CPU. Probes use vLLM's path for prompts, samples its path for single
tokens, which on a GPU is a captured CUDA graph: a graph that kept the previous weights would show only there.
"""

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaForCausalLM

from offbeat.preflight.gpu.models import doctor_llama
from offbeat.rollout.engine import Engine, Request, Sampling, Weights
from offbeat.rollout.parity import FLOOR, SLACK, Prober
from offbeat.run.quickstart import VOCABULARY
from offbeat.run.turns import GpuUser, SharedEngine, SharedGpu
from offbeat.trainer.forward import sequence_logprobs
from offbeat.types import UNKNOWN, Completion
from offbeat.weights.probe import Probe, probe_sequences

PROMPT: Final = (3, 12, 4, 13)
CACHE_BYTES: Final = 2 << 30
"""GPU memory for keys and values of an engine on trial. Its weights are tiny."""


async def load_and_compare(engine: Engine, *, tied: bool) -> dict[str, Any]:
    """Load two versions, the second while completions are generated; return problems and numbers."""
    model = doctor_llama(0, tied=tied)
    prober = await Prober.calibrated(engine, probe_of(model))
    tolerance = max(FLOOR, SLACK * _gap(model, await engine.generate([_request(0)])))
    problems: list[str] = []
    probe_gap = sampled_gap = 0.0
    for version in (1, 2):
        model = doctor_llama(version, tied=tied)
        running = asyncio.create_task(engine.generate([_request(10 * version, tokens=40)]))
        await asyncio.sleep(0.05)
        await engine.load(version, weights_of(model))
        problems += span_problems((await running)[0], {version - 1, version})
        verdict = await prober.check(engine, probe_of(model))
        if not verdict.passed:
            problems.append(f"version {version} was loaded but is not served: {verdict}")
        answers = await engine.generate([_request(version)])
        problems += span_problems(answers[0], {version})
        gap = _gap(model, answers)
        if not gap <= tolerance:
            problems.append(
                f"version {version}: mean |Δlogp| of sampled tokens is {gap:.2g}, tolerance {tolerance:.2g}"
            )
        probe_gap, sampled_gap = max(probe_gap, verdict.gap), max(sampled_gap, gap)
    numbers = {
        "probe gap": probe_gap,
        "probe tolerance": prober.tolerance,
        "sampled gap": sampled_gap,
        "sampled tolerance": tolerance,
    }
    return {"problems": problems, "numbers": {name: float(f"{value:.3g}") for name, value in numbers.items()}}


async def take_turns(gpu: SharedGpu, engine: SharedEngine, device: str) -> dict[str, Any]:
    """Give the GPU to the trainer and back; compare answers and memory before and after."""
    probe = [list(one) for one in _sequences()]
    before, answers = await engine.logprobs(probe), (await engine.generate([_request(5)]))[0]
    awake = _used_bytes(device)
    async with gpu.take(GpuUser.TRAINER):
        asleep = _used_bytes(device)
    after, again = await engine.logprobs(probe), (await engine.generate([_request(5)]))[0]
    moved = max(float(np.abs(a - b).mean()) for a, b in zip(before, after, strict=True))
    numbers = {"turns": gpu.changes, "difference": moved, "freed GB": round((awake - asleep) / 1e9, 2)}
    problems = []
    if not moved <= (FLOOR if device == "cpu" else 0.02):
        problems.append(f"after it woke, its log-probs differ by {moved:.2g}: it serves other weights")
    same = [a.token_ids.tolist() == b.token_ids.tolist() for a, b in zip(answers, again, strict=True)]
    if device == "cpu" and not all(same):
        problems.append(f"after it woke, {same.count(False)} of {len(same)} completions with the same seed differ")
    numbers["same completions"] = sum(same)
    if device == "cuda" and awake - asleep < CACHE_BYTES // 2:
        problems.append(f"asleep it lets go of only {(awake - asleep) / 1e9:.1f} GB of GPU memory")
    return {"problems": problems, "numbers": numbers}


def probe_of(model: LlamaForCausalLM) -> Probe:
    return Probe(_sequences(), sequence_logprobs(model, _sequences()))


def weights_of(model: LlamaForCausalLM) -> Weights:
    """Copies, because an engine may read them after the model has changed."""
    return [(name, tensor.detach().clone()) for name, tensor in model.state_dict().items()]


def span_problems(completions: Sequence[Completion], versions: set[int]) -> list[str]:
    """Return what is wrong with the version labels of some completions; empty if they are exact."""
    for one in completions:
        spans = one.versions
        edges = [0, *(span.end for span in spans)]
        joined = [span.start for span in spans] == edges[:-1] and edges[-1] == len(one.token_ids)
        rising = all(a.version < b.version for a, b in itertools.pairwise(spans))
        if not joined or not rising or not {span.version for span in spans} <= versions:
            shown = [(span.version, span.start, span.end) for span in spans]
            return [f"version spans {shown} of {len(one.token_ids)} tokens; expected versions {sorted(versions)}"]
    return []


def _sequences() -> tuple[tuple[int, ...], ...]:
    return probe_sequences([PROMPT], len(VOCABULARY), seed=0, length=40)


def _request(seed: int, tokens: int = 24) -> Request:
    return Request(f"trial-{seed}", PROMPT, 8, Sampling(tokens, ()), seed)


def _gap(model: LlamaForCausalLM, answers: list[tuple[Completion, ...]]) -> float:
    """Return the mean |Δlogp| of sampled tokens to the model."""
    gaps: list[NDArray[np.float32]] = []
    for one in answers[0]:
        assert one.behavior_logprobs is not UNKNOWN
        [expected] = sequence_logprobs(model, [[*PROMPT, *one.token_ids.tolist()]])
        gaps.append(np.abs(expected[len(PROMPT) - 1 :] - one.behavior_logprobs))
    return float(np.concatenate(gaps).mean())


def _used_bytes(device: str) -> int:
    if device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(0)
    return total - free
