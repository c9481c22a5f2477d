"""Check flex_attention: packed rows, as a GPU computes them, against plain rows that transformers computes.

On CUDA the compiled kernel makes the forward and the backward pass. On CPU torch compiles only its forward pass, so the
backward pass there goes through the dense mask made from the same block lists.
"""

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from offbeat.preflight.doctor import Finding, FindingState
from offbeat.preflight.gpu.machine import ATTACH
from offbeat.run.quickstart import VOCABULARY, tiny_llama
from offbeat.trainer import flex
from offbeat.trainer.batch import build_micro_batch, plan_micro_batches
from offbeat.trainer.forward import UNLIMITED, PolicyModel, to_model_inputs
from offbeat.types import Completion, Group, Json, Prompt, Score, VersionSpan

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
