"""Attention for GPUs: a micro-batch packed into one row [1, L], computed by one compiled flex_attention kernel.

Groups follow each other in the row, each as [prompt, y_1 … y_G]. A query sees its own completion up to itself and its
prompt; padding sees padding. The kernel visits only blocks of 128 × 128 scores that hold a visible one, so packing
costs nothing. The lists of these blocks come from the boundaries of the segments: nothing here is L × L.

The kernel is compiled once for all shapes. It never runs unfused: if torch cannot compile it, `UnfusedAttention` is
raised; if it is compiled again and again, a warning says so. On CPU torch refuses the backward pass of flex_attention,
so a packed row there goes through sdpa with a dense mask made from the same block lists.

Shapes: L tokens of the row, S segments, Q blocks of 128 tokens, W blocks in the longest list.
"""

import logging
from collections import Counter
from collections.abc import Callable
from functools import cached_property
from typing import Final, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch.fx import GraphModule
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from offbeat.errors import UnfusedAttention
from offbeat.trainer.batch import BLOCK, PADDING, PROMPT, MicroBatch

logger = logging.getLogger(__name__)

NAME: Final = "offbeat_packed"
GRAPH_LIMIT: Final = 2
"""Graphs per model and mode that need no warning: one for all shapes, and one in reserve."""

Indices = NDArray[np.int64]


class VisibleKeys(NamedTuple):
    """The keys that each query of the row sees: [own, query] and [prompt, prompt_end)."""

    own_L: Indices
    prompt_L: Indices
    prompt_end_L: Indices


class BlockLists(NamedTuple):
    """Pairs (query block, key block) that the kernel visits, in order. In a full pair every query sees every key."""

    partial: tuple[Indices, Indices]
    full: tuple[Indices, Indices]


class PackedMask(NamedTuple):
    """The mask of a packed row. It serves every pass over a micro-batch."""

    blocks: BlockMask
    dense_LL: Tensor | None
    """On CPU, what the blocks make visible. None runs the compiled kernel."""


def packed_mask(micro: MicroBatch, device: torch.device, *, fused: bool | None = None) -> PackedMask:
    """Make the mask of a packed micro-batch. `fused` chooses the compiled kernel, which is the default on a GPU.

    On CPU the compiled kernel has no backward pass.

    >>> from offbeat.trainer.batch import build_micro_batch, plan_micro_batches
    >>> from offbeat.types import UNKNOWN, Completion, Group, Prompt
    >>> group = Group("g", Prompt("p", [1, 2], "t"), tuple(Completion(f"g/{i}", [5], UNKNOWN) for i in range(2)))
    >>> plan = plan_micro_batches([group, group], 64, shared_prefix=True, packed=True)[0]
    >>> mask = packed_mask(build_micro_batch(plan, [group, group]), torch.device("cpu"))
    >>> mask.dense_LL[4:8, :8].int().tolist()
    [[0, 0, 0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0, 0, 1, 1, 1, 0], [0, 0, 0, 0, 1, 1, 0, 1]]
    """
    segment_ids_L, position_ids_L = micro.segment_ids_RL[0], micro.position_ids_RL[0]
    keys, lists = find_blocks(segment_ids_L, position_ids_L)
    blocks = to_block_mask(keys, lists, device)
    fused = device.type != "cpu" if fused is None else fused
    return PackedMask(blocks, None if fused else dense_mask(blocks))


def find_blocks(segment_ids_L: Indices, position_ids_L: Indices) -> tuple[VisibleKeys, BlockLists]:
    """Return the keys that each query sees, and the blocks that hold a visible score."""
    length = len(segment_ids_L)
    first_L = (segment_ids_L == PROMPT) & (position_ids_L == 0)  # two prompts meet if a completion is empty
    first_L[1:] |= segment_ids_L[1:] != segment_ids_L[:-1]
    first_L[0] = True
    start_S = np.flatnonzero(first_L)
    end_S = np.append(start_S[1:], length)
    kind_S = segment_ids_L[start_S]
    prompt_S = np.maximum.accumulate(np.where(kind_S == PROMPT, np.arange(len(start_S)), 0))
    has_prompt_S = (kind_S != PROMPT) & (kind_S != PADDING)
    prompt_start_S = np.where(has_prompt_S, start_S[prompt_S], 0)
    prompt_end_S = np.where(has_prompt_S, end_S[prompt_S], 0)
    segment_L = np.cumsum(first_L) - 1
    keys = VisibleKeys(start_S[segment_L], prompt_start_S[segment_L], prompt_end_S[segment_L])

    # Every query of a segment in a query block sees the same keys before that block.
    segment, query_block = _expand(start_S // BLOCK, (end_S - 1) // BLOCK + 1)
    block_end = (query_block + 1) * BLOCK
    queries = np.minimum(end_S[segment], block_end) - np.maximum(start_S[segment], block_end - BLOCK)
    own = (start_S[segment], np.minimum(end_S[segment], block_end))
    prompt = (prompt_start_S[segment], prompt_end_S[segment])
    pairs, scores = [], []
    for low, high in (own, prompt):
        which, key_block = _expand(low // BLOCK, np.where(high > low, (high - 1) // BLOCK + 1, low // BLOCK))
        overlap = np.minimum(high[which], (key_block + 1) * BLOCK) - np.maximum(low[which], key_block * BLOCK)
        pairs.append(query_block[which] * (length // BLOCK) + key_block)
        scores.append(queries[which] * overlap)
    pair, inverse = np.unique(np.concatenate(pairs), return_inverse=True)
    visible = np.bincount(inverse, np.concatenate(scores))
    query, key = np.divmod(pair, length // BLOCK)
    full = (visible == BLOCK * BLOCK) & (key < query)  # on the diagonal a query does not see the keys after it
    return keys, BlockLists((query[~full], key[~full]), (query[full], key[full]))


def _expand(low: Indices, high: Indices) -> tuple[Indices, Indices]:
    """List every range [low, high) in turn: the number of the range, and the value."""
    sizes = high - low
    which = np.repeat(np.arange(len(low)), sizes)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + low[which]


def to_block_mask(keys: VisibleKeys, lists: BlockLists, device: torch.device) -> BlockMask:
    """Copy the lists to `device`.

    `BlockMask.from_kv_blocks` would compute the lists by key block through a matrix of all pairs, and it takes the
    length of the longest list for the number of key blocks, so both lists are made here.
    """
    own_L, prompt_L, prompt_end_L = (torch.from_numpy(one.astype(np.int32)).to(device) for one in keys)

    def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        in_prompt = (key >= prompt_L[query]) & (key < prompt_end_L[query])
        return (key <= query) & ((key >= own_L[query]) | in_prompt)

    length = len(own_L)
    blocks = length // BLOCK
    # The CPU kernel, unlike that for GPUs, refuses lists of partial blocks that are shorter than the row.
    shortest = blocks if device.type == "cpu" else 2
    kv_counts, kv_indices = _index_lists(*lists.partial, blocks, device, shortest)
    full_kv_counts, full_kv_indices = _index_lists(*lists.full, blocks, device)
    q_counts, q_indices = _index_lists(*_transposed(*lists.partial), blocks, device)
    full_q_counts, full_q_indices = _index_lists(*_transposed(*lists.full), blocks, device)
    return BlockMask(
        seq_lengths=(length, length),
        kv_num_blocks=kv_counts,
        kv_indices=kv_indices,
        full_kv_num_blocks=full_kv_counts,
        full_kv_indices=full_kv_indices,
        q_num_blocks=q_counts,
        q_indices=q_indices,
        full_q_num_blocks=full_q_counts,
        full_q_indices=full_q_indices,
        BLOCK_SIZE=(BLOCK, BLOCK),
        mask_mod=visible,
    )


def _transposed(query: Indices, key: Indices) -> tuple[Indices, Indices]:
    order = np.lexsort((query, key))
    return key[order], query[order]


def _index_lists(
    row: Indices, column: Indices, blocks: int, device: torch.device, shortest: int = 2
) -> tuple[Tensor, Tensor]:
    """Return how many columns each row has [1, 1, Q], and which [1, 1, Q, W]. Pairs are ordered by row.

    Without the marks, torch would compile again where Q or W differ that were equal at first; W = 1 is another graph.
    """
    counts_Q = np.bincount(row, minlength=blocks)
    indices_QW = np.zeros((blocks, max(shortest, int(counts_Q.max()))), np.int32)
    indices_QW[row, np.arange(len(row)) - (np.cumsum(counts_Q) - counts_Q)[row]] = column
    counts = torch.from_numpy(counts_Q.astype(np.int32)[None, None]).to(device)
    indices = torch.from_numpy(indices_QW[None, None]).to(device)
    torch._dynamo.mark_dynamic(indices, (2, 3))
    torch._dynamo.mark_dynamic(counts, 2)
    return counts, indices


def dense_mask(mask: BlockMask) -> Tensor:
    """Return what the kernel makes visible, [L, L]: listed blocks only, full ones without a look at the scores."""
    length = mask.seq_lengths[0]
    index = torch.arange(length, device=mask.kv_indices.device)
    zero = index.new_zeros(())
    visible_LL = mask.mask_mod(zero, zero, index[:, None], index[None])
    partial, full = (
        _listed(counts, indices, length // BLOCK).repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
        for counts, indices in (
            (mask.kv_num_blocks, mask.kv_indices),
            (cast(Tensor, mask.full_kv_num_blocks), cast(Tensor, mask.full_kv_indices)),
        )
    )
    return (visible_LL & partial) | full


def _listed(counts: Tensor, indices: Tensor, blocks: int) -> Tensor:
    """True where a list [1, 1, Q, W] names a key block, [Q, Q]."""
    listed = torch.zeros(blocks, blocks, dtype=torch.bool, device=counts.device)
    row, place = torch.nonzero(torch.arange(indices.shape[-1], device=counts.device) < counts[0, 0, :, None]).T
    listed[row, indices[0, 0, row, place].long()] = True
    return listed


class FusedAttention:
    """flex_attention, compiled once for all shapes; `graphs` counts how often torch compiled it, by model and mode."""

    def __init__(self, backend: str = "inductor") -> None:
        self.graphs: Counter[str] = Counter()
        self._backend = backend

    @cached_property
    def _compiled(self) -> Callable[[Tensor, Tensor, Tensor, BlockMask], Tensor]:
        """Made at the first call, because it imports the compiler, which a run on CPU never needs."""
        # fullgraph: at its limit of graphs dynamo raises, instead of running the function as plain Python.
        return torch.compile(_attend, backend=self._compile, dynamic=True, fullgraph=True)

    @cached_property
    def _inner(self) -> Callable[..., Callable[..., object]]:
        return cast("Callable[..., Callable[..., object]]", torch._dynamo.lookup_backend(self._backend))

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
        """[1, heads, L, D] in and out. Raises `UnfusedAttention` if torch does not compile the kernel."""
        try:
            return self._compiled(query, key, value, mask)
        except FailOnRecompileLimitHit as error:
            raise UnfusedAttention(
                f"torch gave up on flex_attention after {self.graphs.total()} graphs ({dict(self.graphs)}); run with "
                "TORCH_LOGS=recompiles and report what it prints; models of several shapes belong in several processes"
            ) from error

    def _compile(self, graph: GraphModule, inputs: list[Tensor | torch.SymInt]) -> Callable[..., object]:
        shaped = [one for one in inputs if isinstance(one, Tensor) and one.ndim == 4 and one.is_floating_point()]
        mode = "grad" if any(one.requires_grad for one in shaped) else "no grad"
        query, *others = shaped
        heads = "/".join(str(int(one.shape[1])) for one in [query, *others[:1]])
        signature = f"{mode}, {heads} heads of {int(query.shape[-1])}, {query.dtype}, {query.device.type}"
        self.graphs[signature] += 1
        if self.graphs[signature] == GRAPH_LIMIT + 1:
            logger.warning(
                "flex_attention was compiled %d times for one model (%s), once for every few shapes instead of once "
                "for all: steps are slow while it compiles; run with TORCH_LOGS=recompiles and report what it prints",
                self.graphs[signature],
                signature,
            )
        return self._inner(graph, inputs)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask) -> Tensor:
    if not torch.compiler.is_dynamo_compiling():
        raise UnfusedAttention(
            "torch runs flex_attention without compiling it, which would keep all L × L scores in memory; "
            "unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE, and call the policy model outside dispatch modes"
        )
    if query.shape[2] % BLOCK:  # also tells the compiler that no block is cut off at the end of the row
        raise ValueError(f"a packed row has {query.shape[2]} tokens; its length must be a multiple of {BLOCK}")
    return flex_attention(query, key, value, block_mask=mask, enable_gqa=True)


FUSED: Final = FusedAttention()


def graphs_compiled() -> dict[str, int]:
    """Return how often this process compiled flex_attention, by mode and model: 1 each if all is well."""
    return dict(FUSED.graphs)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    packed: PackedMask | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Implement the attention interface of transformers: [1, heads, L, D] in, [1, L, heads, D] out.

    Without a packed mask it calls sdpa.
    """
    if packed is None:
        plain: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return plain
    usual = query.shape[-1] ** -0.5
    if scaling is not None and scaling != usual:
        query = query * (scaling / usual)  # as an argument, torch would compile the kernel once for each value
    if packed.dense_LL is None:
        result = FUSED(query, key, value, packed.blocks)
    else:
        result = scaled_dot_product_attention(query, key, value, attn_mask=packed.dense_LL, enable_gqa=True)
    return result.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, packed_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
