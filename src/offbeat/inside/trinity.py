"""Trinity-RFT: a policy loss, an advantage and an operator that keeps the log, each named by its dotted path.

    algorithm:
      policy_loss_fn: offbeat.inside.trinity.PresetLoss
      policy_loss_fn_args: {preset: rec-oneside-nois}
      advantage_fn: offbeat.inside.trinity.PresetAdvantage
      advantage_fn_args: {preset: rec-oneside-nois}
    data_processor:
      experience_pipeline:
        operators: [{name: offbeat.inside.trinity.KeepLog, args: {out: runs/one}}]

Lag is Trinity's own: `synchronizer.sync_interval` and `sync_offset`. A version is the model version that its explorer
reports with each experience.
"""

from typing import Any, Final

import torch
from torch import Tensor
from trinity.algorithm.advantage_fn.advantage_fn import GroupAdvantage
from trinity.algorithm.policy_loss_fn.policy_loss_fn import PolicyLossFn
from trinity.buffer.operators.experience_operator import ExperienceOperatorV1
from trinity.common.experience import group_by

from offbeat.errors import NotServable
from offbeat.inside.books import Books
from offbeat.inside.losses import host_loss
from offbeat.inside.objectives import BOTH, objective_for
from offbeat.inside.rows import HostRow
from offbeat.objective.credit import assign_credit
from offbeat.seeds import derive

DEFAULT: Final = "rec-oneside-nois"


class PresetLoss(PolicyLossFn):  # type: ignore[misc]  # Trinity-RFT comes without types
    """A preset as Trinity's policy loss. Trinity averages each micro-batch alone."""

    def __init__(self, backend: str = "verl", preset: str = DEFAULT) -> None:
        super().__init__(backend=backend)
        if backend != "verl":
            raise NotServable(f"the backend {backend!r} passes no log-probs of the rollout: use the backend verl")
        self.objective = objective_for(preset, host="Trinity-RFT")

    def __call__(
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        rollout_log_probs: Tensor,
        action_mask: Tensor,
        advantages: Tensor,
        **_: Any,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return the loss of a micro-batch and its figures."""
        if self.objective.needs >= BOTH and torch.equal(old_logprob, rollout_log_probs):
            raise NotServable(
                "this preset needs the log-probs of the proximal policy beside those of the rollout, and Trinity-RFT "
                "has copied them: write bypass_old_logprobs: false under algorithm"
            )
        loss, figures = host_loss(
            self.objective, logprob, rollout_log_probs, advantages, action_mask, proximal_NT=old_logprob
        )
        named = {"pg_clipfrac": figures["gate_stopped"], "ppo_kl": figures["kl"], "pg_loss": float(loss.detach())}
        return loss, named | {f"offbeat/{name}": value for name, value in figures.items()}

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return the arguments of `__init__` that a configuration may leave out."""
        return {"preset": DEFAULT}


class PresetAdvantage(GroupAdvantage):  # type: ignore[misc]
    """The credit of a preset, over the whole batch. What it leaves out is not passed on to the trainer."""

    def __init__(self, preset: str = DEFAULT) -> None:
        self.objective = objective_for(preset, host="Trinity-RFT")

    def group_experiences(self, exps: list[Any]) -> dict[str, list[Any]]:
        """Return the experiences of each task."""
        return dict(group_by(exps, id_type="task"))

    def calculate_group_advantage(self, group_id: str, exps: list[Any]) -> tuple[list[Any], dict[str, float]]:
        """Return the experiences of one group with their credit."""
        return self._assign({group_id: exps})

    def process(self, exps: list[Any]) -> tuple[list[Any], dict[str, float]]:
        """Return the experiences that are trained on, with advantages and returns."""
        return self._assign(self.group_experiences(exps)) if exps else ([], {})

    def _assign(self, groups: dict[str, list[Any]]) -> tuple[list[Any], dict[str, float]]:
        shape = (len(groups), max(map(len, groups.values())))
        rewards_BG, scored_BG = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
        lengths_BG, truncated_BG = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
        for b, members in enumerate(groups.values()):
            for g, one in enumerate(members):
                lengths_BG[b, g] = int(one.action_mask.sum())
                if one.reward is not None:
                    rewards_BG[b, g], scored_BG[b, g] = float(one.reward), True
        seeds = [derive(0, "red-drop", name) for name in groups]
        credit = assign_credit(
            self.objective, rewards_BG, scored_BG, lengths_BG, group_seeds=seeds, truncated_BG=truncated_BG
        )
        kept = []
        for b, members in enumerate(groups.values()):
            for g, one in enumerate(members):
                if credit.trained_BG[b, g]:
                    value = credit.advantages_BG[b, g] * credit.weights_BG[b, g]
                    one.advantages = value.float() * one.action_mask
                    one.returns = one.advantages.clone()
                    kept.append(one)
        figures = {"offbeat/left_out_share": 1 - len(kept) / sum(map(len, groups.values()))}
        return kept, figures | {"offbeat/zero_variance_share": float(credit.zero_variance_B.float().mean())}

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return the arguments of `__init__` that a configuration may leave out."""
        return {"preset": DEFAULT}


class KeepLog(ExperienceOperatorV1):  # type: ignore[misc]
    """Writes every group to an experience log, and passes it on as it is."""

    def __init__(self, out: str) -> None:
        self.books = Books(out, host="trinity")

    async def process(self, exps: list[Any]) -> tuple[list[Any], dict[str, float]]:
        """Append the groups, and return figures of their lag: steps that the trainer has made since the version."""
        written, lags = 0, list[int]()
        for name, members in group_by(exps, id_type="task").items():
            rows = [host_row(one, name) for one in members]
            known = [one for one in members if known_version(one)]
            k = int(known[0].eid.batch) - 1 if known else 0
            lags += [k - one.info["model_version"] for one in known]
            written += len(self.books.write(rows, size=len(rows), k=k))
        figures = {"offbeat/groups": float(written)}
        if lags:
            figures |= {"offbeat/lag/mean": sum(lags) / len(lags), "offbeat/lag/max": float(max(lags))}
        return exps, figures

    async def close(self) -> None:
        """Wait until everything is on disk."""
        self.books.close()


def known_version(experience: Any) -> bool:
    """Return True if an experience says which version wrote it, and in which step."""
    return isinstance(experience.info.get("model_version"), int) and str(experience.eid.batch).isdigit()


def host_row(experience: Any, name: str) -> HostRow:
    """Return an experience as a row for the log."""
    start, version = experience.prompt_length, experience.info.get("model_version")
    return HostRow(
        prompt_ids=experience.tokens[:start].tolist(),
        token_ids=experience.tokens[start:].tolist(),
        logprobs=None if experience.logprobs is None else experience.logprobs.tolist(),
        reward=float("nan") if experience.reward is None else float(experience.reward),
        version=version if isinstance(version, int) else None,
        truncated=experience.truncate_status == "response_truncated",
        loss_mask=[bool(one) for one in experience.action_mask],
        columns={"host": {"host": "trinity", "task": name, "uid": experience.eid.uid}},
    )
