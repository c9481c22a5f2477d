"""Token log-probs and entropies from hidden states, without a full-vocabulary logits tensor.

At vocabulary 49,152 the logits of 4,096 tokens take more memory than a 135M-parameter model. Here they exist for one
chunk of tokens at a time in the forward pass. The backward pass computes them again, for all tokens and one block of
the vocabulary at a time, so that it writes each part of the head's gradient once. Where memory is cheaper than time,
`keep_logits` keeps them for the backward pass.
"""

from collections.abc import Iterator
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

TILE: Final = 1 << 18
"""Elements: 1 MB in float32, which stays in the cache of a CPU core from one operation to the next."""


class TokenStats(NamedTuple):
    """The log-prob of each token, and the entropy of the distribution that predicts it."""

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
    keep_logits: bool = False,
) -> TokenStats:
    """log softmax((hidden · headᵀ + bias) / temperature) at `token_ids`, and its entropy, in float32.

    `hidden` [..., H] are the states that predict `token_ids` [...]; `head` is [V, H]. Both results are
    differentiable. `keep_logits` saves the backward pass one of three products with the head, for the memory of the
    logits in the dtype of `hidden`.

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
        hidden.reshape(-1, hidden.shape[-1]), head, bias, token_ids.reshape(-1), temperature, chunk_tokens, keep_logits
    )
    return TokenStats(logprobs.view(shape), entropies.view(shape))


class _ChunkedTokenStats(torch.autograd.Function):
    """Logits exist in the dtype of the product, a chunk of tokens at a time, or all of them if they are kept.

    What is computed from them in float32 goes through one tile of rows after another, small enough for a CPU's cache.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        token_ids: Tensor,
        temperature: float,
        chunk_tokens: int,
        keep_logits: bool,
    ) -> tuple[Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        logprobs = torch.empty(token_ids.shape, dtype=dtype, device=hidden.device)
        entropies = torch.empty_like(logprobs)
        largest, total = (logprobs.new_empty(len(logprobs), 1) for _ in range(2))
        keep = keep_logits and any(ctx.needs_input_grad)
        kept = hidden.new_empty(len(hidden), len(head)) if keep else None
        for start in range(0, len(token_ids), chunk_tokens):
            chunk = slice(start, start + chunk_tokens)
            logits = torch.mm(hidden[chunk], head.T, out=None if kept is None else kept[chunk])
            for rows in _tiles(logits):
                at = slice(start + rows.start, start + rows.stop)
                z = _scaled(logits[rows], bias, temperature)
                largest[at] = z.amax(-1, keepdim=True)
                z -= largest[at]
                weights = z.exp()
                total[at] = weights.sum(-1, keepdim=True)
                log_total = total[at].log().squeeze(-1)
                logprobs[at] = z.gather(-1, token_ids[at, None]).squeeze(-1) - log_total
                entropies[at] = log_total - _finite(weights.mul_(z), bias).sum(-1) / total[at].squeeze(-1)
        ctx.save_for_backward(hidden, head, bias, token_ids, entropies, largest, total)
        ctx.temperature, ctx.chunk_tokens, ctx.logits = temperature, chunk_tokens, kept
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, head, bias, token_ids, entropies, largest, total = ctx.saved_tensors
        need_hidden, need_head, need_bias = ctx.needs_input_grad[:3]
        kept, ctx.logits = ctx.logits, None  # overwritten below: a second backward pass computes them again
        size = len(head) if kept is not None else _block_size(len(head), len(token_ids), ctx.chunk_tokens)
        # A sum over blocks, so in float32 even if the states are bfloat16.
        grad_hidden = torch.zeros_like(hidden, dtype=entropies.dtype) if need_hidden else None
        grad_head = torch.empty_like(head) if need_head else None
        grad_bias = torch.zeros_like(bias) if need_bias else None
        for start in range(0, len(head), size):
            block = slice(start, start + size)
            logits = hidden @ head[block].T if kept is None else kept
            bias_block = None if bias is None else bias[block]
            for rows in _tiles(logits):
                z = _scaled(logits[rows], bias_block, ctx.temperature).sub_(largest[rows])
                of_logprobs, of_entropies = (
                    None if one is None else one[rows, None] / ctx.temperature for one in grads
                )
                index = token_ids[rows] - start
                grad = _grad_logits(z, index, of_logprobs, of_entropies, entropies[rows, None], total[rows], bias)
                if grad_bias is not None:
                    grad_bias[block] += grad.sum(0)
                logits[rows] = grad
            if grad_hidden is not None:
                if grad_hidden.dtype == hidden.dtype:
                    grad_hidden.addmm_(logits, head[block])
                else:
                    grad_hidden += logits @ head[block]
            if grad_head is not None:
                torch.mm(logits.T, hidden, out=grad_head[block])
        return (None if grad_hidden is None else grad_hidden.to(hidden.dtype), grad_head, grad_bias, *(None,) * 4)


def _tiles(logits: Tensor) -> Iterator[slice]:
    """Split rows into tiles of about `TILE` elements on a CPU. A GPU takes all of them at once."""
    count, width = logits.shape
    rows = max(1, TILE // width) if logits.device.type == "cpu" else count
    return (slice(start, min(start + rows, count)) for start in range(0, count, rows))


def _scaled(logits: Tensor, bias: Tensor | None, temperature: float) -> Tensor:
    """Return a float32 copy with bias and temperature, or a float64 one of float64."""
    z = logits.to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    if bias is not None:
        z += bias
    if temperature != 1.0:
        z /= temperature
    return z


def _finite(products: Tensor, bias: Tensor | None) -> Tensor:
    """Make 0 · -inf = 0. Only a bias makes a logit infinite."""
    return products if bias is None else products.nan_to_num_(nan=0.0)


def _grad_logits(
    z: Tensor,
    index: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropies: Tensor | None,
    entropies: Tensor,
    total: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """∂log p_y/∂z = 1_y - p and ∂H/∂z = -p (log p + H), for a block in which y has this index. Overwrites `z`."""
    outer = torch.zeros_like(total) if grad_logprobs is None else -grad_logprobs
    if grad_entropies is None:
        grad = z.exp_().mul_(outer / total)
    else:
        p = z.exp().div_(total)
        grad = _finite(z.mul_(-grad_entropies).add_(outer - grad_entropies * (entropies - total.log())).mul_(p), bias)
    if grad_logprobs is not None:
        inside = (index >= 0) & (index < grad.shape[1])
        index = index.clamp(0, grad.shape[1] - 1)[:, None]
        grad.scatter_add_(-1, index, (grad_logprobs * inside[:, None]).to(grad.dtype))
    return grad


def _block_size(vocabulary: int, tokens: int, chunk_tokens: int) -> int:
    """Return how much of the vocabulary fits for all tokens into the memory of a chunk with the whole vocabulary.

    Matrix products on GPUs are faster if it is a multiple of 128.

    >>> _block_size(49_152, 512, 512), _block_size(49_152, 4_000, 512)
    (49152, 6272)
    """
    size = max(1, vocabulary * chunk_tokens // max(tokens, chunk_tokens))
    return size if size < 128 or size == vocabulary else size - size % 128
