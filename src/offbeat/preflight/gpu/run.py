"""Try a run out: three steps as a user trains, and an engine that shares the GPU with a trainer in turns."""

import asyncio
import math
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch

from offbeat.events import EventKind
from offbeat.imports import missing_modules
from offbeat.preflight.doctor import Finding, FindingState
from offbeat.preflight.gpu.kernels import doctor_llama
from offbeat.preflight.gpu.machine import ATTACH
from offbeat.rollout.engine import Engine, Request, Sampling
from offbeat.rollout.hf import HfEngine
from offbeat.rollout.parity import FLOOR, Prober
from offbeat.run.journal import read
from offbeat.run.quickstart import VOCABULARY, tokenizer
from offbeat.run.turns import GpuUser, SharedEngine, SharedGpu
from offbeat.trainer.forward import sequence_logprobs
from offbeat.types import Json
from offbeat.weights.probe import Probe, probe_sequences

STEPS: Final = 3
PATIENCE: Final = 60.0
"""Seconds that a turn on the GPU waits for the calls of the other side."""
CACHE_BYTES: Final = 2 << 30
"""GPU memory for keys and values of the engine that sleeps. Its weights are tiny."""
SHARE: Final = 0.3
"""Share of the GPU that must be free for it."""
PROMPT: Final = (3, 12, 4, 13)
SAME: Final = {"cpu": FLOOR, "cuda": 0.02}
"""Largest mean |Δlogp| between two answers with the same weights."""


def even_digits(text: str, columns: Mapping[str, Json]) -> float:
    """Return the share of even digits: a random model earns different rewards at once, so every batch has a gradient.

    >>> even_digits("1224", {})
    0.75
    """
    return sum(character in "02468" for character in text) / max(1, len(text))


def check_training(device: str) -> Finding:
    """Train three steps, and read from the run's own record that rewards were earned and every version was probed."""
    import offbeat

    engine, dtype = "hf" if missing_modules(["vllm"]) else "vllm", "bfloat16" if device == "cuda" else "float32"
    with tempfile.TemporaryDirectory(prefix="offbeat-doctor-") as place:
        save_model(Path(place, "model"), tied=False)
        run = offbeat.train(
            f"{place}/model",
            even_digits,
            [{"prompt": f"{n}+{n}="} for n in range(10)],
            out=f"{place}/run",
            steps=STEPS,
            prompts_per_step=8,
            group_size=4,
            objective={"preset": "grpo"},
            sync={"every": 1},
            model={"compute": dtype, "serve": dtype},
            engine={"kind": engine, "max_prompt_tokens": 40},
            evaluation={"hold_out": 0},
            sampling={"max_tokens": 8},
            optimizer={"learning_rate": 1e-3},
            trainer={"token_budget": 2048},
            run={"patience": 100.0, "silence": 60.0},
        )
        return judge_training(list(read(run.directory.events)), engine)


def judge_training(events: Sequence[Mapping[str, Json]], engine: str) -> Finding:
    """Judge a run by its events."""
    steps = [cast("dict[str, Any]", event) for event in events if event["kind"] == EventKind.STEP]
    rewards = [step["metrics"].get("reward_mean") for step in steps]
    troubles = (EventKind.WORKER_LOST, EventKind.WORKER_RECOVERED, EventKind.FAILED)
    problems = [f"{event['kind']}: {event.get('why', '')}" for event in events if event["kind"] in troubles][:2]
    probed = {event["version"] for event in events if event["kind"] == EventKind.WORKER_READY}
    if len(rewards) != STEPS or not all(isinstance(one, float) and math.isfinite(one) for one in rewards):
        problems.append(f"rewards of {STEPS} steps expected, found {rewards}")
    if any(lag for step in steps for lag in step["lags"]):
        problems.append("a step trained on groups of an earlier version, although every step is published")
    if missing := set(range(STEPS)) - probed:
        problems.append(f"no worker loaded version {min(missing)} and passed its probe")
    if problems:
        detail = f"a run of {STEPS} steps with {engine}: {'; '.join(problems)}"
        fix = f"read the output in the report (--json); else {ATTACH}"
        return Finding("training", FindingState.BROKEN, detail, fix)
    shown = ", ".join(f"{one:.2f}" for one in rewards if isinstance(one, float))
    detail = f"{STEPS} steps in lockstep with {engine}, rewards {shown}; every version passed its probe"
    return Finding("training", FindingState.OK, detail, numbers={"rewards": rewards, "engine": engine})


def check_sleep(device: str) -> Finding:
    """Check that an engine which sleeps in the trainer's turn frees its memory and wakes with its weights.

    It applies where a run would do that: on one GPU. vLLM's sleep mode needs a GPU, so on CPU the transformers engine
    takes its turns in the same state machine.
    """
    if device == "cuda" and torch.cuda.device_count() > 1:
        why = "there are several GPUs, so trainer and engine do not share one"
        return Finding("sleep", FindingState.SKIPPED, why)
    with tempfile.TemporaryDirectory(prefix="offbeat-doctor-") as place:
        save_model(Path(place), tied=True)
        return asyncio.run(turns_of(partial(start_sleeper, Path(place), device), device))


async def start_sleeper(directory: Path, device: str) -> Engine:
    """Start the engine that sleeps: vLLM on a GPU, if it is installed."""
    if device == "cpu" or missing_modules(["vllm"]):
        return HfEngine.start(directory, device=device)
    from offbeat.rollout.vllm import VllmEngine

    room = {"kv_cache_memory_bytes": CACHE_BYTES}
    return await VllmEngine.start(
        directory, max_model_len=64, max_num_seqs=8, gpu_memory_utilization=SHARE, sleeps=True, extra=room
    )


async def turns_of(start: Callable[[], Awaitable[Engine]], device: str) -> Finding:
    """Start an engine in its turn, give the GPU to the trainer and back, and load a version after that."""
    gpu = SharedGpu(lambda turn: None, PATIENCE)
    engine = await gpu.start(start)
    try:
        problems, numbers = await take_turns(gpu, engine, device)
    finally:
        await engine.close()
    how = "vLLM cannot sleep on CPU, so the transformers engine did" if device == "cpu" else ""
    if problems:
        detail, fix = (
            "; ".join([*problems, *filter(None, [how])]),
            f"give trainer and engine different GPUs; else {ATTACH}",
        )
        return Finding("sleep", FindingState.BROKEN, detail, fix, numbers=numbers)
    how = how or f"{numbers['freed GB']:.1f} GB of GPU memory free while it slept"
    detail = f"the same answers after it woke, and it serves what it loads then; {how}"
    return Finding("sleep", FindingState.OK, detail, numbers=numbers)


async def take_turns(gpu: SharedGpu, engine: SharedEngine, device: str) -> tuple[list[str], dict[str, float]]:
    """Return what is wrong with answers and memory around a turn of the trainer, and the numbers of the comparison."""
    sequences = probe_sequences([PROMPT], len(VOCABULARY), seed=0, length=40)
    prober = await Prober.calibrated(engine, probe_of(0, sequences))
    before, answers = await engine.logprobs(sequences), await _answer(engine)
    awake = _used_bytes(device)
    async with gpu.take(GpuUser.TRAINER):
        freed = awake - _used_bytes(device)
    after, again = await engine.logprobs(sequences), await _answer(engine)
    moved = max(float(np.abs(a - b).mean()) for a, b in zip(before, after, strict=True))
    await engine.load(1, doctor_llama(1, tied=True).state_dict().items())
    engine.serve()
    verdict = await prober.check(engine, probe_of(1, sequences))
    numbers = {"turns": gpu.changes, "difference": moved, "freed GB": round(freed / 1e9, 2), "gap": verdict.gap}
    problems = []
    if not moved <= SAME[device]:
        problems.append(f"after it woke, its log-probs differ by {moved:.2g}: it serves other weights")
    if device == "cpu" and answers != again:
        problems.append("after it woke, completions with the same seed differ")
    if device == "cuda" and freed < CACHE_BYTES // 2:
        problems.append(f"asleep it lets go of only {freed / 1e9:.1f} GB of GPU memory")
    if not verdict.passed:
        problems.append(f"after it woke, a version was loaded but is not served: {verdict}")
    return problems, numbers


def probe_of(seed: int, sequences: Sequence[Sequence[int]]) -> Probe:
    """Return the probe that a trainer would publish with the weights of `doctor_llama(seed, tied=True)`."""
    return Probe(sequences, sequence_logprobs(doctor_llama(seed, tied=True), sequences))


def save_model(directory: Path, *, tied: bool) -> None:
    """Write the model with its tokenizer as a Hugging Face directory."""
    doctor_llama(tied=tied).save_pretrained(directory)
    tokenizer().save_pretrained(directory)


async def _answer(engine: Engine) -> list[list[int]]:
    [answers] = await engine.generate([Request("turns", PROMPT, 8, Sampling(24, ()), 5)])
    return [one.token_ids.tolist() for one in answers]


def _used_bytes(device: str) -> int:
    if device != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(0)
    return total - free
