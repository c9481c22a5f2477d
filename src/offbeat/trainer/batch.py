"""From groups to micro-batches: credit, rows of tokens, and every tensor that the loss reads.

    groups ── find_faults                             broken prompts, rewards, log-probs and token ids
           ── assemble_batch                          credit, computed once per batch from whole groups
           ── plan_micro_batches, build_micro_batch   rows of tokens under the token budget, as numpy arrays
           ── to_tensors                              masks, log-probs, lags and advantages on the model's device

Completions that are not trained on (unscorable, dropped, masked, or without a token that the policy wrote) and groups
that cannot move the policy (advantages of 0 and no regularizer) get no forward pass. The normalizer still counts the
tokens of every completion that is trained on.

A row is a prompt followed by completions of it:

    token_ids     p0 p1 p2 | a0 a1 | b0 b1 b2 | pad
    position_ids   0  1  2 |  3  4 |  3  4  5 |   0     each completion continues the prompt
    segment_ids    0  0  0 |  1  1 |  2  2  2 |  -1     a completion sees the prompt and itself
    predictors          p2   a0     p2  b0 b1           the last prompt token predicts every first token

With a shared prefix, a row holds as many completions of its group as fit, so the prompt is computed once. Without, it
holds one completion. A micro-batch is R rows padded to the longest, L, or on GPUs one packed row [1, L] in which they
follow each other. It costs R × L tokens, or those of the packed row, never more than the token budget. Rows of similar
length share a micro-batch; the longest come first.

Shapes: B groups, G completions of the largest group, R rows, L tokens of the longest row, N completions of a
micro-batch, T tokens of its longest completion.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import PackingError
from offbeat.objective.credit import Credit, assign_credit
from offbeat.objective.losses import Counts
from offbeat.objective.measures import NO_LAG, Rows
from offbeat.objective.spec import Advantage, CutOff, Need, Objective
from offbeat.seeds import derive
from offbeat.types import (
    UNKNOWN,
    Completion,
    Finish,
    Group,
    Score,
    StepContext,
    invalid_logprobs,
    is_reward,
    outside_vocabulary,
)

PROMPT: Final = 0
PADDING: Final = -1
BLOCK: Final = 128
"""The length of a packed row is a multiple of it, and at least twice it: the attention of GPUs works in such blocks."""


def find_faults(groups: Sequence[Group], objective: Objective, *, token_budget: int, vocab_size: int) -> dict[str, str]:
    """Return the groups that no step can train on: by id, with the reason.

    >>> from offbeat.types import Prompt
    >>> broken, valid = (Completion(f"g/{i}", [5], [x], score=Score(1.0)) for i, x in enumerate([float("nan"), -1.0]))
    >>> group = Group("g", Prompt("p", [1], "t"), (broken, valid))
    >>> find_faults([group], Objective(), token_budget=64, vocab_size=10)
    {'g': 'completion g/0: 1 of 1 behavior log-probs are not finite'}
    """
    found = {}
    for group in groups:
        faults = [_prompt_fault(group, vocab_size)]
        for completion in group.completions:
            if isinstance(score := completion.score, Score) and not _masked(completion, score, objective):
                faults.append(_completion_fault(group, completion, score, objective, token_budget, vocab_size))
        if reasons := [fault for fault in faults if fault]:
            found[group.id] = "; ".join(reasons)
    return found


def _masked(completion: Completion, score: Score, objective: Objective) -> bool:
    """Return True for a truncated completion that the objective leaves out. The mean reward still counts its score."""
    left_out = objective.truncated is CutOff.MASK and completion.finish is Finish.LENGTH
    return left_out and is_reward(score.reward)


def _prompt_fault(group: Group, vocab_size: int) -> str | None:
    ids = group.prompt.token_ids
    if len(ids) == 0:
        return "the prompt is empty: no state predicts a first token"
    return _token_id_fault("the prompt", ids, vocab_size)


def _completion_fault(
    group: Group, completion: Completion, score: Score, objective: Objective, token_budget: int, vocab_size: int
) -> str | None:
    """Return the first fault of a scored completion."""
    name, tokens = f"completion {completion.id}", len(group.prompt.token_ids) + len(completion.token_ids)
    if not is_reward(score.reward):
        return f"{name}: reward {score.reward}"
    if objective.advantage is Advantage.SHRUNK and not 0 <= score.reward <= 1:
        return f"{name}: reward {score.reward}, and shrunk advantages need rewards in [0, 1]"
    if tokens > token_budget:
        return f"{name}: {tokens} tokens with its prompt, more than the token budget of {token_budget}"
    if completion.behavior_logprobs is UNKNOWN:
        if Need.BEHAVIOR in objective.needs:
            return f"{name}: its behavior log-probs are unknown, and this objective needs them"
    else:
        logprobs: NDArray[np.float32] = completion.behavior_logprobs[completion.loss_mask]
        if wrong := int(invalid_logprobs(logprobs, allow_positive=True).sum()):
            return f"{name}: {wrong} of {len(logprobs)} behavior log-probs are not finite"
    return _token_id_fault(name, completion.token_ids, vocab_size)


def _token_id_fault(name: str, ids: NDArray[np.int32], vocab_size: int) -> str | None:
    outside = outside_vocabulary(ids, vocab_size)
    return f"{name}: token id {outside[0]} is outside the model's vocabulary of {vocab_size}" if len(outside) else None


@dataclass(frozen=True)
class Batch:
    """B groups with their credit, and the part of them that needs a forward pass."""

    groups: tuple[Group, ...]
    step: int
    """k: steps taken before this batch. Lag counts back from it."""
    rewards_BG: Tensor
    scored_BG: Tensor
    credit: Credit
    trimmed: tuple[Group, ...]
    """The groups that can move the policy, with only the completions that are trained on."""
    flat_indices: tuple[tuple[int, ...], ...]
    """For each completion in `trimmed`, its index in a flattened [B · G]."""
    counts: Counts
    """Tokens and completions that are trained on, also in groups that cannot move the policy."""
    context: StepContext

    @property
    def fresh_B(self) -> Tensor:
        """True for groups that this run's policy wrote and that are not drawn from the past."""
        published, replayed = self.context.published, self.context.replayed
        fresh = [g.id not in replayed and (published is None or g.oldest_version is not None) for g in self.groups]
        return torch.tensor(fresh, dtype=torch.bool)

    def ids(self, chosen_B: Tensor) -> tuple[str, ...]:
        """Return the ids of the chosen groups."""
        return tuple(group.id for group, chosen in zip(self.groups, chosen_B.tolist(), strict=True) if chosen)


def assemble_batch(
    groups: Sequence[Group], objective: Objective, *, step: int, seed: int = 0, context: StepContext | None = None
) -> Batch:
    """Assign credit to `groups` at step `step`. RED-Drop draws from `seed`; shrunk advantages need `context.priors`.

    >>> from offbeat.types import Prompt
    >>> answers = tuple(Completion(f"g/{i}", [5] * (i + 1), UNKNOWN, score=Score(float(i == 2))) for i in range(3))
    >>> batch = assemble_batch([Group("g", Prompt("p", [1], "t"), answers)], Objective(), step=0)
    >>> batch.counts, [round(float(a), 2) for a in batch.credit.advantages_BG[0]]
    (Counts(tokens=6, sequences=3), [-0.33, -0.33, 0.67])
    """
    context = context or StepContext()
    size = max((len(group.completions) for group in groups), default=0)
    rewards_BG = torch.zeros(len(groups), size, dtype=torch.float64)
    scored_BG = torch.zeros(len(groups), size, dtype=torch.bool)
    truncated_BG = torch.zeros(len(groups), size, dtype=torch.bool)
    lengths_BG = torch.zeros(len(groups), size, dtype=torch.int64)
    for b, group in enumerate(groups):
        for g, completion in enumerate(group.completions):
            lengths_BG[b, g] = int(completion.loss_mask.sum())
            truncated_BG[b, g] = completion.finish is Finish.LENGTH
            if isinstance(completion.score, Score):
                rewards_BG[b, g], scored_BG[b, g] = completion.score.reward, True
    seeds = [derive(seed, "red-drop", group.id) for group in groups]
    prior_B2 = _priors(groups, context) if objective.advantage is Advantage.SHRUNK else None
    credit = assign_credit(
        objective, rewards_BG, scored_BG, lengths_BG, group_seeds=seeds, prior_B2=prior_B2, truncated_BG=truncated_BG
    )
    trained_BG = credit.trained_BG & (lengths_BG > 0)
    counts = Counts(int(lengths_BG[trained_BG].sum()), int(trained_BG.sum()))
    moves_policy_B = (credit.advantages_BG * credit.weights_BG * trained_BG != 0).any(-1) | bool(objective.regularizers)
    trimmed, flat_indices = [], []
    for b, group in enumerate(groups):
        if moves_policy_B[b] and (chosen := trained_BG[b].nonzero().flatten().tolist()):
            trimmed.append(Group(group.id, group.prompt, tuple(group.completions[g] for g in chosen)))
            flat_indices.append(tuple(b * size + g for g in chosen))
    return Batch(
        tuple(groups), step, rewards_BG, scored_BG, credit, tuple(trimmed), tuple(flat_indices), counts, context
    )


def _priors(groups: Sequence[Group], context: StepContext) -> Tensor:
    if missing := [group.id for group in groups if group.id not in context.priors]:
        raise ValueError(
            f"shrunk advantages need StepContext.priors for every group, and {len(missing)} have none, "
            f"{missing[0]!r} first; the sampler of a run computes them from the experience log"
        )
    return torch.tensor([context.priors[group.id] for group in groups], dtype=torch.float64)


@dataclass(frozen=True)
class PackedRow:
    """The completions in one row and the row's length in tokens. Groups and completions are given by index."""

    group: int
    completions: tuple[int, ...]
    length: int


@dataclass(frozen=True)
class MicroBatchPlan:
    """The rows of a micro-batch, the longest first."""

    rows: tuple[PackedRow, ...]
    packed: bool = False
    """True if they are one row."""

    @property
    def cost(self) -> int:
        """R × L tokens, padding included; or the tokens of a packed row without the padding to whole blocks."""
        return sum(row.length for row in self.rows) if self.packed else len(self.rows) * self.rows[0].length

    @property
    def completions(self) -> tuple[tuple[int, int], ...]:
        """(group, completion) indices of the N completions, in the order of every array over N."""
        return tuple((row.group, completion) for row in self.rows for completion in row.completions)


def plan_micro_batches(
    groups: Sequence[Group], token_budget: int, *, shared_prefix: bool, packed: bool = False
) -> tuple[MicroBatchPlan, ...]:
    """Put every completion of `groups` into exactly one micro-batch; each costs at most `token_budget`.

    The plan depends on the groups alone, not on the machine. A group too long for one row with a shared prefix takes
    several rows, each with the prompt.

    >>> from offbeat.types import Prompt
    >>> answers = tuple(Completion(f"g/{i}", [5] * n, UNKNOWN) for i, n in enumerate([2, 3, 2]))
    >>> group = Group("g", Prompt("p", [1, 2, 3], "arithmetic"), answers)
    >>> [plan.rows for plan in plan_micro_batches([group], 10, shared_prefix=True)]
    [(PackedRow(group=0, completions=(0, 1, 2), length=10),)]
    >>> [plan.cost for plan in plan_micro_batches([group], 10, shared_prefix=False)]
    [6, 10]
    """
    rows = [row for index, group in enumerate(groups) for row in _rows(index, group, token_budget, shared_prefix)]
    rows.sort(key=lambda row: (-row.length, row.group, row.completions))
    plans: list[MicroBatchPlan] = []
    for row in rows:
        wider = MicroBatchPlan((*plans[-1].rows, row) if plans else (row,), packed)
        if plans and wider.cost <= token_budget:
            plans[-1] = wider
        else:
            plans.append(MicroBatchPlan((row,), packed))
    return tuple(plans)


def _rows(index: int, group: Group, token_budget: int, shared_prefix: bool) -> Iterator[PackedRow]:
    prompt = len(group.prompt.token_ids)
    if prompt == 0:
        raise PackingError(f"group {group.id!r} has an empty prompt: no state predicts a first token; leave it out")
    members: list[int] = []
    length = prompt
    for i, completion in enumerate(group.completions):
        size = len(completion.token_ids)
        if prompt + size > token_budget:
            raise PackingError(
                f"completion {completion.id!r} of group {group.id!r} has {prompt} prompt and {size} completion tokens, "
                f"more than the token budget of {token_budget}; raise the budget to at least {prompt + size}"
            )
        if members and (not shared_prefix or length + size > token_budget):
            yield PackedRow(index, tuple(members), length)
            members, length = [], prompt
        members.append(i)
        length += size
    if members:
        yield PackedRow(index, tuple(members), length)


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """The tokens of a plan as padded arrays."""

    plan: MicroBatchPlan
    token_ids_RL: NDArray[np.int64]
    position_ids_RL: NDArray[np.int64]
    segment_ids_RL: NDArray[np.int64]
    """0 on a prompt, 1, 2, … on the completions of a row, −1 on padding."""
    predictors: NDArray[np.int64]
    """For every completion token, the index of the hidden state that predicts it, in a flattened [R · L]."""
    targets: NDArray[np.int64]
    """The completion tokens in the same order, one completion after another."""
    present_NT: NDArray[np.bool_]
    """True where a padded [N, T] holds a token: `values_NT[present_NT] = values` pads flat values."""

    def pad(self, values: Sequence[NDArray[np.generic]], fill: float) -> NDArray[np.generic]:
        """Pad one array per completion, in the plan's order, to [N, T]."""
        flat = np.concatenate(values)
        values_NT = np.full(self.present_NT.shape, fill, flat.dtype)
        values_NT[self.present_NT] = flat
        return values_NT


def build_micro_batch(plan: MicroBatchPlan, groups: Sequence[Group]) -> MicroBatch:
    """Build the arrays of one plan; `groups` are the ones it was made from.

    >>> from offbeat.types import Prompt
    >>> answers = (Completion("g/0", [7, 8], UNKNOWN), Completion("g/1", [9], UNKNOWN))
    >>> group = Group("g", Prompt("p", [1, 2, 3], "arithmetic"), answers)
    >>> micro = build_micro_batch(plan_micro_batches([group], 64, shared_prefix=True)[0], [group])
    >>> micro.token_ids_RL.tolist(), micro.position_ids_RL.tolist(), micro.segment_ids_RL.tolist()
    ([[1, 2, 3, 7, 8, 9]], [[0, 1, 2, 3, 4, 3]], [[0, 0, 0, 1, 1, 2]])
    >>> micro.predictors.tolist(), micro.targets.tolist(), micro.present_NT.tolist()
    ([2, 3, 2], [7, 8, 9], [[True, True], [True, False]])
    """
    shape = (len(plan.rows), plan.rows[0].length)
    if plan.packed:
        shape = (1, max(2, -(-plan.cost // BLOCK)) * BLOCK)
    token_ids, position_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    segment_ids = np.full(shape, PADDING, np.int64)
    tokens, positions, segments = token_ids.ravel(), position_ids.ravel(), segment_ids.ravel()  # views
    predictors: list[NDArray[np.int64]] = []
    answers: list[NDArray[np.int32]] = []
    end = 0
    for r, row in enumerate(plan.rows):
        prompt = groups[row.group].prompt.token_ids
        start = end if plan.packed else r * shape[1]
        last = start + len(prompt) - 1
        end = last + 1
        tokens[start:end], positions[start:end], segments[start:end] = prompt, np.arange(len(prompt)), PROMPT
        for segment, completion in enumerate(row.completions, start=1):
            answer = groups[row.group].completions[completion].token_ids
            start, end = end, end + len(answer)
            tokens[start:end], segments[start:end] = answer, segment
            positions[start:end] = len(prompt) + np.arange(len(answer))
            before = np.arange(start - 1, end - 1)
            before[:1] = last
            predictors.append(before)
            answers.append(answer)
    lengths = np.array([len(answer) for answer in answers])
    present = np.arange(lengths.max()) < lengths[:, None]
    targets = np.concatenate(answers).astype(np.int64)
    return MicroBatch(plan, token_ids, position_ids, segment_ids, np.concatenate(predictors), targets, present)


@dataclass(kw_only=True)
class MicroBatchTensors(Rows):
    """A micro-batch on the model's device."""

    micro: MicroBatch
    present_NT: Tensor

    def pad(self, flat: Tensor) -> Tensor:
        """Pad one value per completion token to [N, T] with 0. Gradients flow through."""
        return flat.new_zeros(self.present_NT.shape).masked_scatter(self.present_NT, flat)


def to_tensors(batch: Batch, micro: MicroBatch, *, counted: bool, device: torch.device) -> MicroBatchTensors:
    """Collect the loss inputs of a micro-batch of `batch.trimmed`. If it is not `counted`, mask all of it out."""
    pairs = micro.plan.completions
    completions = [batch.trimmed[b].completions[c] for b, c in pairs]
    flat_indices_N = torch.tensor([batch.flat_indices[b][c] for b, c in pairs])
    mask_NT = torch.from_numpy(micro.pad([c.loss_mask for c in completions], fill=False)) & counted

    def pad(values: list[NDArray[np.generic]], fill: float) -> Tensor:
        return torch.from_numpy(micro.pad(values, fill)).to(device)

    lags_NT = pad([_lags(c, batch.step) for c in completions], NO_LAG)
    published, replayed = batch.context.published, batch.context.replayed
    fresh_N = torch.tensor([published is not None and batch.trimmed[b].id not in replayed for b, _ in pairs])

    return MicroBatchTensors(
        micro=micro,
        present_NT=torch.from_numpy(micro.present_NT).to(device),
        mask_NT=mask_NT.to(device),
        behavior_NT=pad([_behavior_logprobs(c) for c in completions], np.nan),
        lags_NT=lags_NT,
        published_NT=fresh_N.to(device)[:, None] & (lags_NT == batch.step - (published or 0)),
        advantages_N=batch.credit.advantages_BG.flatten()[flat_indices_N].float().to(device),
        weights_N=batch.credit.weights_BG.flatten()[flat_indices_N].float().to(device),
        flat_indices_N=flat_indices_N.to(device),
    )


def _behavior_logprobs(completion: Completion) -> NDArray[np.float32]:
    if completion.behavior_logprobs is UNKNOWN:
        return np.full(len(completion.token_ids), np.nan, np.float32)
    return completion.behavior_logprobs


def _lags(completion: Completion, step: int) -> NDArray[np.int64]:
    lags = np.full(len(completion.token_ids), NO_LAG, np.int64)
    for span in completion.versions:
        if span.version <= step:
            lags[span.start : span.end] = step - span.version
    return lags
