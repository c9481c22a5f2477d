"""A slow reference implementation of every preset: float64, Python loops, the published formulas and autograd.

It shares no code with `offbeat.objective` except the preset names and, for RED-Drop, the seeded draw. M2PO stops
tokens within 1e-5 of the last one together with it, which the published algorithm leaves to the order.
"""

import math
import random
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Case:
    """A ragged batch: `policy[b][g]` is the 1-D tensor of a completion's token log-probs, and so on."""

    rewards: list[list[float]]
    policy: list[list[Tensor]]
    behavior: list[list[Tensor]]
    proximal: list[list[Tensor]]
    seeds: list[int]
    length_limit: int = 9

    @staticmethod
    def random(seed: int, groups: int, size: int, spread: float = 0.4) -> "Case":
        rng = np.random.default_rng(seed)

        def logprobs(center: np.ndarray) -> Tensor:
            return torch.from_numpy(center + spread * rng.normal(size=center.shape))

        rewards, policy, behavior, proximal = [], [], [], []
        for _ in range(groups):
            centers = [-3.0 + rng.normal(size=int(rng.integers(1, 6))) for _ in range(size)]
            behavior.append([torch.from_numpy(c) for c in centers])
            proximal.append([logprobs(c) for c in centers])
            policy.append([logprobs(c).requires_grad_() for c in centers])
            binary = rng.random() < 0.5
            rewards.append([float(rng.integers(0, 2)) if binary else float(rng.normal()) for _ in range(size)])
        return Case(rewards, policy, behavior, proximal, [int(s) for s in rng.integers(0, 1 << 60, size=groups)])


MASKED = {"grpo-masked", "grpo-off-policy", "dapo"}
WHITENED = {"grpo-masked", "grpo-off-policy"}
STD = {"grpo", "dapo", "cispo", "gspo", "m2po", "tis", "decoupled-ppo", "sequence-mask", "geometric-mask"}
PER_COMPLETION_MEAN = {"grpo", "grpo-masked", "grpo-off-policy", "gspo"}


def naive_loss(name: str, case: Case) -> Tensor:
    """Compute the loss of preset `name` on the whole batch."""
    kept = [_kept(name, rewards, seed) for rewards, seed in zip(case.rewards, case.seeds, strict=True)]
    credit = [_advantages(name, rewards, keep) for rewards, keep in zip(case.rewards, kept, strict=True)]
    trained = [(b, g) for b, keep in enumerate(kept) for g in keep]
    temperature = _temperature(name, case, credit, trained)
    stopped = _stopped_tokens(case, credit, trained) if name == "m2po" else set()
    values, tokens = [], 0
    for b, g in trained:
        pi, alpha, prox = case.policy[b][g], case.behavior[b][g], case.proximal[b][g]
        if name == "m2po":
            kept = [t for t in range(len(pi)) if (b, g, t) not in stopped]
            value = (credit[b][g] * (pi - alpha).exp())[kept].sum()
        elif name == "ess-gate":
            value = _ppo((pi - alpha).exp(), credit[b][g], 0.2, 0.2).sum()
            if _ess([case.policy[b][j] - case.behavior[b][j] for x, j in trained if x == b]) < 0.5:
                value = 0 * pi.sum()
        else:
            value = _completion(name, credit[b][g], pi, alpha, prox, temperature)
        if name in PER_COMPLETION_MEAN:
            value = value / len(pi)
        if name == "dr-grpo":
            value = value / case.length_limit
        values.append(value)
        tokens += len(pi)
    if not values:
        return torch.zeros((), dtype=torch.float64)
    by_sequence = name in PER_COMPLETION_MEAN | {"dr-grpo", "opmd", "topr"}
    return -sum(values, torch.zeros((), dtype=torch.float64)) / (len(values) if by_sequence else tokens)


def _stopped_tokens(
    case: Case, credit: list[dict[int, float]], trained: list[tuple[int, int]]
) -> set[tuple[int, int, int]]:
    """M2PO, algorithm 1: leave out the furthest outward token until the mean (log ρ)² of the others is at most 0.04."""
    left = {}
    for b, g in trained:
        for t, (pi, alpha) in enumerate(zip(case.policy[b][g].tolist(), case.behavior[b][g].tolist(), strict=True)):
            if (credit[b][g] > 0 and pi > alpha) or (credit[b][g] < 0 and pi < alpha):
                left[b, g, t] = abs(pi - alpha)
    stopped, last = set(), math.inf
    while left and sum(x * x for x in left.values()) / len(left) > 0.04:
        furthest = max(left, key=lambda place: left[place])
        last = left.pop(furthest)
        stopped.add(furthest)
    return stopped | {place for place, x in left.items() if x >= last - 1e-5}


def _ess(differences: list[Tensor]) -> float:
    ratios = [math.exp(float(d.detach().sum())) for d in differences]
    return sum(ratios) ** 2 / (len(ratios) * sum(r * r for r in ratios))


def naive_shrunk(rewards: list[float], scored: list[bool], prior: tuple[float, float], epsilon: float) -> list[float]:
    """Compute shrunk advantages: for each completion, a Beta posterior from the prior and the other completions."""
    found = []
    for i, reward in enumerate(rewards):
        if not scored[i]:
            found.append(0.0)
            continue
        right, wrong = prior
        for j, other in enumerate(rewards):
            if j != i and scored[j]:
                right, wrong = right + other, wrong + (1 - other)
        total = right + wrong
        scale = math.sqrt(right * wrong / (total * (total + 1)) + epsilon)
        found.append((reward - right / total) / scale)
    return found


def _kept(name: str, rewards: list[float], seed: int) -> list[int]:
    everyone = list(range(len(rewards)))
    if name in MASKED and max(rewards) - min(rewards) < 1e-9:
        return []
    if name == "red-drop":
        mean = sum(rewards) / len(rewards)
        below = [g for g in everyone if rewards[g] < mean - 1e-6]
        surplus = len(below) - (len(everyone) - len(below))
        dropped = random.Random(seed).sample(below, surplus) if surplus > 0 else []
        return [g for g in everyone if g not in dropped]
    return everyone


def _advantages(name: str, rewards: list[float], kept: list[int]) -> dict[int, float]:
    if not kept:
        return {}
    mean = 0.0 if name == "imitate" else sum(rewards[g] for g in kept) / len(kept)
    centred = {g: rewards[g] - mean for g in kept}
    squares = sum(a * a for a in centred.values())
    scale = 1.0
    if name in WHITENED:
        scale = math.sqrt(squares / len(kept) + 1e-4)
    if name in STD:
        scale = math.sqrt(squares / (len(kept) - 1)) + 1e-4
    shift = 0.1 if name == "asymre" else 0.0
    return {g: a / scale + shift for g, a in centred.items()}


def _temperature(name: str, case: Case, credit: list[dict[int, float]], trained: list[tuple[int, int]]) -> float:
    if name != "red-weight-adaptive":
        return 1.0
    pairs = [(credit[b][g], len(case.policy[b][g])) for b, g in trained]

    def push(t: float) -> float:
        return sum(a * math.exp(min(a / t, 10.0)) * n for a, n in pairs)

    if sum(a * n for a, n in pairs) >= 0 or push(100.0) >= 0:
        return 100.0
    if push(0.8) <= 0:
        return 0.8
    low, high = 0.8, 100.0
    while high - low > 1e-11:
        middle = (low + high) / 2
        low, high = (middle, high) if push(middle) > 0 else (low, middle)
    return low


def _ppo(ratio: Tensor, a: float, low: float, high: float) -> Tensor:
    return torch.minimum(ratio * a, ratio.clamp(1 - low, 1 + high) * a)


def _completion(name: str, a: float, pi: Tensor, alpha: Tensor, prox: Tensor, temperature: float) -> Tensor:
    """Compute the term of one completion, summed over its tokens."""
    ratio, r_prox = (pi - alpha).exp(), (pi - prox).exp()
    sg, trust = ratio.detach(), (prox - alpha).exp()
    match name:
        case "grpo" | "grpo-masked" | "dr-grpo" | "rec-oneside-is":
            return _ppo(ratio, a, 0.2, 0.2).sum()
        case "dapo":
            return _ppo(ratio, a, 0.2, 0.28).sum()
        case "grpo-off-policy":
            band = torch.maximum(torch.minimum(ratio, trust + 0.2), (trust - 0.2).clamp(min=0))
            return torch.minimum(ratio * a, band * a).sum()
        case "rec-oneside-nois":
            return sum(a * p for p, r in zip(pi, sg, strict=True) if (r <= 1.2 if a > 0 else r >= 0.8)) + 0 * pi.sum()
        case "rec-twoside":
            return sum(a * p for p, r in zip(pi, sg, strict=True) if 0.8 <= r <= 1.2) + 0 * pi.sum()
        case "rec-ring":
            far = [r <= 0.4 if a > 0 else r >= 3.0 for r in sg]
            return sum(a * p for p, r, f in zip(pi, sg, far, strict=True) if 0.8 <= r <= 1.2 or f) + 0 * pi.sum()
        case "red-drop" | "reinforce" | "asymre" | "imitate":
            return a * pi.sum()
        case "red-weight" | "red-weight-adaptive":
            return math.exp(min(a / temperature, 10.0)) * a * pi.sum()
        case "opmd":
            return a * pi.sum() - 0.1 / 2 * (pi.sum() - alpha.sum()) ** 2
        case "opmd-token":
            return sum(a * p - 0.1 / 2 * (p - q) ** 2 for p, q in zip(pi, alpha, strict=True)) + 0 * pi.sum()
        case "cispo":
            return (sg.clamp(max=5.0) * a * pi).sum()
        case "gspo":
            # Written per completion, |y| · min(sA, …), so that the common division by |y| leaves GSPO's own form.
            return len(pi) * _ppo((pi - alpha).mean().exp(), a, 3e-4, 4e-4)
        case "topr":
            taper = 1.0 if a >= 0 else min(float((pi - alpha).sum().detach().exp()), 1.0)
            return taper * a * pi.sum()
    inner = _ppo(r_prox, a, 0.2, 0.2)
    if name == "decoupled-ppo":
        return (trust * inner).sum()
    if name == "sequence-mask" and not 0.5 <= float((prox - alpha).sum().exp()) <= 2.0:
        return 0 * pi.sum()
    if name == "geometric-mask" and not 0.99 <= float((prox - alpha).mean().exp()) <= 1.01:
        return 0 * pi.sum()
    if name in {"tis", "sequence-mask", "geometric-mask"}:
        return (trust.clamp(max=2.0) * inner).sum()
    raise AssertionError(f"preset {name!r} has no naive reference: write one")
