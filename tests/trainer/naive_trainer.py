"""A slow reference trainer: one completion at a time, full logits, published formulas, AdamW by hand."""

import math

import torch
from naive import Case, naive_loss
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.seeds import derive
from offbeat.types import Group


def naive_step(
    model: PreTrainedModel, groups: list[Group], preset: str, *, updates: int, rate: float, clip: float = 1.0
) -> float:
    """Make `updates` updates on `groups` from fresh AdamW moments; return the norm of the last gradient."""
    parameters = list(model.parameters())
    moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in parameters]
    proximal: list[list[Tensor]] = []
    norm = 0.0
    for update in range(1, updates + 1):
        policy = [[_logprobs(model, group, i) for i in range(len(group.completions))] for group in groups]
        proximal = proximal or [[logprobs.detach() for logprobs in row] for row in policy]
        case = Case(
            rewards=[[c.score.reward for c in group.completions] for group in groups],
            policy=policy,
            behavior=[[torch.from_numpy(c.behavior_logprobs.copy()) for c in group.completions] for group in groups],
            proximal=proximal,
            seeds=[derive(0, "red-drop", group.id) for group in groups],
        )
        gradients = torch.autograd.grad(naive_loss(preset, case), parameters)
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        if norm == 0:
            break  # gates have stopped every token
        with torch.no_grad():
            for p, g, (mean, square) in zip(parameters, gradients, moments, strict=True):
                g = g * min(1.0, clip / norm)
                mean.mul_(0.9).add_(0.1 * g)
                square.mul_(0.999).add_(0.001 * g * g)
                p -= rate * (mean / (1 - 0.9**update)) / ((square / (1 - 0.999**update)).sqrt() + 1e-8)
    return norm


def _logprobs(model: PreTrainedModel, group: Group, i: int) -> Tensor:
    prompt, answer = (torch.tensor(x.tolist()) for x in (group.prompt.token_ids, group.completions[i].token_ids))
    logits = model(torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
    return logits.log_softmax(-1).gather(-1, answer[:, None])[:, 0]
