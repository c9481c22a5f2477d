"""The policies that a run has kept, and the log-probs that its trainer computes under each of them."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.config import Config
from offbeat.run.directory import RunDirectory
from offbeat.run.learner import policy_model_of
from offbeat.trainer.batch import build_micro_batch, plan_micro_batches
from offbeat.trainer.checkpoint import Checkpoint
from offbeat.trainer.forward import check_model, to_model_inputs
from offbeat.trainer.fsdp import Ranks, named_tensors
from offbeat.types import Group
from offbeat.weights.subscriber import Subscription

TokenLogProbs = tuple[NDArray[np.float32], ...]
"""The log-probs of the tokens of each completion of a group."""


class KeptPolicy(NamedTuple):
    """The policy after `step` steps, and where a run has kept it."""

    step: int
    where: Literal["published", "checkpoint"]


class KeptPolicies:
    """The versions and checkpoints of a run."""

    def __init__(self, directory: RunDirectory, config: Config, versions: Subscription) -> None:
        self._config, self._versions = config, versions
        self._compute: torch.dtype = getattr(torch, config.model.compute)
        self.published = versions.versions()
        self._checkpoints = _checkpoints(directory)
        kept: dict[Literal["published", "checkpoint"], Collection[int]]
        kept = {"published": self.published, "checkpoint": self._checkpoints}
        # What is published may be rounded to fewer bits than the trainer multiplies; a checkpoint is not.
        self._kept = dict(reversed(kept.items())) if self.rounded else kept

    @property
    def rounded(self) -> bool:
        """True if a publish rounds the weights that the trainer multiplies."""
        return getattr(torch, self._config.model.serve).itemsize < self._compute.itemsize  # type: ignore[no-any-return]

    def before(self, version: int) -> KeptPolicy | None:
        """Return the version published before this one, or None if the weight log has none."""
        return max((KeptPolicy(one, "published") for one in self.published if one < version), default=None)

    def find(self, step: int) -> KeptPolicy | None:
        """Return the policy after `step` steps, or the next one that is kept; None if none of them is."""
        kept = [KeptPolicy(one, where) for where, steps in self._kept.items() for one in steps if one >= step]
        return min(kept, key=lambda one: one.step, default=None)  # of two at the same step, the first

    def logprobs(self, wanted: Mapping[KeptPolicy, Collection[Group]]) -> dict[tuple[KeptPolicy, str], TokenLogProbs]:
        """Compute the log-probs of groups under policies as the trainer does; return them by policy and group id.

        Each policy is loaded once. The run's temperature is applied.
        """
        model, budget = policy_model_of(self._config, Ranks()), self._config.trainer.token_budget
        if model.adapter is not None and (published := self._versions.adapter(self.published[0])) is not None:
            published.require_base(model.adapter.base, str(self._config.model.directory()))
        check = check_model(model, budget)
        found: dict[tuple[KeptPolicy, str], TokenLogProbs] = {}
        for policy in sorted(wanted):  # in order, so that a version is a patch on the one before it
            groups, state = [*wanted[policy]], self._state(policy)
            rows: dict[tuple[int, int], NDArray[np.float32]] = {}
            with torch.no_grad():
                for name, tensor in named_tensors(model):
                    tensor.copy_(state[name].to(self._compute) if tensor.is_floating_point() else state[name])
                for plan in plan_micro_batches(groups, budget, shared_prefix=check.shared_prefix, packed=check.packed):
                    micro = build_micro_batch(plan, groups)
                    inputs = to_model_inputs(micro, shared_prefix=check.shared_prefix, device=model.device)
                    sizes = micro.present_NT.sum(1)
                    flat = model(inputs).logprobs.float().cpu().numpy()
                    rows |= zip(plan.completions, np.split(flat, sizes.cumsum()[:-1]), strict=True)
            for place, group in enumerate(groups):
                found[policy, group.id] = tuple(rows[place, one] for one in range(len(group.completions)))
        return found

    def _state(self, policy: KeptPolicy) -> Mapping[str, Tensor]:
        if policy.where == "published":
            return self._versions.fetch(policy.step)
        return dict(Checkpoint.open(self._checkpoints[policy.step]).policy())


def _checkpoints(directory: RunDirectory) -> dict[int, Path]:
    folders = [manifest.parent for manifest in directory.checkpoints.glob("step-*/manifest.json")]
    return {int(step): one for one in folders if (step := one.name.removeprefix("step-")).isdecimal()}
