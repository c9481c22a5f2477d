"""Token log-probs and entropies from hidden states, without a full-vocabulary logits tensor.

At vocabulary 49,152 the logits of 4,096 tokens take more memory than a 135M-parameter model. Here they exist for one
chunk of tokens at a time, in the forward pass and, recomputed, in the backward pass.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor


class TokenStats(NamedTuple):
    """For each token, its log-prob and the entropy of the distribution that predicts it."""

    logprobs: Tensor
    entropies: Tensor


def token_stats(
    hidden: Tensor,
    head: Tensor,
    token_ids: Tensor,
    *,
    bias: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 256,
) -> TokenStats:
    """log softmax((hidden · headᵀ + bias) / temperature) at `token_ids`, and its entropy, in float32.

    `hidden` [..., H] are the states that predict `token_ids` [...]; `head` is [V, H]. Both results are
    differentiable.

    >>> stats = token_stats(torch.zeros(3, 8), torch.zeros(16, 8), torch.tensor([0, 5, 15]))
    >>> [round(float(x), 4) for x in (stats.logprobs[0], stats.entropies[0])]
    [-2.7726, 2.7726]
    """
    if hidden.shape[:-1] != token_ids.shape:
        raise ValueError(f"hidden states {tuple(hidden.shape)} do not match token ids {tuple(token_ids.shape)}")
    if head.ndim != 2 or head.shape[1] != hidden.shape[-1]:
        raise ValueError(f"head {tuple(head.shape)} is not [vocabulary, {hidden.shape[-1]}]")
    shape = token_ids.shape
    logprobs, entropies = _ChunkedTokenStats.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]), head, bias, token_ids.reshape(-1), temperature, chunk_tokens
    )
    return TokenStats(logprobs.view(shape), entropies.view(shape))


def _log_softmax(hidden: Tensor, head: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return log-probs in at least float32, whatever dtype the matrix product has."""
    logits = hidden @ head.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if bias is not None:
        logits += bias
    if temperature != 1.0:
        logits /= temperature
    return torch.log_softmax(logits, -1)


class _ChunkedTokenStats(torch.autograd.Function):
    """Uses few buffers of one chunk's size: the backward pass overwrites log-probs with their own gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        temperature: float,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(token_ids.shape, dtype=dtype, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        for start in range(0, len(token_ids), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            log_p = _log_softmax(hidden[rows], head, bias, temperature)
            logprobs[rows] = log_p.gather(-1, token_ids[rows, None]).squeeze(-1)
            entropies[rows] = -_expected(log_p, log_p.exp())
        ctx.save_for_backward(hidden, head, bias, token_ids, entropies)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropies = grads
        hidden, head, bias, token_ids, entropies = ctx.saved_tensors
        need_hidden, need_head, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        # Sums over many chunks, so in float32 even if the head is bfloat16.
        grad_head = torch.zeros_like(head, dtype=entropies.dtype) if need_head else None
        grad_bias = torch.zeros_like(bias, dtype=entropies.dtype) if need_bias else None
        for start in range(0, len(token_ids), ctx.chunk_tokens):
            rows = slice(start, start + ctx.chunk_tokens)
            log_p = _log_softmax(hidden[rows], head, bias, ctx.temperature)
            grad_logits = _grad_logits(
                log_p,
                token_ids[rows],
                None if grad_logprobs is None else grad_logprobs[rows],
                None if grad_entropies is None else grad_entropies[rows],
                entropies[rows],
            )
            grad_logits /= ctx.temperature
            if grad_bias is not None:
                grad_bias += grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(grad_logits, head, out=grad_hidden[rows])
            if grad_head is not None:
                if grad_head.dtype == hidden.dtype:
                    grad_head.addmm_(grad_logits.T, hidden[rows])
                else:
                    grad_head += grad_logits.T @ hidden[rows]
        return (
            grad_hidden,
            None if grad_head is None else grad_head.to(head.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
        )


def _expected(values: Tensor, probabilities: Tensor) -> Tensor:
    """Σ p·x over the vocabulary, with 0 · -inf = 0. Overwrites `probabilities`."""
    return probabilities.mul_(values).nan_to_num_(nan=0.0).sum(-1)


def _grad_logits(
    log_p: Tensor, token_ids: Tensor, grad_logprobs: Tensor | None, grad_entropies: Tensor | None, entropies: Tensor
) -> Tensor:
    """∂log p_y/∂z = 1_y - p and ∂H/∂z = -p (log p + H). Overwrites `log_p`."""
    p = log_p.exp()
    if grad_entropies is None:
        grad = log_p.zero_()
    else:
        grad = log_p.add_(entropies[:, None]).mul_(p).nan_to_num_(nan=0.0).mul_(-grad_entropies[:, None])
    if grad_logprobs is not None:
        grad -= p.mul_(grad_logprobs[:, None])
        grad.scatter_add_(-1, token_ids[:, None], grad_logprobs[:, None].to(grad.dtype))
    return grad
