"""Attention over rows with a shared prefix, without scores that the mask would discard.

A dense mask over a row [prompt, y_1 … y_G] costs (P + G·T)² scores. Here the row is split: the prompt attends to itself
and each completion to [prompt, itself], G·T·(P + T) scores. Then the results are joined again. transformers calls this
implementation by its registered name. GPUs use flex_attention instead (`flex.py`), which skips blocks of the scores.

Shapes: R rows, L tokens of the longest row, N completions, T tokens of the longest, P of the longest prompt, K = P + T.
"""

from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from offbeat.trainer.batch import PROMPT, MicroBatch

NAME: Final = "offbeat_shared_prefix"

EXPLICIT_SCORES: Final = 1 << 16
"""Up to this many scores T · K per head and completion, two matrix products are faster on CPU than the fused kernel,
whose backward pass is several times slower at such sizes. Beyond, the scores kept for the backward pass would cost too
much memory."""


class Segments(NamedTuple):
    """Indices of each completion's queries and keys in a flattened [R · L], and the attention biases.

    A bias is 0 where a query sees a key, −inf elsewhere.
    """

    prompt_bias_1PP: Tensor
    queries_NT: Tensor
    keys_NK: Tensor
    bias_NTK: Tensor
    result_indices_RL: Tensor
    """Where each token's result is, in prompts [R · P] followed by completions [N · T]."""


def find_segments(batch: MicroBatch, device: torch.device) -> Segments:
    """Return the segments of a micro-batch with shared prefixes. Indices of padding are arbitrary and never used."""
    (rows, length), present_NT = batch.segment_ids_RL.shape, batch.present_NT
    row_N = np.array([r for r, row in enumerate(batch.plan.rows) for _ in row.completions])
    prompts_R = (batch.segment_ids_RL == PROMPT).sum(-1)
    prompt, tokens = int(prompts_R.max()), present_NT.shape[1]
    own_RL = batch.segment_ids_RL > PROMPT
    queries_NT = np.zeros(present_NT.shape, np.int64)
    queries_NT[present_NT] = np.flatnonzero(own_RL)  # rows in order list the completions in order
    keys_NK = np.concatenate([row_N[:, None] * length + np.arange(prompt), queries_NT], axis=1)
    visible_NTK = np.empty((len(row_N), tokens, prompt + tokens), np.bool_)
    visible_NTK[:, :, :prompt] = (np.arange(prompt) < prompts_R[row_N, None])[:, None]
    visible_NTK[:, :, prompt:] = np.tri(tokens, dtype=np.bool_)
    result_indices_RL = np.zeros((rows, length), np.int64)
    result_indices_RL[:, :prompt] = np.arange(rows * prompt).reshape(rows, prompt)
    result_indices_RL[own_RL] = rows * prompt + np.flatnonzero(present_NT)
    return Segments(
        _bias(np.tri(prompt, dtype=np.bool_)[None]).to(device),
        torch.from_numpy(queries_NT).to(device),
        torch.from_numpy(keys_NK).to(device),
        _bias(visible_NTK).to(device),
        torch.from_numpy(result_indices_RL).to(device),
    )


def _bias(visible: NDArray[np.bool_]) -> Tensor:
    return torch.zeros(visible.shape, dtype=torch.bfloat16).masked_fill_(torch.from_numpy(~visible), -torch.inf)


def shared_prefix_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    segments: Segments | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Implement the attention interface of transformers: [R, heads, L, D] in, [R, L, heads, D] out.

    Without segments it calls sdpa.
    """
    if segments is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return plain
    prompt, heads, dim = segments.prompt_bias_1PP.shape[1], query.shape[1], value.shape[-1]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    of_prompts = _attend(
        query[:, :, :prompt], key[:, :, :prompt], value[:, :, :prompt], segments.prompt_bias_1PP, scale
    )
    of_completions = _attend(
        _gather(query, segments.queries_NT),
        _gather(key, segments.keys_NK),
        _gather(value, segments.keys_NK),
        segments.bias_NTK,
        scale,
    )
    both = [x.transpose(1, 2).reshape(-1, heads, dim) for x in (of_prompts, of_completions)]
    result = torch.cat(both).index_select(0, segments.result_indices_RL.flatten())
    return result.view(*segments.result_indices_RL.shape, heads, dim), None


def _gather(states: Tensor, indices: Tensor) -> Tensor:
    """Select tokens of [R, heads, L, D] at `indices` [N, S] into R · L; returns [N, heads, S, D]."""
    flat = states.transpose(1, 2).reshape(-1, states.shape[1], states.shape[3])
    return flat.index_select(0, indices.flatten()).view(*indices.shape, *flat.shape[1:]).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias_NTK: Tensor, scaling: float) -> Tensor:
    """Compute softmax(query · keyᵀ + bias) · value. Several query heads may share one key-value head."""
    batch, heads, tokens, _ = query.shape
    groups = key.shape[1]
    if bias_NTK[0].numel() > EXPLICIT_SCORES:
        bias = bias_NTK[:, None].to(query.dtype)
        return scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling, enable_gqa=True)
    grouped = (query * scaling).reshape(batch, groups, heads // groups * tokens, -1)
    scores = (grouped @ key.transpose(-1, -2)).view(batch, groups, heads // groups, tokens, -1)
    scores += bias_NTK[:, None, None]
    weights = scores.softmax(-1).view(batch, groups, heads // groups * tokens, -1)
    return (weights @ value).view(batch, heads, tokens, -1)


AttentionInterface.register(NAME, shared_prefix_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
