"""Token log-probs and entropies from hidden states, without a full-vocabulary logits tensor.

At vocabulary 49,152 the logits of 4,096 tokens take more memory than a 135M-parameter model. Here they exist for one
chunk of tokens at a time in the forward pass. The backward pass computes them again, for all tokens and one block of
the vocabulary at a time, so that it writes each part of the head's gradient once.
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


def _logits(hidden: Tensor, head: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return logits in at least float32, whatever dtype the matrix product has."""
    logits = hidden @ head.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if bias is not None:
        logits += bias
    if temperature != 1.0:
        logits /= temperature
    return logits


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
        largest, top = (logprobs.new_empty(len(logprobs), 1) for _ in range(2))
        for start in range(0, len(token_ids), chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            logits = _logits(hidden[rows], head, bias, temperature)
            log_p = torch.log_softmax(logits, -1)
            if any(ctx.needs_input_grad):
                largest[rows], index = logits.max(-1, keepdim=True)
                top[rows] = log_p.gather(-1, index)
            del logits
            logprobs[rows] = log_p.gather(-1, token_ids[rows, None]).squeeze(-1)
            entropies[rows] = -_expected(log_p, log_p.exp())
        ctx.save_for_backward(hidden, head, bias, token_ids, entropies, largest, top)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_logprobs, grad_entropies = grads
        hidden, head, bias, token_ids, entropies, largest, top = ctx.saved_tensors
        need_hidden, need_head, need_bias = ctx.needs_input_grad[:3]
        # A sum over blocks, so in float32 even if the states are bfloat16.
        grad_hidden = torch.zeros_like(hidden, dtype=entropies.dtype) if need_hidden else None
        grad_head = torch.empty_like(head) if need_head else None
        grad_bias = torch.empty_like(bias) if need_bias else None
        size = _block_size(len(head), len(token_ids), ctx.chunk_tokens)
        for start in range(0, len(head), size):
            block = slice(start, start + size)
            log_p = _logits(hidden, head[block], None if bias is None else bias[block], ctx.temperature)
            # In this order: subtracting the rounded logarithm of the sum of exponentials would lose a digit.
            log_p.sub_(largest).add_(top)
            grad_logits = _grad_logits(log_p, token_ids - start, grad_logprobs, grad_entropies, entropies)
            grad_logits /= ctx.temperature
            if grad_bias is not None:
                grad_bias[block] = grad_logits.sum(0)
            grad_logits = grad_logits.to(hidden.dtype)
            if grad_hidden is not None:
                if grad_hidden.dtype == hidden.dtype:
                    grad_hidden.addmm_(grad_logits, head[block])
                else:
                    grad_hidden += grad_logits @ head[block]
            if grad_head is not None:
                torch.mm(grad_logits.T, hidden, out=grad_head[block])
        return (None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_head, grad_bias, None, None, None)


def _block_size(vocabulary: int, tokens: int, chunk_tokens: int) -> int:
    """Return how much of the vocabulary fits for all tokens into the memory of a chunk with the whole vocabulary.

    Matrix products on GPUs are faster if it is a multiple of 128.

    >>> _block_size(49_152, 512, 512), _block_size(49_152, 4_000, 512)
    (49152, 6272)
    """
    size = max(1, vocabulary * chunk_tokens // max(tokens, chunk_tokens))
    return size if size < 128 or size == vocabulary else size - size % 128


def _expected(values: Tensor, probabilities: Tensor) -> Tensor:
    """Σ p·x over the vocabulary, with 0 · -inf = 0. Overwrites `probabilities`."""
    return probabilities.mul_(values).nan_to_num_(nan=0.0).sum(-1)


def _grad_logits(
    log_p: Tensor, index: Tensor, grad_logprobs: Tensor | None, grad_entropies: Tensor | None, entropies: Tensor
) -> Tensor:
    """∂log p_y/∂z = 1_y - p and ∂H/∂z = -p (log p + H), for a block in which y has this index. Overwrites `log_p`."""
    p = log_p.exp()
    if grad_entropies is None:
        grad = log_p.zero_()
    else:
        grad = log_p.add_(entropies[:, None]).mul_(p).nan_to_num_(nan=0.0).mul_(-grad_entropies[:, None])
    if grad_logprobs is not None:
        grad -= p.mul_(grad_logprobs[:, None])
        inside = (index >= 0) & (index < grad.shape[1])
        index = index.clamp(0, grad.shape[1] - 1)
        grad.scatter_add_(-1, index[:, None], (grad_logprobs * inside)[:, None].to(grad.dtype))
    return grad
