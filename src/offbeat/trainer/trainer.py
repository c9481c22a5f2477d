"""One step of the trainer: i updates on a batch of B groups.

    groups ─ find_faults ─ assemble_batch (credit, once) ─ plan_micro_batches
                                                             │
        update 1    forward and backward of every micro-batch, then AdamW; a gate over the whole batch looks first
        update 2…i  the same; the log-probs of update 1 are the proximal policy's, so it needs no pass of its own
                                                             │
                                                    measure ─ Trained, or RefusedBatch with the broken groups

The loss is divided by counts of the whole batch, so it does not depend on how the batch is cut into micro-batches or
spread over ranks. Nothing here draws random numbers: the same state and the same groups give the same policy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from offbeat.errors import NoGradient
from offbeat.objective.bound import shortfall
from offbeat.objective.gates import gate_batch
from offbeat.objective.logprobs import TokenStats
from offbeat.objective.losses import Loss, Streams, log_ratios, policy_loss
from offbeat.objective.measures import ForwardPass
from offbeat.objective.spec import Need, NoGate, Objective
from offbeat.trainer.batch import (
    Batch,
    MicroBatch,
    MicroBatchTensors,
    assemble_batch,
    build_micro_batch,
    find_faults,
    plan_micro_batches,
    to_tensors,
)
from offbeat.trainer.forward import ModelCheck, ModelInputs, PolicyModel, check_model, to_model_inputs
from offbeat.trainer.fsdp import Ranks, sum_gradients
from offbeat.trainer.measures import measure
from offbeat.trainer.optimizer import MasterAdamW
from offbeat.types import UNKNOWN, Group, GroupDrift, PublishedDrift, StepContext


@dataclass(frozen=True)
class StepSettings:
    """The settings of a training step."""

    objective: Objective
    updates_per_batch: int = 1
    """i."""
    token_budget: int = 4096
    """Tokens of a micro-batch, padding included; also the longest prompt plus completion that can be trained on."""
    length_limit: int | None = None
    """The divisor of the aggregate 'constant'."""
    refresh_every: int = 0
    """Steps between copies of the policy into the reference policy; 0 keeps the first reference."""
    seed: int = 0
    """RED-Drop draws from it, by group id."""


@dataclass(frozen=True)
class Trained:
    """The result of a step that updated the policy."""

    step: int
    """Steps taken, including this one: the version of the policy now."""
    updates: int
    """Fewer than `updates_per_batch` if the gate stopped every token."""
    groups: tuple[str, ...]
    """Ids of the groups that had a forward pass."""
    zero_variance: tuple[str, ...]
    """Ids of the groups of equal rewards, from which this objective learns nothing."""
    too_small: tuple[str, ...]
    published: PublishedDrift
    """Drift from the version published last. The cadence reads it."""
    group_drift: dict[str, GroupDrift]
    """Drift of each group with known log-probs, by id. The sampler retires groups by it."""
    metrics: dict[str, float]
    by_lag: dict[str, dict[str, float]]
    refused: dict[str, str] = field(default_factory=dict)
    """Groups that made an update after the first one impossible, by id, with the reason. The step ends with the updates
    made before; all its groups are trained, and these should not be drawn again."""
    updates_made: int | None = None
    """The updates of all steps, as the optimizer counts them. The ledger must have recorded as many."""
    overflowed: tuple[str, ...] = ()
    """Weights and moments that are not finite, or far too large."""


@dataclass(frozen=True)
class RefusedBatch:
    """A batch that was not trained on: no update was made, and k, parameters and optimizer are as before."""

    faults: dict[str, str]
    """Groups to quarantine: by id, with the reason. The other groups can be trained as a smaller batch."""


@dataclass
class Trainer:
    """The policy model, its optimizer, and k, the number of steps taken. A checkpoint holds all of it.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from offbeat.objective.presets import PRESETS
    >>> from offbeat.trainer.optimizer import OptimizerSettings
    >>> from offbeat.types import Completion, Prompt, Score
    >>> sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    >>> policy_model = PolicyModel(LlamaForCausalLM(LlamaConfig(**sizes)))
    >>> optimizer = MasterAdamW(policy_model, OptimizerSettings())
    >>> trainer = Trainer(policy_model, optimizer, StepSettings(PRESETS["red-drop"].objective))
    >>> answers = tuple(Completion(f"g/{i}", [5, i], UNKNOWN, score=Score(float(i == 0))) for i in range(2))
    >>> done = trainer.train([Group("g", Prompt("p", [1, 2], "t"), answers)])
    >>> done.step, done.groups, done.metrics["reward_mean"]
    (1, ('g',), 0.5)
    """

    policy_model: PolicyModel
    optimizer: MasterAdamW
    settings: StepSettings
    reference: PolicyModel | None = None
    ranks: Ranks = field(default_factory=Ranks)
    step: int = 0
    check: ModelCheck = field(init=False)
    _packed_inputs: WeakKeyDictionary[MicroBatch, ModelInputs] = field(init=False, default_factory=WeakKeyDictionary)

    def __post_init__(self) -> None:
        adapted = self.policy_model.adapter is not None
        if self._needs_reference and self.reference is None and not adapted:
            raise ValueError("this objective has a KL term to a reference policy: give a second model as `reference`")
        if adapted and (self.reference is not None or self.settings.refresh_every):
            raise ValueError("an adapter's reference policy is its base: leave out `reference` and `refresh_every`")
        if not self._needs_reference and self.reference is not None:
            raise ValueError("this objective does not use a reference policy: leave `reference` out")
        self.check = check_model(self.policy_model, self.settings.token_budget)
        if self.reference is not None:
            check_model(self.reference.requires_grad_(False), self.settings.token_budget)

    def train(self, groups: Sequence[Group], context: StepContext | None = None) -> Trained | RefusedBatch:
        """Take one step on `groups`. Every rank gets the whole batch.

        Raises `NoGradient` if no token of the batch would move the policy.
        """
        settings, objective = self.settings, self.settings.objective
        budget, vocab_size = settings.token_budget, self.policy_model.vocab_size
        if faults := find_faults(groups, objective, token_budget=budget, vocab_size=vocab_size):
            return RefusedBatch(faults)
        batch = assemble_batch(groups, objective, step=self.step, seed=settings.seed, context=context)
        if not batch.trimmed:
            raise NoGradient(_no_reward_difference(batch))

        parts = self._make_micro_batches(batch)
        figures: dict[str, float] = {}
        refused: dict[str, str] = {}
        updates = 0
        for _ in range(settings.updates_per_batch):
            loss, moving_tokens, faulty_B = self._forward_backward(batch, parts)
            norm = self.optimizer.grad_norm()
            if refused := self._non_finite(batch, faulty_B, norm, updates):
                self.optimizer.discard()
                if updates == 0:
                    return RefusedBatch(refused)
                for part in parts:  # nothing is measured on a pass that made no update
                    part.passes.pop()
                break
            if moving_tokens == 0:
                self.optimizer.discard()
                break
            rate = self.optimizer.update(self.step, norm)
            figures = {"loss": loss, "grad_norm": norm, "learning_rate": rate}
            updates += 1
        if updates == 0:
            raise NoGradient(_no_token_passed(batch))

        gated = not isinstance(objective.gate, NoGate) or objective.reject is not None
        measures = measure(batch, parts, gated=gated, ranks=self.ranks)
        figures["drift_step"], overflowed = self._divergence(batch, parts[-1])
        self.step += 1
        self._refresh_reference()
        trained = tuple(group.id for group in batch.trimmed)
        return Trained(
            step=self.step,
            updates=updates,
            groups=trained,
            zero_variance=tuple(one for one in batch.ids(batch.credit.zero_variance_B) if one not in trained),
            too_small=batch.ids(batch.credit.too_small_B),
            published=measures.published,
            group_drift=measures.groups,
            metrics=measures.overall | figures | {"updates": float(updates)},
            by_lag=measures.by_lag,
            refused=refused,
            updates_made=self.optimizer.updates,
            overflowed=overflowed,
        )

    def _make_micro_batches(self, batch: Batch) -> list[MicroBatchTensors]:
        """Return this rank's micro-batches, the longest first, with the reference policy's log-probs if needed."""
        budget, check = self.settings.token_budget, self.check
        plans = plan_micro_batches(batch.trimmed, budget, shared_prefix=check.shared_prefix, packed=check.packed)
        parts = []
        for plan, counted in self.ranks.share(plans):
            micro = build_micro_batch(plan, batch.trimmed)
            part = to_tensors(batch, micro, counted=counted, device=self.policy_model.device)
            if self._needs_reference:
                part.reference_NT = part.pad(self.reference_logprobs(self._model_inputs(part)))
            parts.append(part)
        return parts

    @property
    def _needs_reference(self) -> bool:
        return Need.REFERENCE in self.settings.objective.needs

    @torch.no_grad()
    def reference_logprobs(self, inputs: ModelInputs) -> Tensor:
        """Return the log-probs of the reference policy: of a model of its own, or of the base of an adapter."""
        if self.reference is not None:
            stats: TokenStats = self.reference(inputs)
            return stats.logprobs
        with self.policy_model.base_only():
            stats = self.policy_model(inputs)
            return stats.logprobs

    def _model_inputs(self, part: MicroBatchTensors) -> ModelInputs:
        """Build the model's inputs once for packed rows, and for each pass for others, whose masks fill the memory."""
        if (kept := self._packed_inputs.get(part.micro)) is not None:
            return kept
        device = self.policy_model.device
        inputs = to_model_inputs(part.micro, shared_prefix=self.check.shared_prefix, device=device)
        if self.check.packed:
            self._packed_inputs[part.micro] = inputs
        return inputs

    def _forward_backward(self, batch: Batch, parts: list[MicroBatchTensors]) -> tuple[float, int, Tensor]:
        """Accumulate the gradients of one update.

        Returns the loss, the number of tokens with a gradient, and the groups whose log-probs are not finite [B].
        """
        settings = self.settings
        groups, size = batch.rewards_BG.shape
        gates = self._first_look(batch, parts) if settings.objective.needs_first_look else [None] * len(parts)
        found = torch.zeros(2 + groups, dtype=torch.float64, device=self.policy_model.device)
        for number, (part, gate_NT) in enumerate(zip(parts, gates, strict=True), start=1):
            sum_gradients(self.policy_model, self.ranks, last=number == len(parts))
            stats = self.policy_model(self._model_inputs(part))
            policy_NT = part.pad(stats.logprobs)
            streams = _loss_streams(part, policy_NT)
            limit = settings.length_limit
            loss = policy_loss(settings.objective, streams, batch.counts, length_limit=limit, gate_NT=gate_NT)
            loss.total.backward()
            part.passes.append(ForwardPass(policy_NT.detach(), part.pad(stats.entropies.detach()), loss.passed_NT))
            faulty_N = (part.mask_NT & ~policy_NT.isfinite()).any(-1)
            found[0] += loss.total.detach()
            found[1] += _has_gradient(settings.objective, part, loss).sum()
            found[2 + part.flat_indices_N[faulty_N] // size] = 1
        found = self.ranks.sum(found).cpu()
        return float(found[0]), int(found[1]), found[2:] > 0

    @torch.no_grad()
    def _first_look(self, batch: Batch, parts: list[MicroBatchTensors]) -> list[Tensor | None]:
        """Return what gates over the whole batch let through, for each micro-batch, from a pass without gradient.

        The log-ratios go into a table with a row for every completion of the batch; one rank fills each of its cells,
        so every rank decides the same, from the same numbers. The loss uses these decisions even if its own forward
        pass rounds differently.
        """
        objective = self.settings.objective
        longest = max(len(one.token_ids) for group in batch.trimmed for one in group.completions)
        advantages_N = batch.credit.advantages_BG.flatten().to(parts[0].mask_NT.device)
        table = torch.zeros(2, len(advantages_N), longest, dtype=torch.float64, device=advantages_N.device)
        for part in parts:
            streams = _loss_streams(part, part.pad(self.policy_model(self._model_inputs(part)).logprobs))
            against_NT = streams.need(Need(objective.against.value))
            ratios_NT = log_ratios(streams.policy_NT, against_NT, part.mask_NT)
            # A micro-batch that does not count is masked out: it adds 0 to rows that another rank fills.
            table[:, part.flat_indices_N, : ratios_NT.shape[1]] += torch.stack([ratios_NT, part.mask_NT]).double()
        ratios_NT, trained_NT = self.ranks.sum(table)
        group_size = batch.rewards_BG.shape[1]
        gate_NT = gate_batch(objective, ratios_NT, advantages_N, trained_NT > 0, group_size=group_size)
        return [gate_NT[part.flat_indices_N, : part.mask_NT.shape[1]] for part in parts]

    @torch.no_grad()
    def _divergence(self, batch: Batch, part: MicroBatchTensors) -> tuple[float, tuple[str, ...]]:
        """Return how far the step moved the policy, on 256 tokens of `part` or a few more, and what overflowed."""
        rows = part.micro.plan.rows
        if self.check.packed:  # a row of another length would be another graph
            inputs = self._model_inputs(part)
        else:
            count = next((n for n in range(1, len(rows)) if sum(row.length for row in rows[-n:]) >= 256), len(rows))
            micro = build_micro_batch(replace(part.micro.plan, rows=rows[-count:]), batch.trimmed)
            inputs = to_model_inputs(micro, shared_prefix=self.check.shared_prefix, device=part.mask_NT.device)
        after = self.policy_model(inputs).logprobs
        before, counted = (one[part.present_NT][-len(after) :] for one in (part.proximal_NT, part.mask_NT))
        overflows = self.optimizer.overflows()
        sums = [shortfall(after - before)[counted].double().sum(), counted.sum(), *overflows.values()]
        lost, tokens, *flags = self.ranks.sum(torch.stack([one.to(sums[0]) for one in sums])).tolist()
        overflowed = tuple(name for name, flag in zip(overflows, flags, strict=True) if flag)
        return (math.nan if overflowed else lost / max(tokens, 1.0)), overflowed

    def _non_finite(self, batch: Batch, faulty_B: Tensor, norm: float, updates: int) -> dict[str, str]:
        """Return why the next update must not be made, by group; empty if it may be made."""
        if bool(faulty_B.any()):
            ids, reason = batch.ids(faulty_B), "the policy's log-probs of it are not finite"
        elif not math.isfinite(norm):
            ids = tuple(group.id for group in batch.trimmed)
            reason = (
                f"the batch's gradient norm is {norm} although every log-prob is finite; this group is in the batch"
            )
        else:
            return {}
        if updates:  # the same groups were fine before the updates of this step
            reason += f" after update {updates} of the step: a learning rate of {self._rate:g} is too high"
        elif len(ids) == len(batch.trimmed) > 1 and self.step:
            reason += f". So are those of the whole batch: a learning rate of {self._rate:g} is probably too high"
        return dict.fromkeys(ids, reason)

    @property
    def _rate(self) -> float:
        return self.optimizer.settings.schedule.at(self.step)

    def _refresh_reference(self) -> None:
        every = self.settings.refresh_every
        if self.reference is not None and every and self.step % every == 0:
            with torch.no_grad():
                for theirs, ours in zip(self.reference.parameters(), self.policy_model.parameters(), strict=True):
                    theirs.copy_(ours)


def _loss_streams(part: MicroBatchTensors, policy_NT: Tensor) -> Streams:
    return Streams(
        policy_NT=policy_NT,
        behavior_NT=part.behavior_NT,
        proximal_NT=part.proximal_NT if part.passes else policy_NT.detach(),
        reference_NT=UNKNOWN if part.reference_NT is None else part.reference_NT,
        advantages_N=part.advantages_N,
        weights_N=part.weights_N,
        mask_NT=part.mask_NT,
    )


def _has_gradient(objective: Objective, part: MicroBatchTensors, loss: Loss) -> Tensor:
    """Return the tokens with a gradient, [N, T]."""
    if objective.regularizers:
        return part.mask_NT
    return loss.passed_NT & (part.advantages_N * part.weights_N != 0)[:, None]


def _no_reward_difference(batch: Batch) -> str:
    groups, credit, rewards = len(batch.groups), batch.credit, batch.rewards_BG[batch.scored_BG].unique().tolist()
    if len(rewards) == 1:
        return (
            f"0 tokens had gradient: every completion of {groups} groups has reward {rewards[0]:g}. If none is higher, "
            "the policy solves these prompts: end the run, or use harder ones. If it means failure, use easier prompts "
            "or larger groups, or check the reward function"
        )
    return (
        f"0 tokens had gradient: of {groups} groups {int(credit.zero_variance_B.sum())} have no difference in reward "
        f"and {int(credit.too_small_B.sum())} fewer than two scored completions; use other prompts, enlarge groups, "
        "or check the reward function"
    )


def _no_token_passed(batch: Batch) -> str:
    return (
        f"0 tokens had gradient: each of the {batch.counts.tokens} tokens in {len(batch.trimmed)} groups has advantage "
        "0 or was stopped by the gate; if drift is high, publish sooner or widen the clip, otherwise use other prompts"
    )
