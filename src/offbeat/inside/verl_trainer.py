"""verl's trainers with an experience log, and with drift by lag: `trainer.v1.trainer_mode=offbeat/separate_async`.

Importing this module registers each trainer of verl's v1 again under `offbeat/`; name it in `VERL_USE_EXTERNAL_MODULES`
of the driver. Settings stay those of the trainer behind it. After verl has computed advantages, the batch is read from
its queue once more: every group goes to the log with its log-probs, its version and verl's keys.

A version is verl's count of weight updates. A trajectory that several versions wrote counts from the oldest. Drift
needs log-probs of the trainer's policy, which verl computes without bypass mode; with it the loss reports drift,
without lag.
"""

from pathlib import Path
from typing import Any, Final

import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.ppo.v1 import get_trainer_cls, register_trainer

from offbeat.inside.books import Books
from offbeat.inside.rows import HostRow
from offbeat.inside.verl import TRAINERS, by_uid
from offbeat.objective.measures import ForwardPass, Rows, WholeGroups, measure
from offbeat.run.directory import RunDirectory
from offbeat.types import Json

FIELDS: Final = ("prompts", "responses", "response_mask", "rollout_log_probs", "old_log_probs", "rm_scores", "uid")
SHOWN: Final = ("lag", "drift_tv_token", "drift_kl_token", "ess", "ratio_tail_share", "predicted_gain")


def open_books(config: Any, done: int) -> Books:
    """Open the run directory that `+offbeat.out=…` names, or one beside verl's checkpoints, after `done` steps."""
    out = OmegaConf.select(config, "offbeat.out") or f"{config.trainer.default_local_dir}/offbeat"
    directory = RunDirectory(Path(out))
    state: dict[str, Json] | None = None
    if done and directory.events.exists():  # verl has resumed from a checkpoint of its own
        state = {"run": directory.name, "uses": [], "groups": 0}
    return Books(out, host="verl", state=state, step=done)


class WithBooks:
    """Mixed into a trainer of verl: writes what it trains on to an experience log."""

    books: Books | None
    config: Any
    global_steps: int

    def __init__(self, config: Any) -> None:
        config = config.copy()
        mode = str(config.trainer.v1.trainer_mode)
        OmegaConf.update(config, "trainer.v1.trainer_mode", mode.removeprefix("offbeat/"))
        super().__init__(config)  # type: ignore[call-arg]  # the trainer of verl behind this class
        self.books: Books | None = None

    def fit(self, agent_loop_manager: Any) -> None:
        """Train as the trainer behind this class does, and close the run directory, with an error as unfinished."""
        finished = False
        try:
            super().fit(agent_loop_manager)  # type: ignore[misc]
            finished = True
        finally:
            if self.books is not None:
                self.books.close(finished)

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_advantage(batch, metrics)  # type: ignore[misc]
        self.books = self.books or open_books(self.config, self.global_steps - 1)
        kept = [row for row, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]
        keys, tags = [batch.keys[row] for row in kept], [batch.tags[row] for row in kept]
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=list(FIELDS))
        k, bypass = self.global_steps - 1, OmegaConf.select(self.config, "algorithm.rollout_correction.bypass_mode")
        rows = host_rows(data, keys, tags, step=self.global_steps)
        groups = list(by_uid(data["uid"]).values())
        written = [group for one in groups for group in self.books.write([rows[i] for i in one], size=len(one), k=k)]
        metrics["offbeat/groups"] = float(len(written))
        found = None if bypass else figures(data, groups, tags, k=k)
        if found is not None:
            metrics |= {f"offbeat/{name}": found.overall[name] for name in SHOWN if name in found.overall}
            for bucket, named in found.by_lag.items():
                metrics |= {f"offbeat/lag {bucket}/{name}": named[name] for name in SHOWN[1:] if name in named}
        shown = {name: value for name, value in (found.overall if found else {}).items() if name != "entropy"}
        shown["reward_mean"] = sum(row.reward for row in rows) / len(rows)
        epochs = int(OmegaConf.select(self.config, "actor_rollout_ref.actor.ppo_epochs") or 1)
        self.books.trained(written, found, shown, step=self.global_steps, updates=epochs)
        return batch


def host_rows(data: Any, keys: list[str], tags: list[dict[str, Any]], *, step: int) -> list[HostRow]:
    """Return what verl's queue holds of a batch as rows for the log."""
    names = [name for name in FIELDS if name != "uid" and name in data]
    columns: dict[str, Any] = {name: [one.tolist() for one in data[name].unbind()] for name in names}
    rows = []
    for row, (key, tag) in enumerate(zip(keys, tags, strict=True)):
        logprobs = columns.get("rollout_log_probs")
        rows.append(
            HostRow(
                prompt_ids=columns["prompts"][row],
                token_ids=columns["responses"][row],
                logprobs=None if logprobs is None else logprobs[row],
                reward=float(sum(columns["rm_scores"][row])),
                version=tag.get("min_global_steps"),
                loss_mask=[bool(one) for one in columns["response_mask"][row]],
                columns={"host": {"host": "verl", "step": step, "key": key}},
            )
        )
    return rows


def figures(data: Any, groups: list[list[int]], tags: list[dict[str, Any]], *, k: int) -> Any:
    """Return drift, ESS and predicted gain by lag; `old_log_probs` are those of the policy at the start of the step."""
    padded = {name: torch.nested.to_padded_tensor(data[name].float(), 0.0) for name in FIELDS[2:6]}
    size, order = max(map(len, groups)), torch.zeros(len(tags), dtype=torch.int64)
    rewards_BG, scored_BG = torch.zeros(len(groups), size, dtype=torch.float64), torch.zeros(len(groups), size).bool()
    for b, rows in enumerate(groups):
        for g, row in enumerate(rows):
            order[row], rewards_BG[b, g], scored_BG[b, g] = b * size + g, float(padded["rm_scores"][row].sum()), True
    lags_N = torch.tensor([k - tag["min_global_steps"] for tag in tags])
    mask_NT = padded["response_mask"].bool()
    lags_NT: Tensor = lags_N[:, None].expand_as(mask_NT)
    one_pass = ForwardPass(padded["old_log_probs"], torch.zeros_like(padded["old_log_probs"]), mask_NT)
    part = Rows(
        mask_NT=mask_NT,
        behavior_NT=padded["rollout_log_probs"],
        lags_NT=lags_NT,
        published_NT=lags_NT == lags_NT.min(),
        advantages_N=torch.zeros(len(tags)),
        weights_N=torch.ones(len(tags)),
        flat_indices_N=order,
        passes=[one_pass],
    )
    spread_B = torch.stack([rewards_BG[b, : len(rows)].std() for b, rows in enumerate(groups)])
    oldest_B = torch.tensor([max(int(lags_N[row]) for row in rows) for rows in groups])
    whole = WholeGroups(rewards_BG, torch.ones(len(groups)).bool(), spread_B > 0, scored_BG.sum(-1) >= 2, oldest_B)
    return measure([part], whole, gated=False)


for _mode in TRAINERS:
    register_trainer(f"offbeat/{_mode}")(type(f"WithBooks_{_mode}", (WithBooks, get_trainer_cls(_mode)), {}))
