"""Synchronous GRPO on an adapter without the parts of a run, around plain peft: no logs, workers, versions or trainer.

It shares only three leaves with offbeat: the engine that samples, the forward pass, the packing of rows.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.hf import HfEngine
from offbeat.seeds import derive
from offbeat.trainer.batch import build_micro_batch, plan_micro_batches
from offbeat.trainer.forward import PolicyModel, check_model, to_model_inputs
from offbeat.types import UNKNOWN, Group, Prompt

Reward = Callable[[list[int]], float]


def train(
    directory: Path, prompt_at: Callable[[int], Prompt], reward: Reward, *, lora: LoraConfig, steps: int, batch: int,
    size: int, tokens: int, lr: float, clip: tuple[float, float],
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Return A and B after the last step, by peft's names."""
    served, peft = (
        get_peft_model(AutoModelForCausalLM.from_pretrained(str(directory), dtype="float32"), lora) for _ in range(2)
    )
    own = {n.replace(".default.", "."): p for n, p in peft.named_parameters() if p.requires_grad}
    for name, parameter in own.items():
        limit = parameter.shape[1] ** -0.5 if "lora_A" in name else 0.0
        generator = torch.Generator().manual_seed(derive(0, "adapter", name))
        torch.nn.init.uniform_(parameter, -limit, limit, generator=generator)
    policy_model, engine = PolicyModel(peft.get_base_model()), HfEngine(served.get_base_model())
    assert check_model(policy_model, 4096).shared_prefix
    optimizer = torch.optim.AdamW(own.values(), lr=lr, weight_decay=0.0, fused=True)
    for step in range(steps):
        with torch.no_grad():
            for copy, trained in zip(served.parameters(), peft.parameters(), strict=True):
                copy.copy_(trained)
        places = range(step * batch, (step + 1) * batch)
        prompts = [prompt_at(place) for place in places]
        requests = [
            Request(f"g-{place}", prompt.token_ids, size, Sampling(tokens, (1,)), derive(0, "rollout", place))
            for place, prompt in zip(places, prompts, strict=True)
        ]
        answers = asyncio.run(engine.generate(requests))
        scores = np.array([[reward(one.token_ids.tolist()) for one in group] for group in answers], np.float32)
        advantages = scores - scores.mean(1, keepdims=True)
        groups = [Group(f"g-{p}", prompt, group) for p, prompt, group in zip(places, prompts, answers, strict=True)]
        if not advantages.any():
            continue
        optimizer.zero_grad()
        total = sum(len(one.token_ids) for group in groups for one in group.completions)
        for part in plan_micro_batches(groups, 4096, shared_prefix=True):
            inputs = to_model_inputs(build_micro_batch(part, groups), shared_prefix=True, device=policy_model.device)
            whole = [groups[g].completions[i] for g, i in part.completions]
            rows = policy_model(inputs).logprobs.split([len(one.token_ids) for one in whole])
            terms = []
            for (group, index), one, row in zip(part.completions, whole, rows, strict=True):
                assert one.behavior_logprobs is not UNKNOWN
                ratio = torch.exp(row.detach() - torch.from_numpy(np.array(one.behavior_logprobs)))
                a = float(advantages[group][index])
                passed = ratio <= 1 + clip[1] if a > 0 else ratio >= 1 - clip[0]
                terms.append(-a * torch.where(passed, row, 0.0).sum())
            (torch.stack(terms).sum() / total).backward()
        gradients = [parameter.grad for parameter in own.values()]
        norm = float(torch.nn.utils.get_total_norm(gradients))
        if norm > 1.0:
            torch._foreach_mul_(gradients, 1.0 / norm)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in own.items()}
