"""From a micro-batch to the log-probs of its completion tokens, in one forward pass.

With a shared prefix a row is [prompt, y_1 … y_G]: every completion sees the prompt and itself, positions restart after
the prompt, and the prompt is computed once for the whole group. Only hidden states that predict a completion token go
through the output head, in chunks. `check_model` tests at start-up what the model supports.
"""

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from offbeat.errors import UnsupportedModel
from offbeat.objective.logprobs import TokenStats, token_stats
from offbeat.trainer import attention, flex
from offbeat.trainer.adapter import attach, switched_off
from offbeat.trainer.batch import MicroBatch, build_micro_batch, plan_micro_batches
from offbeat.types import UNKNOWN, Completion, Group, Prompt
from offbeat.weights.adapter import AdapterSpec

logger = logging.getLogger(__name__)

TOLERANCE: Final = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Mean difference of log-probs on synthetic tokens that rounding explains: the same model summed in another order. In
bfloat16, two attention implementations of transformers itself differ by 0.07 (SmolLM2), in float32 by 6e-6."""
UNLIMITED: Final = 1 << 62
"""A token budget that everything fits into."""


class ModelInputs(NamedTuple):
    """The tensors of one forward pass. Plain rows are causal from position 0, so they need no positions or mask."""

    token_ids_RL: Tensor
    position_ids_RL: Tensor | None
    attention: attention.Segments | flex.PackedMask | None
    predictors: Tensor
    """For every completion token, the index of the hidden state that predicts it, in a flattened [R · L]."""
    targets: Tensor
    """The completion tokens in the same order."""


def to_model_inputs(
    micro: MicroBatch, *, shared_prefix: bool, device: torch.device, fused: bool | None = None
) -> ModelInputs:
    """Copy a micro-batch to `device`. `fused` is that of `flex.packed_mask`, for packed rows.

    Plain rows are padded on the right, where no token of theirs looks.

    >>> group = Group("g", Prompt("p", [1, 2], "t"), tuple(Completion(f"g/{i}", [5], UNKNOWN) for i in range(2)))
    >>> micro = build_micro_batch(plan_micro_batches([group], 64, shared_prefix=True)[0], [group])
    >>> inputs = to_model_inputs(micro, shared_prefix=True, device=torch.device("cpu"))
    >>> inputs.position_ids_RL.tolist(), inputs.attention.keys_NK.tolist()
    ([[0, 1, 2, 2]], [[0, 1, 2], [0, 1, 3]])
    """
    position_ids: Tensor | None = None
    mask: attention.Segments | flex.PackedMask | None = None
    if shared_prefix or micro.plan.packed:
        position_ids = torch.from_numpy(micro.position_ids_RL).to(device)
        if micro.plan.packed:
            mask = flex.packed_mask(micro, device, fused=fused)
        else:
            mask = attention.find_segments(micro, device)
    arrays = (micro.token_ids_RL, micro.predictors, micro.targets)
    token_ids, predictors, targets = (torch.from_numpy(array).to(device) for array in arrays)
    return ModelInputs(token_ids, position_ids, mask, predictors, targets)


class PolicyModel(nn.Module):
    """A causal language model whose forward pass takes a micro-batch and returns log-probs and entropies of its tokens.

    It is the root module for FSDP: one `forward` uses both body and output head. Dropout is off, because the trainer's
    log-probs are compared with the engine's. On GPUs, or if `packed` says so, micro-batches are packed rows for
    flex_attention.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    >>> policy_model = PolicyModel(LlamaForCausalLM(LlamaConfig(**sizes)))
    >>> group = Group("g", Prompt("p", [1, 2], "t"), (Completion("g/0", [5, 6, 7], UNKNOWN),))
    >>> micro = build_micro_batch(plan_micro_batches([group], 64, shared_prefix=False)[0], [group])
    >>> policy_model(to_model_inputs(micro, shared_prefix=False, device=policy_model.device)).logprobs.shape
    torch.Size([3])
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        chunk_tokens: int = 512,
        checkpoint_activations: bool = False,
        packed: bool | None = None,
        adapter: AdapterSpec | None = None,
    ) -> None:
        super().__init__()
        if adapter is not None:
            attach(model, adapter)
        self.model = model.eval()
        self.adapter = adapter
        """Set if only A and B of this adapter are trained, beside the frozen weights of the base."""
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self._packed = packed
        self._checkpoint_activations = checkpoint_activations
        self.compute_dtype: torch.dtype = next(model.parameters()).dtype
        """The dtype of matrix products. FSDP casts sharded parameters to it."""
        if checkpoint_activations:
            for layer in model.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    # gradient_checkpointing_enable() works only after train(), which would turn dropout on.
                    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def packed(self) -> bool:
        """True if rows with a shared prefix are to be packed into one."""
        return self.device.type == "cuda" if self._packed is None else self._packed

    @property
    def keeps_logits(self) -> bool:
        """True if the backward pass finds the logits in memory. On CPU that is cheaper than to compute them again."""
        return self.device.type == "cpu" and not self._checkpoint_activations

    @property
    def vocab_size(self) -> int:
        """Number of input embeddings: every token id is smaller."""
        return int(self.model.get_input_embeddings().num_embeddings)

    @contextmanager
    def base_only(self) -> Iterator[None]:
        """Compute as the base without its adapter, for the length of the block."""
        with switched_off(self.model):
            yield

    def move_frozen(self, device: torch.device | str) -> None:
        """Move the frozen weights of an adapter's base to another device, or back."""
        for frozen in (one for one in self.parameters() if not one.requires_grad):
            frozen.data = frozen.data.to(device)

    def forward(self, inputs: ModelInputs) -> TokenStats:
        body, head = self.model.base_model, self.model.get_output_embeddings()
        states = body(inputs.token_ids_RL, use_cache=False, **_attention_arguments(inputs))
        # Not plain indexing: on CPU the order in which its gradient is summed depends on the threads.
        hidden = states.last_hidden_state.flatten(0, 1).index_select(0, inputs.predictors)
        stats = token_stats(
            hidden,
            head.weight,
            inputs.targets,
            bias=head.bias,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
            keep_logits=self.keeps_logits,
        )
        # Clones, not views: an in-place operation on a view would drop the backward hooks that FSDP puts on it.
        return TokenStats(*(values.clone() for values in stats))

    def logits(self, token_ids_RL: Tensor) -> Tensor:
        """Return the logits that transformers computes for plain rows. FSDP gathers the parameters for it too."""
        logits: Tensor = self.model(token_ids_RL, use_cache=False).logits
        return logits


def _attention_arguments(inputs: ModelInputs) -> dict[str, object]:
    """Return the keyword arguments that carry positions and attention to the model."""
    if inputs.attention is None:
        return {}
    name = "packed" if isinstance(inputs.attention, flex.PackedMask) else "segments"
    # transformers keeps a 4D mask as it is. Without a mask it would build one of L × L that nothing uses.
    dummy_mask = inputs.token_ids_RL.new_zeros(1, 1, 1, 1)
    return {"attention_mask": dummy_mask, "position_ids": inputs.position_ids_RL, name: inputs.attention}


@torch.inference_mode()
def sequence_logprobs(
    model: PolicyModel | PreTrainedModel, sequences: Sequence[Sequence[int]]
) -> list[NDArray[np.float32]]:
    """Return the log-probs of whole sequences at temperature 1: for n tokens, the n − 1 of those after the first.

    The sequences are one padded batch, except if FSDP shards the model: then only `PolicyModel.logits` gathers the
    parameters, one sequence at a time. The two ways differ by rounding.
    """
    if isinstance(model, PolicyModel):
        if isinstance(model, FSDPModule):
            return [_sharded_logprobs(model, torch.tensor(ids, device=model.device)) for ids in sequences]
        model = model.model
    lengths = torch.tensor([len(ids) for ids in sequences])
    ids_NT = torch.zeros(len(sequences), int(lengths.max()), dtype=torch.long)
    for row, ids in enumerate(sequences):
        ids_NT[row, : len(ids)] = torch.tensor(ids)
    present_NT = torch.arange(ids_NT.shape[1]) < lengths[:, None]
    ids_NT, mask_NT = ids_NT.to(model.device), present_NT.long().to(model.device)
    hidden_NTH = model.base_model(input_ids=ids_NT, attention_mask=mask_NT, use_cache=False).last_hidden_state
    head = model.get_output_embeddings()
    logprobs_NT = token_stats(hidden_NTH[:, :-1], head.weight, ids_NT[:, 1:], bias=head.bias).logprobs.cpu()
    return [row[: length - 1].numpy() for row, length in zip(logprobs_NT, lengths.tolist(), strict=True)]


def _sharded_logprobs(policy_model: PolicyModel, ids_T: Tensor) -> NDArray[np.float32]:
    logprobs_TV = policy_model.logits(ids_T[None])[0, :-1].float().log_softmax(-1)
    return logprobs_TV.gather(-1, ids_T[1:, None]).flatten().cpu().numpy()


@dataclass(frozen=True)
class ModelCheck:
    """The result of `check_model`."""

    shared_prefix: bool
    """True if rows with a shared prefix give the same log-probs as plain rows."""
    message: str
    packed: bool = False
    """True if such rows are packed into one for flex_attention."""


@torch.no_grad()
def check_model(policy_model: PolicyModel, token_budget: int) -> ModelCheck:
    """Test whether this model supports rows with a shared prefix. Raises `UnsupportedModel` if plain rows fail.

    It computes the log-probs of one group both ways. The prompt is as long as the budget allows, to detect an attention
    window that is shorter. This costs the forward pass of one full micro-batch, twice. If the model supports shared
    prefixes, its attention implementation is replaced.
    """
    limit = getattr(policy_model.model.config, "max_position_embeddings", token_budget)
    completion = max(1, min(16, token_budget // 4))
    prompt = max(1, min(token_budget, limit) - 2 * completion)
    _check_head(policy_model, synthetic_group(policy_model.vocab_size, min(prompt, 16), completion, 2))
    group = synthetic_group(policy_model.vocab_size, prompt, completion, 2)
    plain = _second_completion(policy_model, group, shared_prefix=False)
    original = policy_model.model.config._attn_implementation
    try:
        policy_model.model.set_attn_implementation(flex.NAME if policy_model.packed else attention.NAME)
        difference = float((_second_completion(policy_model, group, shared_prefix=True) - plain).abs().mean())
        reason = f"its log-probs differ by {difference:.2g} from plain rows, at {prompt} prompt tokens"
    except (TypeError, ValueError, RuntimeError) as error:  # architectures reject unknown arguments in different ways
        difference, reason = math.inf, f"it does not accept position ids and an attention mask ({error})"
    if difference <= TOLERANCE[policy_model.compute_dtype]:
        message = f"prompts are computed once per group; log-probs within {difference:.1g} of plain rows"
        return ModelCheck(True, message, policy_model.packed)
    policy_model.model.set_attn_implementation(original)
    name = type(policy_model.model).__name__
    message = (
        f"{name} does not allow a shared prefix: {reason}; each completion is computed with its own prompt, slower"
    )
    logger.warning(message)
    return ModelCheck(False, message)


def _check_head(policy_model: PolicyModel, group: Group) -> None:
    """Refuse models that scale or cap their logits after the output head: chunked log-probs would miss that."""
    ids = torch.from_numpy(np.concatenate([group.prompt.token_ids, group.completions[1].token_ids])).long()
    ids = ids[None].to(policy_model.device)
    logits = policy_model.logits(ids)[:, :-1] / policy_model.temperature
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    expected = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).flatten()[len(group.prompt.token_ids) - 1 :]
    difference = float((_second_completion(policy_model, group, shared_prefix=False) - expected).abs().mean())
    if math.isnan(difference):
        raise UnsupportedModel(
            f"{type(policy_model.model).__name__} has log-probs that are not finite: its weights are broken"
        )
    if difference > TOLERANCE[policy_model.compute_dtype]:
        raise UnsupportedModel(
            f"{type(policy_model.model).__name__} changes its logits after the output head: log-probs from the "
            f"head alone are off by {difference:.2g}; use a model without logit scaling or soft-capping"
        )


def synthetic_group(vocab_size: int, prompt: int, completion: int, size: int) -> Group:
    """Return a group of `size` completions with tokens from all over the vocabulary, the same on every machine."""
    tokens = np.arange(1, prompt + size * completion + 1) * 7919 % vocab_size
    completions = (Completion(f"synthetic/{i}", ids, UNKNOWN) for i, ids in enumerate(np.split(tokens[prompt:], size)))
    return Group("synthetic", Prompt("synthetic", tokens[:prompt], "synthetic"), tuple(completions))


def _second_completion(policy_model: PolicyModel, group: Group, *, shared_prefix: bool) -> Tensor:
    """Return the log-probs of the second completion. On a shared row, the first one is between it and the prompt."""
    if not shared_prefix:
        group = Group(group.id, group.prompt, group.completions[1:])
    packed = shared_prefix and policy_model.packed
    [plan] = plan_micro_batches([group], UNLIMITED, shared_prefix=shared_prefix, packed=packed)
    micro = build_micro_batch(plan, [group])
    inputs = to_model_inputs(micro, shared_prefix=shared_prefix, device=policy_model.device)
    stats: TokenStats = policy_model(inputs)
    return stats.logprobs[-len(group.completions[-1].token_ids) :]
