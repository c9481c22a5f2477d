"""Turns a ragged case into the padded tensors of `offbeat.objective`."""

from dataclasses import dataclass

import torch
from naive import Case
from torch import Tensor

from offbeat.objective.credit import Credit, assign_credit
from offbeat.objective.gates import gate_batch
from offbeat.objective.losses import Counts, Loss, Streams, counts, log_ratios, policy_loss
from offbeat.objective.spec import Need, Objective
from offbeat.types import UNKNOWN


@dataclass
class Batch:
    """A whole batch as rows; `policy` is the leaf whose gradient is compared."""

    policy: Tensor
    behavior: Tensor
    proximal: Tensor
    mask: Tensor
    credit: Credit

    @staticmethod
    def of(objective: Objective, case: Case, *, padding: int = 0, fill: float = 0.0) -> "Batch":
        rewards = torch.tensor(case.rewards, dtype=torch.float64)
        scored = torch.ones_like(rewards, dtype=torch.bool)
        rows = [c for group in case.policy for c in group]
        longest = max(len(row) for row in rows) + padding
        mask = torch.tensor([[t < len(row) for t in range(longest)] for row in rows])
        lengths = mask.sum(-1).view(rewards.shape)
        credit = assign_credit(objective, rewards, scored, lengths, group_seeds=case.seeds)

        def padded(groups: list[list[Tensor]]) -> Tensor:
            out = torch.full((len(rows), longest), fill, dtype=torch.float64)
            for row, values in zip(out, (c for group in groups for c in group), strict=True):
                row[: len(values)] = values.detach()
            return out

        policy = padded(case.policy).requires_grad_()
        return Batch(policy, padded(case.behavior), padded(case.proximal), mask, credit)

    @property
    def trained(self) -> Tensor:
        """Return the mask of tokens that take part."""
        return self.mask & self.credit.trained_BG.reshape(-1, 1)

    def counts(self) -> Counts:
        return counts(self.trained)

    def streams(self, objective: Objective, rows: Tensor | slice = slice(None)) -> Streams:
        """Return the streams of some rows, without those the objective does not need: this verifies `needs`."""
        known = {need: need in objective.needs for need in Need}
        return Streams(
            self.policy[rows],
            self.behavior[rows] if known[Need.BEHAVIOR] else UNKNOWN,
            self.proximal[rows] if known[Need.PROXIMAL] else UNKNOWN,
            UNKNOWN,
            self.credit.advantages_BG.reshape(-1)[rows],
            self.credit.weights_BG.reshape(-1)[rows],
            self.trained[rows],
        )

    def gate(self, objective: Objective) -> Tensor | None:
        """Return what gates over the whole batch let through, if the objective has one."""
        if not objective.needs_first_look:
            return None
        ratios = log_ratios(self.policy.detach(), self.behavior, self.trained)
        advantages, size = self.credit.advantages_BG.reshape(-1), self.credit.advantages_BG.shape[1]
        return gate_batch(objective, ratios, advantages, self.trained, group_size=size)

    def full_loss(self, objective: Objective, rows: Tensor | slice = slice(None), *, length_limit: int = 9) -> Loss:
        gate = self.gate(objective)
        gate = gate if gate is None else gate[rows]
        streams = self.streams(objective, rows)
        return policy_loss(objective, streams, self.counts(), length_limit=length_limit, gate_NT=gate)

    def loss(self, objective: Objective, rows: Tensor | slice = slice(None), *, length_limit: int = 9) -> Tensor:
        return self.full_loss(objective, rows, length_limit=length_limit).total
