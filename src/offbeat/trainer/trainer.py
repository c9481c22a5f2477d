"""One step of the trainer: i updates on a batch of B groups.

    groups ─ find_faults ─ assemble (credit, once) ─ plan (micro-batches)
                                                       │
        update 1   forward + backward of every micro-batch, then AdamW      its log-probs are the proximal policy's
        update 2…i the same with the proximal log-probs kept                 no pass is made for them
                                                       │
                                                    measure ─ Trained, or Refused with the groups to blame

The loss is divided by counts of the whole batch, so neither the micro-batches nor the ranks they fall to change it.
Nothing here draws random numbers: the same state and the same groups give the same policy.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offbeat.errors import NoGradient
from offbeat.objective.losses import Loss, Streams, policy_loss
from offbeat.objective.spec import Need, NoGate, Objective
from offbeat.trainer.batch import Batch, MicroBatchStreams, assemble, find_faults, to_streams
from offbeat.trainer.forward import ModelCheck, PolicyModel, check_model
from offbeat.trainer.fsdp import Ranks
from offbeat.trainer.measures import Pass, Seen, measure
from offbeat.trainer.optimizer import MasterAdamW
from offbeat.trainer.packing import lay_out, plan
from offbeat.types import UNKNOWN, Group


@dataclass(frozen=True)
class StepSettings:
    """What a step is."""

    objective: Objective
    updates_per_batch: int = 1
    """i."""
    token_budget: int = 4096
    """Tokens of a micro-batch, padding included; also the longest prompt and completion that can be trained on."""
    length_limit: int | None = None
    """The constant of aggregate 'constant'."""
    refresh_every: int = 0
    """Steps between copies of the policy into the reference; 0 keeps the first."""
    seed: int = 0
    """Of RED-Drop's draws, by group id."""


@dataclass(frozen=True)
class Trained:
    """What a step did."""

    step: int
    """Steps taken, this one included: the version of the policy now."""
    updates: int
    """Fewer than asked for where the gate stopped every token."""
    groups: tuple[str, ...]
    """Those that pushed the policy."""
    zero_variance: tuple[str, ...]
    too_small: tuple[str, ...]
    drift: float | None
    """Token-level total variation between π_k and α; None if no behavior log-prob is known. The cadence reads it."""
    metrics: dict[str, float]
    by_lag: dict[str, dict[str, float]]


@dataclass(frozen=True)
class RefusedBatch:
    """An update that was not made: parameters and optimiser are as before it."""

    faults: dict[str, str]
    """Groups to quarantine, by id, each with its reason."""
    updates: int = 0
    """Updates of this batch that were made before; where there are any, the step counts."""


@dataclass
class Trainer:
    """The policy being trained, its optimiser, and k, the steps taken: what a checkpoint holds.

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

    def __post_init__(self) -> None:
        needed = Need.REFERENCE in self.settings.objective.needs
        if needed and self.reference is None:
            raise ValueError("this objective has a KL term to a reference policy: give a second model as `reference`")
        if not needed and self.reference is not None:
            raise ValueError("no term of this objective looks at a reference policy: leave `reference` out")
        self.check = check_model(self.policy_model, self.settings.token_budget)
        if self.reference is not None:
            check_model(self.reference.requires_grad_(False), self.settings.token_budget)

    def train(self, groups: Sequence[Group], *, prior_B2: Tensor | None = None) -> Trained | RefusedBatch:
        """One step on `groups`, the whole batch on every rank; `prior_B2` is for shrunk advantages.

        Raises `NoGradient` where the batch has nothing to teach.
        """
        settings, objective = self.settings, self.settings.objective
        budget, vocabulary = settings.token_budget, self.policy_model.vocabulary
        if faults := find_faults(groups, objective, token_budget=budget, vocabulary=vocabulary):
            return RefusedBatch(faults)
        batch = assemble(groups, objective, step=self.step, seed=settings.seed, prior_B2=prior_B2)
        if not batch.trimmed:
            raise NoGradient(_nothing_to_train(batch))

        seen = self._lay_out(batch)
        figures: dict[str, float] = {}
        updates = 0
        for _ in range(settings.updates_per_batch):
            loss, pushing, faulty_B = self._forward_backward(batch, seen)
            norm = self.optimizer.grad_norm()
            if faults := _faults(batch, faulty_B, norm):
                self.optimizer.discard()
                self.step += updates > 0
                return RefusedBatch(faults, updates)
            if pushing == 0:
                self.optimizer.discard()
                break
            rate = self.optimizer.update(self.step, norm)
            figures = {"loss": loss, "grad_norm": norm, "learning_rate": rate}
            updates += 1
        if updates == 0:
            raise NoGradient(_nobody_pushed(batch))

        gated = not isinstance(objective.gate, NoGate) or objective.reject is not None
        measures = measure(batch, seen, gated=gated, ranks=self.ranks)
        self.step += 1
        self._refresh_reference()
        return Trained(
            step=self.step,
            updates=updates,
            groups=tuple(group.id for group in batch.trimmed),
            zero_variance=batch.ids(batch.credit.zero_variance_B),
            too_small=batch.ids(batch.credit.too_small_B),
            drift=measures.overall.get("drift_tv_token"),
            metrics=measures.overall | figures | {"updates": float(updates)},
            by_lag=measures.by_lag,
        )

    def _lay_out(self, batch: Batch) -> list[Seen]:
        """This rank's micro-batches, the longest first, with the reference policy's log-probs if there is one."""
        shared, device = self.check.shared_prefix, self.policy_model.device
        plans = plan(batch.trimmed, self.settings.token_budget, shared_prefix=shared)
        seen = []
        for one, counts in self.ranks.share(plans):
            micro = lay_out(one, batch.trimmed)
            part = to_streams(batch, micro, shared_prefix=shared, counts=counts, device=device)
            reference_NT = None
            if self.reference is not None:
                with torch.no_grad():
                    reference_NT = part.padded(self.reference(part.layout).logprobs)
            seen.append(Seen(part, [], reference_NT))
        return seen

    def _forward_backward(self, batch: Batch, seen: list[Seen]) -> tuple[float, int, Tensor]:
        """Gradients of one update added up: its loss, tokens that push, groups whose log-probs are not finite [B]."""
        settings = self.settings
        groups, size = batch.rewards_BG.shape
        found = torch.zeros(2 + groups, dtype=torch.float64, device=self.policy_model.device)
        for one in seen:
            part = one.part
            stats = self.policy_model(part.layout)
            policy_NT = part.padded(stats.logprobs)
            loss = policy_loss(
                settings.objective, _streams(one, policy_NT), batch.counts, length_limit=settings.length_limit
            )
            loss.total.backward()
            one.passes.append(Pass(policy_NT.detach(), part.padded(stats.entropies.detach()), loss.passed_NT))
            faulty_N = (part.mask_NT & ~policy_NT.isfinite()).any(-1)
            found[0] += loss.total.detach()
            found[1] += _pushing(settings.objective, part, loss).sum()
            found[2 + part.places_N[faulty_N] // size] = 1
        found = self.ranks.sum(found).cpu()
        return float(found[0]), int(found[1]), found[2:] > 0

    def _refresh_reference(self) -> None:
        every = self.settings.refresh_every
        if self.reference is not None and every and self.step % every == 0:
            with torch.no_grad():
                for theirs, ours in zip(self.reference.parameters(), self.policy_model.parameters(), strict=True):
                    theirs.copy_(ours)


def _streams(one: Seen, policy_NT: Tensor) -> Streams:
    part = one.part
    return Streams(
        policy_NT=policy_NT,
        behavior_NT=part.behavior_NT,
        proximal_NT=one.proximal_NT if one.passes else policy_NT.detach(),
        reference_NT=UNKNOWN if one.reference_NT is None else one.reference_NT,
        advantages_N=part.advantages_N,
        weights_N=part.weights_N,
        mask_NT=part.mask_NT,
    )


def _pushing(objective: Objective, part: MicroBatchStreams, loss: Loss) -> Tensor:
    """Tokens with a gradient, [N, T]."""
    if objective.regularizers:
        return part.mask_NT
    return loss.passed_NT & (part.advantages_N * part.weights_N != 0)[:, None]


def _faults(batch: Batch, faulty_B: Tensor, norm: float) -> dict[str, str]:
    """Why the update must not be made, by group; empty if it may."""
    if bool(faulty_B.any()):
        return dict.fromkeys(batch.ids(faulty_B), "the policy's log-probs of it are not finite")
    if not math.isfinite(norm):
        reason = f"the batch's gradient has norm {norm} though every log-prob is finite; it was one of this batch"
        return dict.fromkeys((group.id for group in batch.trimmed), reason)
    return {}


def _nothing_to_train(batch: Batch) -> str:
    groups, credit = len(batch.groups), batch.credit
    return (
        f"0 tokens had gradient: of {groups} groups {int(credit.zero_variance_B.sum())} have no difference in reward "
        f"and {int(credit.too_small_B.sum())} fewer than two scored completions; draw other prompts, enlarge groups, "
        "or look at the scorer"
    )


def _nobody_pushed(batch: Batch) -> str:
    return (
        f"0 tokens had gradient: of {batch.counts.tokens} tokens in {len(batch.trimmed)} groups each has advantage 0 "
        "or was stopped by the gate; sync sooner or widen the clip if drift is high, otherwise draw other prompts"
    )
