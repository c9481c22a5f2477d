"""Try a run out: attention against plain rows, three steps as a user trains, and an engine that shares the GPU."""

import asyncio
import math
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from offbeat.events import EventKind
from offbeat.imports import missing_modules
from offbeat.preflight.doctor import Finding, FindingState
from offbeat.preflight.gpu_session import ATTACH
from offbeat.rollout.engine import Engine, Request, Sampling
from offbeat.rollout.hf import HfEngine
from offbeat.rollout.parity import FLOOR, Prober
from offbeat.run.journal import read
from offbeat.run.quickstart import VOCABULARY, tiny_llama, tokenizer
from offbeat.run.turns import GpuUser, SharedEngine, SharedGpu
from offbeat.trainer import flex
from offbeat.trainer.batch import build_micro_batch, plan_micro_batches
from offbeat.trainer.forward import UNLIMITED, PolicyModel, sequence_logprobs, to_model_inputs
from offbeat.types import Completion, Group, Json, Prompt, Score, VersionSpan
from offbeat.weights.probe import Probe, probe_sequences

Layout = Sequence[tuple[int, Sequence[int]]]
"""For each group the tokens of its prompt and of its completions."""
LAYOUTS: Final[tuple[Layout, ...]] = (
    [(100, [50, 50])],
    [(7, [90, 30, 200])] * 4,
    [(300, [1, 2, 3])] * 2,
    [(3, [1])],
    [(60, [40] * 8), (5, [120, 1]), (129, [128, 127])],
)
EXACT: Final = {"cpu": 1e-5, "cuda": 1e-4}
"""Largest |Δlogp| in float32. Kernels of a GPU sum in another order and compute exp less exactly; a wrong mask gives
more than 0.1."""
GRADIENT: Final = 1e-3
"""Largest distance of all gradients together in float32, relative to their norm."""
ROUNDING: Final = 2.0
"""In bfloat16, packed rows may be this many times as far from float32 as plain rows are."""


class RowPass(NamedTuple):
    """Log-probs of all completion tokens, by group and completion, and the gradient of a weighted sum of them."""

    logprobs: Tensor
    gradient: Tensor


def check_flex(device: str) -> Finding:
    """Compare log-probs and gradients in float32 and bfloat16, and count the graphs that torch compiled."""
    torch.set_num_threads(1)
    flex.FUSED.graphs.clear()
    exact = PolicyModel(doctor_llama().to(device), packed=True)
    rounded = PolicyModel(doctor_llama().to(device, torch.bfloat16), packed=True)
    limits = {"logprobs": EXACT[device], "gradient": GRADIENT, "bf16 logprobs": ROUNDING, "bf16 gradient": ROUNDING}
    worst = dict.fromkeys(limits, 0.0)
    for number, layout in enumerate(LAYOUTS):
        groups = made_groups(layout, seed=number)
        plain, packed = row_pass(exact, groups, packed=False), row_pass(exact, groups, packed=True)
        half, half_packed = row_pass(rounded, groups, packed=False), row_pass(rounded, groups, packed=True)
        found = {
            "logprobs": float((packed.logprobs - plain.logprobs).abs().max()),
            "gradient": _distance(packed.gradient, plain.gradient),
            "bf16 logprobs": _ratio(half_packed.logprobs, half.logprobs, plain.logprobs),
            "bf16 gradient": _ratio(half_packed.gradient, half.gradient, plain.gradient),
        }
        worst = {name: value if math.isnan(value) else max(worst[name], value) for name, value in found.items()}
    graphs = flex.graphs_compiled()
    problems = [
        f"{name} of packed rows are off by {value:.2g}, more than {limits[name]:g}"
        for name, value in worst.items()
        if not value <= limits[name]  # NaN is not
    ] + graph_problems(graphs, device)
    numbers: dict[str, Json] = {**worst, "graphs": dict(graphs)}
    if problems:
        fix = f"update torch and the GPU driver together; if it stays, {ATTACH}"
        return Finding("flex", FindingState.BROKEN, "; ".join(problems), fix, numbers=numbers)
    how = "" if device == "cuda" else "; on CPU the forward pass is compiled, the backward pass is not"
    detail = (
        f"{len(LAYOUTS)} layouts: |Δlogp| at most {worst['logprobs']:.1g} (tolerance {EXACT[device]:g}), gradients "
        f"within {worst['gradient']:.1g}; bfloat16 {worst['bf16 logprobs']:.2f} times as far from float32 as plain "
        f"rows (tolerance {ROUNDING:g}); {max(graphs.values())} graph per mode{how}"
    )
    return Finding("flex", FindingState.OK, detail, numbers=numbers)


def row_pass(policy_model: PolicyModel, groups: list[Group], *, packed: bool) -> RowPass:
    """Compute all groups in one micro-batch, without and with gradients."""
    policy_model.model.set_attn_implementation(flex.NAME if packed else "sdpa")
    [plan] = plan_micro_batches(groups, UNLIMITED, shared_prefix=packed, packed=packed)
    micro, on_gpu = build_micro_batch(plan, groups), policy_model.device.type == "cuda"
    sizes = [len(groups[g].completions[c].token_ids) for g, c in plan.completions]
    # The compiled kernel: on CPU only for passes without gradients, and once, in float32, because compiling is slow.
    fused = on_gpu or policy_model.compute_dtype == torch.float32
    with torch.no_grad():
        inputs = to_model_inputs(micro, shared_prefix=packed, device=policy_model.device, fused=fused)
        logprobs = policy_model(inputs).logprobs.float()
    parts = dict(zip(plan.completions, logprobs.split(sizes), strict=True))
    policy_model.zero_grad()
    inputs = to_model_inputs(micro, shared_prefix=packed, device=policy_model.device, fused=on_gpu)
    weights = torch.cat(
        [torch.cos(torch.arange(n) + 7.0 * g + c) for (g, c), n in zip(plan.completions, sizes, strict=True)]
    )
    (policy_model(inputs).logprobs.float() * weights.to(logprobs.device)).sum().backward()
    gradient = torch.cat([p.grad.float().flatten() for p in policy_model.parameters() if p.grad is not None])
    return RowPass(torch.cat([parts[key] for key in sorted(parts)]), gradient)


def _distance(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def _ratio(found: Tensor, other: Tensor, exact: Tensor) -> float:
    """How much farther `found` is from `exact` than `other` is; the smallest distance that counts is 0.001."""
    return _distance(found, exact) / max(_distance(other, exact), 1e-3)


def graph_problems(graphs: dict[str, int], device: str) -> list[str]:
    expected = ["no grad", "grad"] if device == "cuda" else ["no grad"]
    compiled = {signature.split(",")[0] for signature in graphs}
    found = [f"flex_attention ran unfused: no graph was compiled ({mode})" for mode in expected if mode not in compiled]
    many = {signature: count for signature, count in graphs.items() if count > flex.GRAPH_LIMIT}
    return found + [f"flex_attention was compiled {count} times ({signature})" for signature, count in many.items()]


def doctor_llama(seed: int = 0, *, tied: bool = False) -> LlamaForCausalLM:
    """Return a random Llama in float32 whose weights bfloat16 can hold, with four heads and two key-value heads."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = tiny_llama(
            hidden_size=256,
            intermediate_size=256,
            num_attention_heads=4,
            num_key_value_heads=2,
            initializer_range=0.05,
            tie_word_embeddings=tied,
        ).eval()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model


def made_groups(layout: Layout, seed: int = 0) -> list[Group]:
    """Return groups of random tokens with rewards; every group has contrast.

    >>> [group] = made_groups([(3, [2, 5])])
    >>> len(group.prompt.token_ids), [len(one.token_ids) for one in group.completions]
    (3, [2, 5])
    """
    rng = np.random.default_rng(seed)

    def completion(name: str, i: int, size: int) -> Completion:
        tokens = rng.integers(2, len(VOCABULARY), size, np.int32)
        logprobs = rng.normal(-np.log(len(VOCABULARY)), 0.1, size).astype(np.float32)
        return Completion(f"{name}/{i}", tokens, logprobs, (VersionSpan(0, 0, size),), score=Score(float(i % 2)))

    groups = []
    for g, (prompt, sizes) in enumerate(layout):
        answers = tuple(completion(f"g{g}", i, size) for i, size in enumerate(sizes))
        groups.append(
            Group(f"g{g}", Prompt(f"p{g}", rng.integers(2, len(VOCABULARY), prompt, np.int32), "doctor"), answers)
        )
    return groups


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
    """Judge a run by its events. Lag 0 in every step proves a probe of every version: only then an engine generates."""
    steps = [cast("dict[str, Any]", event) for event in events if event["kind"] == EventKind.STEP]
    rewards = [step["metrics"].get("reward_mean") for step in steps]
    troubles = (EventKind.WORKER_LOST, EventKind.WORKER_RECOVERED, EventKind.FAILED)
    problems = [f"{event['kind']}: {event.get('why', '')}" for event in events if event["kind"] in troubles][:2]
    if len(rewards) != STEPS or not all(isinstance(one, float) and math.isfinite(one) for one in rewards):
        problems.append(f"rewards of {STEPS} steps expected, found {rewards}")
    if not all(step["lags"] and not any(step["lags"]) for step in steps):
        problems.append("a step trained on groups of an earlier version, although every step is published")
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
    from offbeat.rollout.vllm_settings import VllmSettings

    room = {"kv_cache_memory_bytes": CACHE_BYTES}
    settings = VllmSettings(max_model_len=64, max_num_seqs=8, gpu_memory_utilization=SHARE, sleeps=True, extra=room)
    return await VllmEngine.start(directory, settings)


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
