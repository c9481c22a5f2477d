"""Check our presets inside the real verl: registered by entry point, in a Ray worker, through its worker loss.

    python -m lab.parity.inside_verl            a minute; writes rows inside.4.*
    python -m lab.parity.inside_verl --short    nothing recorded

verl is installed into a directory of its own (`hosts.py`). A fresh Ray worker imports it, which loads our plugin, and
computes gradients with `verl.workers.utils.losses.ppo_loss` on nested tensors, as verl's workers do. verl's trainer
with books runs as far as a batch goes without GPUs: its step `_compute_advantage` on verl's own TransferQueue. What it
does before and after that (vLLM, FSDP workers, loading weights) does not run here.
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lab.figures import Figure, command_parser, report
from lab.parity import hosts
from offbeat.errors import NotServable
from offbeat.objective.credit import assign_credit
from offbeat.objective.losses import Counts, Streams, policy_loss
from offbeat.objective.presets import PRESETS
from offbeat.types import UNKNOWN, Score

B, G, LONGEST = 5, 8, 12
SPREAD = 0.9
"""Log-ratios are uniform within ± this: verl's vanilla loss also clips ratios above 3 of tokens with A < 0."""
CREDITED = ("grpo-masked", "dapo", "red-drop", "red-weight", "red-weight-adaptive", "rec-oneside-nois")
UNSERVED = ("grpo-off-policy", "m2po", "ess-gate", "tis", "decoupled-ppo", "sequence-mask", "geometric-mask")


def draw(seed: int) -> dict[str, Any]:
    """Return a batch: answers of several lengths, rewards with equal groups among them, old log-probs and uids."""
    rng = torch.Generator().manual_seed(seed)
    lengths_N = torch.randint(2, LONGEST + 1, (B * G,), generator=rng)
    lengths_N[0] = LONGEST
    mask_NT = torch.arange(LONGEST) < lengths_N[:, None]
    rewards_N = torch.randint(0, 2, (B * G,), generator=rng).float()
    rewards_N[:G] = 1
    policy_NT = -3 * torch.rand(B * G, LONGEST, generator=rng) - 0.1
    old_NT = policy_NT + SPREAD * (2 * torch.rand(B * G, LONGEST, generator=rng) - 1)
    order = torch.randperm(B * G, generator=rng)  # verl balances batches: rows of a group are not neighbours
    uids = np.array([f"u{row // G}" for row in range(B * G)], dtype=object)[order.numpy()]
    rows = {"mask": mask_NT, "policy": policy_NT, "old": old_NT, "rewards": rewards_N}
    return {name: one[order] for name, one in rows.items()} | {"uids": uids}


def verl_gradient(mode: str, aggregate: str, batch: dict[str, Any], advantages_NT: Tensor, parts: int = 1) -> Tensor:
    """Return ∂loss/∂log-probs from verl's own worker loss, over micro-batches of one mini-batch."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils
    from verl.workers.config import ActorConfig, PolicyLossConfig
    from verl.workers.utils.losses import ppo_loss

    config = ActorConfig(
        strategy="fsdp", rollout_n=G, ppo_micro_batch_size_per_gpu=1, loss_agg_mode=aggregate,
        policy_loss=PolicyLossConfig(loss_mode=mode), clip_ratio_c=1e6,
    )  # fmt: skip
    policy_NT = batch["policy"].clone().requires_grad_()
    for rows in torch.arange(B * G).chunk(parts):
        lengths = batch["mask"][rows].sum(-1).tolist()

        def nested(values_NT: Tensor, rows: Tensor = rows, lengths: list[int] = lengths) -> Tensor:
            kept = [values_NT[row, :length] for row, length in zip(rows, lengths, strict=True)]
            return torch.nested.as_nested_tensor(kept, layout=torch.jagged)

        fields = {"response_mask": batch["mask"], "old_log_probs": batch["old"], "advantages": advantages_NT}
        data = {name: nested(values_NT) for name, values_NT in fields.items()}
        ones = torch.ones(B * G, LONGEST, dtype=torch.int64)
        data |= {"prompts": nested(ones, lengths=[1] * len(rows)), "responses": nested(ones)}
        packed = TensorDict(data, batch_size=len(rows))
        whole = {"dp_size": 1, "batch_num_tokens": int(batch["mask"].sum()), "global_batch_size": B * G}
        for name, value in whole.items():
            tensordict_utils.assign_non_tensor(packed, **{name: value})
        # The model's output has a value for each token of prompt and answer, and the loss shifts it by one.
        shifted = [
            torch.cat([policy_NT[row, :length], policy_NT.new_zeros(1)])
            for row, length in zip(rows, lengths, strict=True)
        ]
        outputs = {"log_probs": torch.nested.as_nested_tensor(shifted, layout=torch.jagged)}
        ppo_loss(config, outputs, packed)[0].backward()
    found: Tensor | None = policy_NT.grad
    assert found is not None
    return found


def estimated(name: str, batch: dict[str, Any], bypass: bool = True) -> Tensor:
    """Return the advantages of verl's registered estimator."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    token_rewards_NT = torch.zeros(B * G, LONGEST)
    token_rewards_NT[:, 0] = batch["rewards"]
    algorithm = {"rollout_correction": {"bypass_mode": bypass}}
    found: Tensor = get_adv_estimator_fn(f"offbeat/{name}")(
        token_level_rewards=token_rewards_NT, response_mask=batch["mask"], index=batch["uids"], config=algorithm
    )[0]
    return found


def our_gradient(name: str, batch: dict[str, Any]) -> Tensor:
    """Return the same gradient from `assign_credit` and `policy_loss`, without verl."""
    from offbeat.inside.verl import _places
    from offbeat.seeds import derive

    objective = PRESETS[name].objective
    uids, group_N, place_N, _ = _places(batch["uids"])
    rewards_BG, lengths_BG = torch.zeros(B, G, dtype=torch.float64), torch.zeros(B, G, dtype=torch.int64)
    rewards_BG[group_N, place_N], lengths_BG[group_N, place_N] = batch["rewards"].double(), batch["mask"].sum(-1)
    seeds = [derive(0, "red-drop", uid) for uid in uids]
    credit = assign_credit(objective, rewards_BG, torch.ones(B, G).bool(), lengths_BG, group_seeds=seeds)
    policy_NT = batch["policy"].clone().requires_grad_()
    mask_NT = batch["mask"] & credit.trained_BG[group_N, place_N, None]
    streams = Streams(
        policy_NT, batch["old"], UNKNOWN, UNKNOWN,
        credit.advantages_BG[group_N, place_N].float(), credit.weights_BG[group_N, place_N].float(), mask_NT,
    )  # fmt: skip
    total = Counts(int(mask_NT.sum()), int(mask_NT.any(-1).sum()))
    torch.autograd.backward(policy_loss(objective, streams, total, length_limit=LONGEST).total)
    found: Tensor | None = policy_NT.grad
    assert found is not None
    return found


def difference(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def refused(attempt: Callable[[], object]) -> str:
    """Return the sentence with which something is refused; empty if it is not."""
    try:
        attempt()
    except NotServable as error:
        return str(error)
    return ""


def configuration(loss: str, **settings: Any) -> Any:
    """Return the parts of verl's configuration that our check reads."""
    from omegaconf import OmegaConf

    given: dict[str, Any] = {
        "bypass": True,
        "aggregate": "token-mean",
        "v1": True,
        "estimator": "grpo",
        "more": {},
    } | settings
    config = OmegaConf.create(
        {
            "actor_rollout_ref": {"actor": {"policy_loss": {"loss_mode": loss}, "loss_agg_mode": given["aggregate"]}},
            "algorithm": {
                "adv_estimator": given["estimator"], "rollout_correction": {"bypass_mode": given["bypass"]},
            },
            "trainer": {"use_v1": given["v1"]},
        }
    )  # fmt: skip
    for name, value in given["more"].items():
        OmegaConf.update(config, name, value)
    return config


def overwritten_modes() -> list[str]:
    """Return what verl says to settings under which it would not train as asked."""
    from verl.trainer.ppo import rollout_corr_helper
    from verl.utils import config as configs

    nois = "offbeat/rec-oneside-nois"
    batch = draw(0)
    per_token_NT = batch["mask"] * torch.rand(B * G, LONGEST)
    attempts: list[Callable[[], object]] = [
        lambda: configs.validate_config(configuration(nois, bypass=False)),
        lambda: configs.validate_config(configuration(nois, v1=False)),
        lambda: configs.validate_config(configuration(nois, aggregate="seq-mean-token-mean")),
        lambda: configs.validate_config(configuration("vanilla", estimator="offbeat/tis")),
        *(
            partial(configs.validate_config, configuration(nois, more={name: value}, estimator=estimator))
            for name, value, estimator in (
                ("actor_rollout_ref.rollout.calculate_log_probs", False, "grpo"),
                ("actor_rollout_ref.actor.clip_ratio_high", 0.28, "grpo"),
                ("algorithm.rollout_correction.rollout_is", "token", "grpo"),
                ("algorithm.norm_adv_by_std_in_grpo", False, "offbeat/grpo"),
                ("offbeat.out", "runs/one", "grpo"),
                ("offbeat.outt", "runs/one", "grpo"),
                ("trainer.v1.trainer_mode", "offbeat/separate_async", "grpo"),
                ("trainer.v1.trainer_mode", "offbeat/sepasync", "grpo"),
            )
        ),
        lambda: verl_gradient(nois, "token-mean", batch | {"old": batch["old"] * torch.nan}, per_token_NT * 0 + 1),
        lambda: rollout_corr_helper.apply_bypass_mode(None, {}, {"loss_mode": nois}),
        lambda: estimated("rec-oneside-nois", batch, bypass=False),
        lambda: verl_gradient(nois, "token-mean", batch, per_token_NT),
    ]
    return [refused(attempt) for attempt in attempts]


def inside() -> dict[str, Any]:
    """Measure everything in a process in which verl is imported."""
    import verl
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    names = {f"offbeat/{name}" for name in PRESETS}
    found: dict[str, Any] = {"version": verl.__version__}
    found["registered"] = len(names & POLICY_LOSS_REGISTRY.keys() & ADV_ESTIMATOR_REGISTRY.keys())
    vanilla, micro, credit = [], [], []
    for seed in range(5):
        batch = draw(seed)
        advantages_NT = torch.randn(B * G, 1, generator=torch.Generator().manual_seed(seed)) * batch["mask"]
        theirs = verl_gradient("vanilla", "seq-mean-token-mean", batch, advantages_NT)
        ours = verl_gradient("offbeat/grpo", "seq-mean-token-mean", batch, advantages_NT)
        vanilla.append(difference(ours, theirs))
        parts = verl_gradient("offbeat/grpo", "seq-mean-token-mean", batch, advantages_NT, parts=3)
        micro.append(difference(parts, ours))
        for name in CREDITED:
            aggregate = "seq-mean-token-mean" if name == "grpo-masked" else "token-mean"
            theirs = verl_gradient(f"offbeat/{name}", aggregate, batch, estimated(name, batch))
            credit.append(difference(theirs, our_gradient(name, batch)))
    found |= {"vanilla": vanilla, "micro": micro, "credit": credit}
    batch = draw(0)
    found["unserved"] = [
        refused(partial(verl_gradient, f"offbeat/{name}", "token-mean", batch, batch["mask"].float()))
        for name in UNSERVED
    ]
    return found | {"overwritten": overwritten_modes()}


def through_the_queue() -> dict[str, Any]:
    """Put a batch of three versions into verl's queue, run the trainer's step on it, and read the log."""
    os.environ["VERL_USE_EXTERNAL_MODULES"] = "offbeat.inside.verl_trainer"
    import ray
    import transfer_queue as tq
    from omegaconf import OmegaConf
    from tensordict import NonTensorStack, TensorDict
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    from offbeat.experience.reader import LogReader
    from offbeat.inside.books import Books

    ray.init(num_cpus=32, log_to_driver=False)  # places for the queue's actors, not cores
    tq.init()
    batch, k = draw(0), 6
    lengths = batch["mask"].sum(-1).tolist()
    versions = [int(uid[1:]) for uid in batch["uids"]]

    def nested(values_NT: Tensor) -> Tensor:
        kept = [values_NT[row, :length].contiguous() for row, length in enumerate(lengths)]
        return torch.nested.as_nested_tensor(kept, layout=torch.jagged)

    last_NT = torch.nn.functional.one_hot(torch.tensor(lengths) - 1, LONGEST)
    behavior_NT = batch["old"].clamp(max=-1e-3)
    fields: dict[str, Any] = {
        "prompts": torch.nested.as_nested_tensor([torch.tensor([1, 2])] * (B * G), layout=torch.jagged),
        "responses": nested(torch.arange(B * G * LONGEST).view(B * G, LONGEST)),
        "response_mask": nested(batch["mask"].long()),
        "rollout_log_probs": nested(behavior_NT),
        "old_log_probs": nested(batch["policy"]),
        "rm_scores": nested(last_NT * batch["rewards"][:, None]),
    }
    data = TensorDict(fields, batch_size=B * G)
    data["uid"] = NonTensorStack(*batch["uids"].tolist())
    keys = [f"{uid}_{row}_0" for row, uid in enumerate(batch["uids"])]
    tags = [{"status": "success", "min_global_steps": one, "max_global_steps": one} for one in versions]
    meta = tq.kv_batch_put(keys=keys, partition_id="train", fields=data, tags=tags)
    trainer: Any = object.__new__(get_trainer_cls("offbeat/separate_async"))
    algorithm = {"rollout_correction": {"bypass_mode": False}, "use_kl_in_reward": False, "gamma": 1.0, "lam": 1.0}
    actor = {"rollout": {"n": G}, "actor": {"ppo_epochs": 1}}
    algorithm |= {"adv_estimator": "offbeat/red-weight"}
    trainer.config, trainer.global_steps = OmegaConf.create({"algorithm": algorithm, "actor_rollout_ref": actor}), k + 1
    metrics: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as place:
        trainer.books = Books(place, host="verl")
        PPOTrainer.fit = lambda self, _: self._compute_advantage(meta, metrics)  # without workers there is no more
        trainer.fit(None)
        ended = [one for one in map(json.loads, (Path(place) / "events.jsonl").open()) if one["kind"] == "ended"]
        assert [one["finished"] for one in ended] == [True], ended
        groups = list(LogReader.open(f"{place}/experience").groups())
    tq.close()
    ray.shutdown()
    right = 0
    for group in groups:
        for one in group.completions:
            row = int(one.token_ids[0]) // LONGEST
            logprobs: Any = one.behavior_logprobs
            host: Any = group.prompt.columns["host"]
            right += (
                one.oldest_version == versions[row]
                and np.array_equal(logprobs, behavior_NT[row, : lengths[row]].numpy())
                and one.score == Score(float(batch["rewards"][row]))
                and host["key"].startswith(batch["uids"][row])
            )
    lag = float(np.average([k - one for one in versions], weights=lengths))
    drift = float(((1 - (batch["policy"] - behavior_NT).exp()).clamp(min=0) * batch["mask"]).sum() / sum(lengths))
    close = abs(metrics["offbeat/lag"] - lag) < 1e-6 and abs(metrics["offbeat/drift_tv_token"] - drift) < 1e-6
    return {"right": right, "figures": close, "groups": len(groups)}


def figures() -> Iterator[Figure]:
    import ray

    env = hosts.environment("verl")
    ray.init(num_cpus=1, runtime_env={"env_vars": {"PYTHONPATH": env["PYTHONPATH"]}}, log_to_driver=False)
    try:
        found = ray.get(ray.remote(inside).remote())
    finally:
        ray.shutdown()
    note = f"verl {found['version']}, in a Ray worker, through its registries and ppo_loss; float32, CPU"
    what = "presets that verl knows as loss and as estimator after its import alone"
    yield Figure(
        "inside.4.registered", what, f"{len(PRESETS)}", found["registered"], "presets",
        found["registered"] == len(PRESETS), len(PRESETS), note,
    )  # fmt: skip
    both = "gradient with verl's estimator and loss against assign_credit and policy_loss"
    sentences = {
        "vanilla": "gradient of offbeat/grpo against verl's vanilla loss with equal advantages",
        "micro": "gradient of offbeat/grpo over three micro-batches against one",
        "credit": f"{both}, {', '.join(CREDITED)}",
    }
    for name, what in sentences.items():
        worst, n = max(found[name]), len(found[name])
        measured = float(f"{worst:.1e}")
        yield Figure(f"inside.4.{name}", what, "<= 1e-6", measured, "relative", worst <= 1e-6, n, f"worst; {note}")
    sentences = {
        "unserved": "presets that verl's hook cannot serve, refused with the reason",
        "overwritten": "settings under which verl would not train as asked, refused with the line to write",
    }
    for name, what in sentences.items():
        said, n = sum(map(bool, found[name])), len(found[name])
        yield Figure(f"inside.4.{name}", what, f"{n} of {n}", said, "refused", said == n, n, note)
    done = hosts.run("verl", "lab.parity.inside_verl", "--queue")
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    trip = json.loads(done.stdout.strip().splitlines()[-1])
    what = "completions of a batch in verl's queue that are in the log of its trainer with books, as they were"
    note = (
        f"verl {found['version']}: _compute_advantage of offbeat/separate_async on the real TransferQueue; no workers"
    )
    held = trip["right"] == B * G and trip["figures"] and trip["groups"] == B
    yield Figure("inside.4.trainer", what, f"{B * G}", trip["right"], "completions", held, B * G, note)


def main() -> bool:
    parser = command_parser(__doc__, short="record nothing")
    parser.add_argument("--queue", action="store_true", help="only the trainer's step, where verl can be imported")
    options = parser.parse_args()
    if options.queue:
        print(json.dumps(through_the_queue()))
        return True
    return report(options.short, *figures())


if __name__ == "__main__":
    sys.exit(not main())
