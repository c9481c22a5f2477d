"""Synchronous GRPO without the parts of a run: no logs, no leases, no workers, no versions. One policy, one loop.

It shares only three leaves with offbeat: the engine that samples, the forward pass, the packing of rows.
"""

import asyncio
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.hf import HfEngine
from offbeat.seeds import derive
from offbeat.trainer.batch import build_micro_batch, plan_micro_batches
from offbeat.trainer.forward import PolicyModel, check_model, to_model_inputs
from offbeat.types import Completion, Group, Prompt


def train(
    directory: Path, prompt_at, reward, *, steps: int, batch: int, size: int, tokens: int, lr: float, clip: tuple
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the parameters after the last step and the mean reward of every step."""
    model = AutoModelForCausalLM.from_pretrained(str(directory), dtype="float32")
    policy_model, engine = PolicyModel(model), HfEngine(model)
    assert check_model(policy_model, 4096).shared_prefix
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0, fused=True)
    rewards = []
    for step in range(steps):
        places = range(step * batch, (step + 1) * batch)
        prompts: list[Prompt] = [prompt_at(place) for place in places]
        sampling = Sampling(tokens, (1,))
        requests = [
            Request(f"g-{place}", prompt.token_ids, size, sampling, derive(0, "rollout", place))
            for place, prompt in zip(places, prompts, strict=True)
        ]
        answers = asyncio.run(engine.generate(requests))
        scores = np.array([[reward(one.token_ids.tolist()) for one in group] for group in answers], np.float32)
        rewards.append(float(scores.mean()))
        advantages = scores - scores.mean(1, keepdims=True)
        groups = [Group(f"g-{p}", prompt, group) for p, prompt, group in zip(places, prompts, answers, strict=True)]
        if advantages.any():
            _update(policy_model, optimizer, groups, advantages, clip)
    return model.state_dict(), rewards


def _update(
    policy_model: PolicyModel,
    optimizer: torch.optim.Optimizer,
    groups: list[Group],
    advantages: np.ndarray,
    clip: tuple,
) -> None:
    """Step on −Σ A · log π over the tokens that the gate passes, divided by all tokens."""
    total = sum(len(one.token_ids) for group in groups for one in group.completions)
    optimizer.zero_grad()
    for part in plan_micro_batches(groups, 4096, shared_prefix=True):
        micro = build_micro_batch(part, groups)
        logprobs = policy_model(to_model_inputs(micro, shared_prefix=True, device=policy_model.device)).logprobs
        start = 0
        terms = []
        for group, index in part.completions:
            one: Completion = groups[group].completions[index]
            mine = logprobs[start : start + len(one.token_ids)]
            start += len(one.token_ids)
            behavior = torch.from_numpy(np.array(one.behavior_logprobs))
            ratio = torch.exp(mine.detach() - behavior)
            a = float(advantages[group][index])
            passed = ratio <= 1 + clip[1] if a > 0 else ratio >= 1 - clip[0]
            terms.append(-a * torch.where(passed, mine, 0.0).sum())
        (sum(terms) / total).backward()
    gradients = [parameter.grad for parameter in policy_model.parameters()]
    norm = float(torch.nn.utils.get_total_norm(gradients))
    if norm > 1.0:
        torch._foreach_mul_(gradients, 1.0 / norm)
    optimizer.step()
