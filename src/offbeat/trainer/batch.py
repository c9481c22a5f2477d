"""Groups become credit, and micro-batches with every stream the loss reads.

Credit comes from whole groups, before any forward pass. Completions that are not trained (unscorable, dropped, masked,
or without a token of the policy's own) and groups that cannot push (equal rewards, and no regularizer that asks for
them) are left out of the micro-batches: nothing is computed for them. Those trained still count in the normaliser.
Shapes: B groups, G completions of the largest group, N completions of a micro-batch, T tokens of its longest.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.objective.credit import Credit, assign_credit
from offbeat.objective.losses import Counts
from offbeat.objective.spec import Need, Objective
from offbeat.seeds import derive
from offbeat.trainer.forward import ModelInputs, to_model_inputs
from offbeat.trainer.packing import MicroBatch
from offbeat.types import UNKNOWN, Completion, Group, Score

NO_LAG = -1
"""Of tokens that no version this trainer has passed wrote: other models', people's, a later run's."""


@dataclass(frozen=True)
class Batch:
    """B groups with their credit, and what of them is worth a forward pass."""

    groups: tuple[Group, ...]
    step: int
    """k: steps taken before this batch; lag counts back from it."""
    rewards_BG: Tensor
    scored_BG: Tensor
    credit: Credit
    trimmed: tuple[Group, ...]
    """The groups that push the policy, with the completions that are trained."""
    places: tuple[tuple[int, ...], ...]
    """Of each completion in `trimmed`, its place in a flattened [B · G]."""
    counts: Counts
    """Of everything trained, pushing or not."""

    def ids(self, which_B: Tensor) -> tuple[str, ...]:
        """The ids of some groups."""
        return tuple(group.id for group, chosen in zip(self.groups, which_B.tolist(), strict=True) if chosen)


def assemble(
    groups: Sequence[Group], objective: Objective, *, step: int, seed: int = 0, prior_B2: Tensor | None = None
) -> Batch:
    """Credit for `groups`, as of step `step`; `seed` is RED-Drop's, `prior_B2` what shrunk advantages start from.

    >>> from offbeat.types import Prompt
    >>> answers = tuple(Completion(f"g/{i}", [5] * (i + 1), UNKNOWN, score=Score(float(i == 2))) for i in range(3))
    >>> batch = assemble([Group("g", Prompt("p", [1], "t"), answers)], Objective(), step=0)
    >>> batch.counts, [round(float(a), 2) for a in batch.credit.advantages_BG[0]]
    (Counts(tokens=6, sequences=3), [-0.33, -0.33, 0.67])
    """
    size = max((len(group.completions) for group in groups), default=0)
    rewards_BG = torch.zeros(len(groups), size, dtype=torch.float64)
    scored_BG = torch.zeros(len(groups), size, dtype=torch.bool)
    lengths_BG = torch.zeros(len(groups), size, dtype=torch.int64)
    for b, group in enumerate(groups):
        for g, completion in enumerate(group.completions):
            lengths_BG[b, g] = int(completion.loss_mask.sum())
            if isinstance(completion.score, Score):
                rewards_BG[b, g], scored_BG[b, g] = completion.score.reward, True
    seeds = [derive(seed, "red-drop", group.id) for group in groups]
    credit = assign_credit(objective, rewards_BG, scored_BG, lengths_BG, group_seeds=seeds, prior_B2=prior_B2)
    trained_BG = credit.trained_BG & (lengths_BG > 0)
    counts = Counts(int(lengths_BG[trained_BG].sum()), int(trained_BG.sum()))
    pushes_B = (credit.advantages_BG * credit.weights_BG * trained_BG != 0).any(-1) | bool(objective.regularizers)
    trimmed, places = [], []
    for b, group in enumerate(groups):
        if pushes_B[b] and (chosen := trained_BG[b].nonzero().flatten().tolist()):
            trimmed.append(Group(group.id, group.prompt, tuple(group.completions[g] for g in chosen)))
            places.append(tuple(b * size + g for g in chosen))
    return Batch(tuple(groups), step, rewards_BG, scored_BG, credit, tuple(trimmed), tuple(places), counts)


def find_faults(groups: Sequence[Group], objective: Objective, *, token_budget: int, vocabulary: int) -> dict[str, str]:
    """Groups that no step can train on, by id, each with its reason. Everything else is for the loss to bear.

    >>> from offbeat.types import Prompt
    >>> broken, sound = (Completion(f"g/{i}", [5], [x], score=Score(1.0)) for i, x in enumerate([float("nan"), -1.0]))
    >>> group = Group("g", Prompt("p", [1], "t"), (broken, sound))
    >>> find_faults([group], Objective(), token_budget=64, vocabulary=10)
    {'g': 'completion g/0: 1 of 1 behavior log-probs are not finite'}
    """
    found = {}
    for group in groups:
        faults = [_prompt_fault(group, vocabulary)]
        for completion in group.completions:
            if isinstance(completion.score, Score):
                faults.append(_completion_fault(group, completion, objective, token_budget, vocabulary))
        if reasons := [fault for fault in faults if fault]:
            found[group.id] = "; ".join(reasons)
    return found


def _prompt_fault(group: Group, vocabulary: int) -> str | None:
    ids = group.prompt.token_ids
    if len(ids) == 0:
        return "the prompt is empty: no state predicts a first token"
    return _vocabulary_fault("the prompt", ids, vocabulary)


def _completion_fault(
    group: Group, completion: Completion, objective: Objective, token_budget: int, vocabulary: int
) -> str | None:
    """The first thing wrong with a scored completion."""
    who, score = f"completion {completion.id}", completion.score
    tokens = len(group.prompt.token_ids) + len(completion.token_ids)
    if isinstance(score, Score) and not np.isfinite(score.reward):
        return f"{who}: reward {score.reward}"
    if tokens > token_budget:
        return f"{who}: {tokens} tokens with its prompt, more than the token budget of {token_budget}"
    if completion.behavior_logprobs is UNKNOWN:
        if Need.BEHAVIOR in objective.needs:
            return f"{who}: its behavior log-probs are unknown, and this objective needs them"
    else:
        logprobs: NDArray[np.float32] = completion.behavior_logprobs[completion.loss_mask]
        if wrong := int((~np.isfinite(logprobs)).sum()):
            return f"{who}: {wrong} of {len(logprobs)} behavior log-probs are not finite"
    return _vocabulary_fault(who, completion.token_ids, vocabulary)


def _vocabulary_fault(who: str, ids: NDArray[np.int32], vocabulary: int) -> str | None:
    outside = ids[(ids < 0) | (ids >= vocabulary)]
    return f"{who}: token id {outside[0]} is outside the model's vocabulary of {vocabulary}" if len(outside) else None


@dataclass(frozen=True)
class MicroBatchStreams:
    """A micro-batch with its streams, on the model's device."""

    micro: MicroBatch
    shared_prefix: bool
    present_NT: Tensor
    """Where tokens are."""
    mask_NT: Tensor
    """Tokens to train on."""
    behavior_NT: Tensor
    """NaN where unknown."""
    lags_NT: Tensor
    """k − version; `NO_LAG` where no version of ours wrote the token."""
    advantages_N: Tensor
    weights_N: Tensor
    places_N: Tensor
    """Into a flattened [B · G]."""

    @property
    def layout(self) -> ModelInputs:
        """As the model takes it; made anew each time, since the masks of a whole batch would fill the memory."""
        return to_model_inputs(self.micro, shared_prefix=self.shared_prefix, device=self.mask_NT.device)

    def padded(self, flat: Tensor) -> Tensor:
        """Values of tokens, completion after completion, as [N, T]; 0 elsewhere. Gradients pass."""
        return flat.new_zeros(self.present_NT.shape).masked_scatter(self.present_NT, flat)


def to_streams(
    batch: Batch, micro: MicroBatch, *, shared_prefix: bool, counts: bool, device: torch.device
) -> MicroBatchStreams:
    """The streams of one micro-batch of `batch.trimmed`. One that does not `count` is computed and masked out."""
    pairs = micro.plan.completions
    completions = [batch.trimmed[b].completions[c] for b, c in pairs]
    places_N = torch.tensor([batch.places[b][c] for b, c in pairs])
    mask_NT = torch.from_numpy(micro.aligned([c.loss_mask for c in completions], fill=False)) & counts

    def padded(values: list[NDArray[np.generic]], fill: float) -> Tensor:
        return torch.from_numpy(micro.aligned(values, fill)).to(device)

    return MicroBatchStreams(
        micro=micro,
        shared_prefix=shared_prefix,
        present_NT=torch.from_numpy(micro.present_NT).to(device),
        mask_NT=mask_NT.to(device),
        behavior_NT=padded([_behavior(c) for c in completions], np.nan),
        lags_NT=padded([_lags(c, batch.step) for c in completions], NO_LAG),
        advantages_N=batch.credit.advantages_BG.flatten()[places_N].float().to(device),
        weights_N=batch.credit.weights_BG.flatten()[places_N].float().to(device),
        places_N=places_N.to(device),
    )


def _behavior(completion: Completion) -> NDArray[np.float32]:
    if completion.behavior_logprobs is UNKNOWN:
        return np.full(len(completion.token_ids), np.nan, np.float32)
    return completion.behavior_logprobs


def _lags(completion: Completion, step: int) -> NDArray[np.int64]:
    lags = np.full(len(completion.token_ids), NO_LAG, np.int64)
    for span in completion.versions:
        if span.version <= step:
            lags[span.start : span.end] = step - span.version
    return lags
