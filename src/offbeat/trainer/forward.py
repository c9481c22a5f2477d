"""From a micro-batch to the log-probs of its completion tokens, in one forward pass.

With a shared prefix a row is [prompt, y_1 … y_G]: every completion sees the prompt and itself, positions restart after
the prompt, and the prompt is computed once for the whole group. Only states that predict a completion token meet the
head, in chunks. `check_model` finds out at start-up what the model at hand allows.
"""

import logging
import math
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from offbeat.errors import UnsupportedModel
from offbeat.objective.logprobs import TokenStats, token_stats
from offbeat.trainer import attention
from offbeat.trainer.packing import MicroBatch, lay_out, plan
from offbeat.types import UNKNOWN, Completion, Group, Prompt

logger = logging.getLogger(__name__)

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Mean difference of log-probs on made-up tokens that arithmetic explains: the same model summed in another order. In
bfloat16 transformers' own two ways of attending differ by 0.07 there (SmolLM2), in float32 by 6e-6."""


class ModelInputs(NamedTuple):
    """A micro-batch as the model takes it. Positions and attention are None on plain rows: causal, from 0."""

    token_ids_RL: Tensor
    position_ids_RL: Tensor | None
    attention: attention.Segments | BlockMask | None
    predictors: Tensor
    targets: Tensor


def to_model_inputs(batch: MicroBatch, *, shared_prefix: bool, device: torch.device) -> ModelInputs:
    """The arrays of `batch` on `device`.

    Plain rows need no mask: they are padded on the right, where nothing that counts looks.

    >>> group = Group("g", Prompt("p", [1, 2], "t"), tuple(Completion(f"g/{i}", [5], UNKNOWN) for i in range(2)))
    >>> batch = lay_out(plan([group], 64, shared_prefix=True)[0], [group])
    >>> layout = to_model_inputs(batch, shared_prefix=True, device=torch.device("cpu"))
    >>> layout.position_ids_RL.tolist(), layout.attention.keys_NK.tolist()
    ([[0, 1, 2, 2]], [[0, 1, 2], [0, 1, 3]])
    """
    positions: Tensor | None = None
    looks: attention.Segments | BlockMask | None = None
    if shared_prefix:
        positions = torch.from_numpy(batch.position_ids_RL).to(device)
        if device.type == "cuda":
            looks = attention.block_mask(torch.from_numpy(batch.segment_ids_RL).to(device))
        else:
            looks = attention.segments_of(batch, device)
    arrays = (batch.token_ids_RL, batch.predictors, batch.targets)
    token_ids, predictors, targets = (torch.from_numpy(array).to(device) for array in arrays)
    return ModelInputs(token_ids, positions, looks, predictors, targets)


class PolicyModel(nn.Module):
    """A causal language model as the trainer uses it: a micro-batch in, log-prob and entropy of its tokens out.

    Body and head meet in this one `forward`, so it is also the root for whoever shards the parameters. Dropout is off:
    the trainer's log-probs are compared with the engine's.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    >>> policy_model = PolicyModel(LlamaForCausalLM(LlamaConfig(**sizes)))
    >>> group = Group("g", Prompt("p", [1, 2], "t"), (Completion("g/0", [5, 6, 7], UNKNOWN),))
    >>> batch = lay_out(plan([group], 64, shared_prefix=False)[0], [group])
    >>> policy_model(to_model_inputs(batch, shared_prefix=False, device=policy_model.device)).logprobs.shape
    torch.Size([3])
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float = 1.0,
        chunk_tokens: int = 512,
        checkpoint_activations: bool = False,
    ) -> None:
        super().__init__()
        self.model = model.eval()
        self.temperature = temperature
        self.chunk_tokens = chunk_tokens
        self.compute_dtype: torch.dtype = next(model.parameters()).dtype
        """What matrix products are made in; sharded parameters are cast to it."""
        if checkpoint_activations:
            for layer in model.modules():
                if isinstance(layer, GradientCheckpointingLayer):
                    # transformers' own switch needs train(), which would turn dropout on.
                    layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, preserve_rng_state=False)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def vocabulary(self) -> int:
        """Token ids are below it."""
        return int(self.model.get_input_embeddings().num_embeddings)

    def forward(self, layout: ModelInputs) -> TokenStats:
        body, head = self.model.base_model, self.model.get_output_embeddings()
        states = body(layout.token_ids_RL, use_cache=False, **_attention_arguments(layout))
        # index_select and not [], whose gradient on CPU adds up in whatever order threads come.
        hidden = states.last_hidden_state.flatten(0, 1).index_select(0, layout.predictors)
        stats = token_stats(
            hidden,
            head.weight,
            layout.targets,
            bias=head.bias,
            temperature=self.temperature,
            chunk_tokens=self.chunk_tokens,
        )
        # No views: what FSDP hangs on them for the backward pass would be lost with an operation in place.
        return TokenStats(*(values.clone() for values in stats))

    def logits(self, token_ids_RL: Tensor) -> Tensor:
        """What the model itself makes of plain rows: `forward` is checked against it."""
        logits: Tensor = self.model(token_ids_RL, use_cache=False).logits
        return logits


def _attention_arguments(layout: ModelInputs) -> dict[str, object]:
    match layout.attention:
        case None:
            return {}
        case attention.Segments():
            # transformers leaves a mask of four axes alone, and builds one of L × L, for nothing, if there is none.
            untouched = layout.token_ids_RL.new_zeros(1, 1, 1, 1)
            return {
                "attention_mask": untouched,
                "position_ids": layout.position_ids_RL,
                "segments": layout.attention,
            }
        case mask:
            return {"attention_mask": mask, "position_ids": layout.position_ids_RL}


@dataclass(frozen=True)
class ModelCheck:
    """What a model allows, and why."""

    shared_prefix: bool
    message: str


@torch.no_grad()
def check_model(policy_model: PolicyModel, token_budget: int) -> ModelCheck:
    """Whether rows with a shared prefix give this model's log-probs; raises if not even plain rows do.

    One group is scored both ways, with a prompt as long as the budget admits, so that an attention window shorter than
    that shows. It costs the forward pass of one full micro-batch, twice.
    """
    limit = getattr(policy_model.model.config, "max_position_embeddings", token_budget)
    answer = max(1, min(16, token_budget // 4))
    prompt = max(1, min(token_budget, limit) - 2 * answer)
    _check_head(policy_model, _made_up(policy_model.vocabulary, min(prompt, 16), answer))
    group = _made_up(policy_model.vocabulary, prompt, answer)
    plain = _second_answer(policy_model, group, shared_prefix=False)
    own = policy_model.model.config._attn_implementation
    try:
        policy_model.model.set_attn_implementation(
            attention.NAME if policy_model.device.type != "cuda" else "flex_attention"
        )
        difference = float((_second_answer(policy_model, group, shared_prefix=True) - plain).abs().mean())
        why = f"its log-probs differ by {difference:.2g} from plain rows, at {prompt} prompt tokens"
    except (TypeError, ValueError, RuntimeError) as refusal:  # whatever an architecture says to what it does not know
        difference, why = math.inf, f"it takes neither positions nor attention from outside ({refusal})"
    if difference <= _tolerance(policy_model):
        return ModelCheck(True, f"prompts are computed once per group; log-probs within {difference:.1g} of plain rows")
    policy_model.model.set_attn_implementation(own)
    name = type(policy_model.model).__name__
    message = f"{name} does not allow a shared prefix: {why}; every completion is computed with its own prompt, slower"
    logger.warning(message)
    return ModelCheck(False, message)


def _tolerance(policy_model: PolicyModel) -> float:
    return TOLERANCE[policy_model.compute_dtype]


def _check_head(policy_model: PolicyModel, group: Group) -> None:
    """Some models scale or cap their logits after the head, which chunked log-probs would miss."""
    ids = torch.from_numpy(np.concatenate([group.prompt.token_ids, group.completions[1].token_ids])).long()
    ids = ids[None].to(policy_model.device)
    logits = policy_model.logits(ids)[:, :-1] / policy_model.temperature
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    theirs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).flatten()[len(group.prompt.token_ids) - 1 :]
    difference = float((_second_answer(policy_model, group, shared_prefix=False) - theirs).abs().mean())
    if math.isnan(difference):
        raise UnsupportedModel(
            f"{type(policy_model.model).__name__} has log-probs that are not finite: its weights are broken"
        )
    if difference > _tolerance(policy_model):
        raise UnsupportedModel(
            f"{type(policy_model.model).__name__} changes its logits after the output head: log-probs from the "
            f"head alone are off by {difference:.2g}; use a model without logit scaling or soft-capping"
        )


def _made_up(vocabulary: int, prompt: int, answer: int) -> Group:
    """Tokens all over the vocabulary, the same on every machine."""
    tokens = np.arange(1, prompt + 2 * answer + 1) * 7919 % vocabulary
    answers = (tokens[prompt : prompt + answer], tokens[prompt + answer :])
    completions = tuple(Completion(f"made-up/{i}", ids, UNKNOWN) for i, ids in enumerate(answers))
    return Group("made-up", Prompt("made-up", tokens[:prompt], "made-up"), completions)


def _second_answer(policy_model: PolicyModel, group: Group, *, shared_prefix: bool) -> Tensor:
    """Log-probs of the second completion: on a shared row, the first stands between it and the prompt."""
    if not shared_prefix:
        group = Group(group.id, group.prompt, group.completions[1:])
    [part] = plan([group], 1 << 62, shared_prefix=shared_prefix)
    layout = to_model_inputs(lay_out(part, [group]), shared_prefix=shared_prefix, device=policy_model.device)
    stats: TokenStats = policy_model(layout)
    return stats.logprobs[-len(group.completions[-1].token_ids) :]
