"""verl: our presets as its policy losses and advantage estimators, registered by its entry point `verl.plugins`.

After `pip install` beside verl these names exist in the driver and in every worker:

    actor_rollout_ref.actor.policy_loss.loss_mode=offbeat/rec-oneside-nois
    algorithm.adv_estimator=offbeat/rec-oneside-nois

verl passes its loss one stream of log-probs beside the policy's, `old_log_prob`. With bypass mode these are the
behavior policy's, with which a gate compares; without it they are recomputed. What cannot work is refused before
anything starts, with the line to write.
"""

import os
from collections.abc import Callable, Iterable
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offbeat.errors import NotServable, suggest_nearest
from offbeat.inside.losses import host_loss
from offbeat.inside.objectives import objective_for
from offbeat.objective.credit import assign_credit
from offbeat.objective.losses import Counts
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import Aggregate, Need, Objective
from offbeat.seeds import derive

PREFIX: Final = "offbeat/"
AGGREGATES: Final = {
    Aggregate.TOKEN_MEAN: "token-mean",
    Aggregate.SEQUENCE_MEAN_TOKEN_MEAN: "seq-mean-token-mean",
    Aggregate.SEQUENCE_MEAN_TOKEN_SUM: "seq-mean-token-sum",
    Aggregate.CONSTANT: "seq-mean-token-sum-norm",
}
"""verl's name of each aggregate."""
EXTERNAL: Final = "offbeat.inside.verl_trainer"
BYPASS: Final = "algorithm.rollout_correction.bypass_mode=true actor_rollout_ref.rollout.calculate_log_probs=true"
CORRECTION: Final = (
    "algorithm.rollout_correction.rollout_is and rollout_rs change verl's own losses, and a preset has weights of its "
    "own: leave them out"
)
CLIPS: Final = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
TRAINERS: Final = ("sync", "colocate_async", "separate_async")


def _objective(name: str) -> Objective:
    return objective_for(name, host="verl", streams=1, prefix=PREFIX)


def loss_for(name: str) -> Callable[..., tuple[Tensor, dict[str, Any]]]:
    """Return a preset as a policy loss of verl. One that verl's hook cannot serve raises the reason when it is called.

    Averages are taken as the preset says, over verl's counts of the whole mini-batch, so a mini-batch may be cut in
    micro-batches and spread over ranks.
    """

    def loss(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        objective = _objective(name)
        _require_aggregate(name, objective, loss_agg_mode)
        if rollout_is_weights is not None:
            raise NotServable(CORRECTION)
        whole = dict(getattr(config, "global_batch_info", None) or {})
        mask_NT = response_mask.bool()
        total = Counts(
            int(whole.get("batch_num_tokens") or mask_NT.sum()),
            int(whole.get("global_batch_size") or mask_NT.any(-1).sum()),
        )
        limit = int(whole.get("loss_scale_factor") or mask_NT.shape[-1])
        share, figures = host_loss(
            objective, log_prob, old_log_prob, advantages, response_mask, total=total, length_limit=limit
        )
        # verl averages figures over micro-batches, and has two of them under names of its own.
        named = {"actor/ppo_kl": figures.pop("kl"), "actor/pg_clipfrac": figures.pop("gate_stopped")}
        return share * (whole.get("dp_size") or 1), named | {f"offbeat/{name}": one for name, one in figures.items()}

    return loss


def estimator_for(name: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a preset's credit as an advantage estimator of verl: advantage times weight, 0 for what is left out.

    verl divides by all tokens, or all completions, of a mini-batch. So credit is scaled by all over those that are
    trained on: with one mini-batch a batch, the gradient is that of `assign_credit` and `policy_loss`.
    """

    def estimator(
        token_level_rewards: Tensor,
        response_mask: Tensor,
        index: NDArray[Any] | None = None,
        config: Any = None,
        **_others: Any,
    ) -> tuple[Tensor, Tensor]:
        objective = _objective(name)
        _require_bypass(name, objective, config)
        if index is None:
            raise NotServable(f"{PREFIX}{name} compares the completions of a prompt, and this batch has no uid")
        mask_NT = response_mask.bool()
        uids, group_N, place_N, size = _places(index)
        shape = (len(uids), size)
        rewards_BG, scored_BG = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.bool)
        lengths_BG = torch.zeros(shape, dtype=torch.int64)
        rewards_BG[group_N, place_N] = token_level_rewards.sum(-1).double().cpu()
        scored_BG[group_N, place_N] = True
        lengths_BG[group_N, place_N] = mask_NT.sum(-1).cpu()
        seeds = [derive(0, "red-drop", str(uid)) for uid in uids]
        truncated_BG = torch.zeros_like(scored_BG)
        credit = assign_credit(
            objective, rewards_BG, scored_BG, lengths_BG, group_seeds=seeds, truncated_BG=truncated_BG
        )
        counted_BG = lengths_BG if objective.aggregate is Aggregate.TOKEN_MEAN else lengths_BG.clamp(max=1)
        scale = counted_BG.sum() / counted_BG[credit.trained_BG].sum().clamp(min=1)
        credit_N = (credit.advantages_BG * credit.weights_BG * scale)[group_N, place_N]
        advantages_NT = credit_N.to(token_level_rewards)[:, None] * mask_NT
        return advantages_NT, advantages_NT

    return estimator


def by_uid(uids: Iterable[Any]) -> dict[Any, list[int]]:
    """Return the rows of each prompt, in the order of the batch.

    >>> by_uid(["a", "b", "a"])
    {'a': [0, 2], 'b': [1]}
    """
    found: dict[Any, list[int]] = {}
    for row, uid in enumerate(uids):
        found.setdefault(uid, []).append(row)
    return found


def _places(index: NDArray[Any]) -> tuple[list[Any], Tensor, Tensor, int]:
    """Return the uids, each row's group and its place in it, and the size of the largest group."""
    groups = by_uid(index.tolist())
    group_N, place_N = np.zeros(len(index), np.int64), np.zeros(len(index), np.int64)
    for number, rows in enumerate(groups.values()):
        group_N[rows], place_N[rows] = number, np.arange(len(rows))
    return list(groups), torch.from_numpy(group_N), torch.from_numpy(place_N), max(map(len, groups.values()))


def _require_aggregate(name: str, objective: Objective, loss_agg_mode: str) -> None:
    if (own := AGGREGATES[objective.aggregate]) != loss_agg_mode:
        raise NotServable(
            f"{PREFIX}{name} is averaged as {own!r}, and verl is set to {loss_agg_mode!r}: write "
            f"actor_rollout_ref.actor.loss_agg_mode={own}"
        )


def _require_bypass(name: str, objective: Objective, algorithm: Any) -> None:
    correction = (algorithm.get("rollout_correction", None) if algorithm is not None else None) or {}
    if Need.BEHAVIOR in objective.needs and not correction.get("bypass_mode", False):
        raise NotServable(
            f"{PREFIX}{name} needs the log-probs of the policy that generated, and verl recomputes them: write {BYPASS}"
        )


def check(config: Any) -> None:
    """Refuse what cannot work in a configuration of verl, with the line to write."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    loss, estimator = str(actor.policy_loss.loss_mode), str(algorithm.adv_estimator)
    for chosen in (loss, estimator):
        if chosen.startswith(PREFIX):
            _objective(chosen.removeprefix(PREFIX))
    if loss.startswith(PREFIX):
        name = loss.removeprefix(PREFIX)
        objective = _objective(name)
        _require_aggregate(name, objective, str(actor.loss_agg_mode))
        _require_bypass(name, objective, algorithm)
        _require_own_settings(config, loss, objective)
    if estimator.startswith(PREFIX) and algorithm.get("norm_adv_by_std_in_grpo", True) is False:
        raise NotServable(
            f"norm_adv_by_std_in_grpo is not read by {estimator}: use dr-grpo or rec-oneside-nois instead"
        )
    _require_trainer(config)


def _require_own_settings(config: Any, loss: str, objective: Objective) -> None:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.get("rollout", None) or {}
    correction = config.algorithm.get("rollout_correction", None) or {}
    if correction.get("rollout_is", None) or correction.get("rollout_rs", None):
        raise NotServable(CORRECTION)
    if changed := [name for name in CLIPS if actor.get(name, 0.2) not in (0.2, None)]:
        raise NotServable(f"{', '.join(changed)}: {loss} has the clip of its preset; leave it out")
    if Need.BEHAVIOR not in objective.needs:
        return
    if rollout.get("calculate_log_probs", True) is False:
        raise NotServable(f"{loss} needs the log-probs of the policy that generated: write {BYPASS}")
    if not config.trainer.get("use_v1", True):
        raise NotServable(f"verl's old trainer replaces loss_mode in bypass mode: write trainer.use_v1=True for {loss}")


def _require_trainer(config: Any) -> None:
    """Refuse a run directory that no trainer would write, and a trainer that is not registered."""
    mode = str((config.trainer.get("v1", None) or {}).get("trainer_mode", ""))
    ours = config.get("offbeat", None) or {}
    if unknown := [name for name in ours if name != "out"]:
        raise NotServable(f"offbeat.{unknown[0]} is not a setting; write +offbeat.out=DIRECTORY")
    modes = ", ".join(PREFIX + one for one in TRAINERS)
    if ours and not mode.startswith(PREFIX):
        raise NotServable(f"offbeat.out is written by our trainers: write trainer.v1.trainer_mode, one of {modes}")
    if mode.startswith(PREFIX):
        if mode.removeprefix(PREFIX) not in TRAINERS:
            raise NotServable(f"{mode} is not a trainer; {suggest_nearest(mode, [PREFIX + one for one in TRAINERS])}")
        if EXTERNAL not in os.environ.get("VERL_USE_EXTERNAL_MODULES", ""):
            raise NotServable(f"{mode} is registered by a module of ours: set VERL_USE_EXTERNAL_MODULES={EXTERNAL}")


def register() -> None:
    """Register every preset with verl, and check configurations when verl does. verl calls this in each process."""
    from verl.trainer.ppo import core_algos, rollout_corr_helper
    from verl.utils import config as configs

    for name in PRESETS:
        core_algos.register_policy_loss(PREFIX + name)(loss_for(name))
        if PREFIX + name not in core_algos.ADV_ESTIMATOR_REGISTRY:
            core_algos.register_adv_est(PREFIX + name)(estimator_for(name))
    validate, replace_loss = configs.validate_config, rollout_corr_helper.apply_bypass_mode

    def validate_config(config: Any, *args: Any, **kwargs: Any) -> Any:
        check(config)
        return validate(config, *args, **kwargs)

    def apply_bypass_mode(batch: Any, rollout_corr_config: Any = None, policy_loss_config: Any = None) -> Any:
        mode = str((policy_loss_config or {}).get("loss_mode", ""))
        if mode.startswith(PREFIX):
            raise NotServable(f"this trainer of verl replaces loss_mode={mode} in bypass mode: use its trainers of v1")
        return replace_loss(batch, rollout_corr_config, policy_loss_config)

    configs.validate_config, rollout_corr_helper.apply_bypass_mode = validate_config, apply_bypass_mode


register()
