"""TRL: `OffPolicyGRPOTrainer`, its `GRPOTrainer` with our objectives, a sync period, replay, a log, and figures by lag.

TRL generates, scores, pads, splits and steps as always. Changed are these methods:

    _generate                            with the weights of the last sync, recording their log-probs
    _generate_and_score_completions      credit of whole groups; groups to the log, past groups into the batch
    _compute_loss                        our loss, divided by counts of the whole batch
    _save_checkpoint, _load_optimizer_and_scheduler    the run's id and its draws, kept with TRL's checkpoint

Versions and lags count TRL's `global_step`: a version is the number of optimizer steps behind the weights.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, Final, cast

import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch import Tensor
from trl import GRPOConfig, GRPOTrainer

from offbeat.errors import NotServable
from offbeat.inside.books import Books
from offbeat.inside.objectives import objective_for
from offbeat.inside.rows import HostRow, joined, left_right, plain, rows_of, scores_of
from offbeat.objective.credit import assign_credit
from offbeat.objective.losses import Counts, Streams, policy_loss
from offbeat.objective.measures import NO_LAG, ForwardPass, Rows, WholeGroups, measure
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import CutOff, Need, NoGate, Objective
from offbeat.seeds import derive
from offbeat.storage.files import write_atomically
from offbeat.types import LARGEST_REWARD, UNKNOWN, Group, Json

STATE: Final = "offbeat.json"
"""The file of ours in a checkpoint of TRL."""
REPLACED: Final = (
    "loss_type", "scale_rewards", "epsilon", "epsilon_high", "delta", "importance_sampling_level",
    "multi_objective_aggregation", "top_entropy_quantile", "off_policy_mask_threshold", "use_bias_correction_kl",
    "entropy_coef", "use_adaptive_entropy", "router_aux_loss_coef",
)  # fmt: skip
"""Settings of `GRPOConfig` that TRL's own loss reads, and ours does not."""
DEFAULTS: Final = {field.name: field.default for field in fields(GRPOConfig)}
TRUNCATED_SAMPLING: Final = ("top_p", "top_k", "min_p", "repetition_penalty")
PIXELS: Final = (
    "pixel_values", "image_grid_thw", "num_images", "num_tiles", "pixel_attention_mask", "spatial_shapes",
    "image_sizes", "token_type_ids", "mm_token_type_ids", "image_position_ids",
)  # fmt: skip
TRL_NAMES: Final = {"entropy": "entropy", "reference_kl": "kl"}
"""Figures that TRL has with the same formula."""
BY_LAG: Final = {"drift_tv_token", "ess", "gate_stopped_up", "gate_stopped_down"}


class OffPolicyGRPOTrainer(GRPOTrainer):  # type: ignore[misc]  # TRL comes without types
    """`GRPOTrainer` that trains off-policy; it takes the same arguments, and these:

    Args:
        preset: A preset (`offbeat objectives` lists them) or an `offbeat.Objective`. `beta` of `GRPOConfig` is the
            coefficient of the KL term; changed settings of TRL's own loss are refused.
        sync_every: Optimizer steps, at least, between two loads of the trainer's weights into what generates:
            transformers, vLLM in server mode or colocated. Evaluation loads them too.
        out: A run directory for the log of every scored group, with log-probs and versions, and for figures by step:
            `offbeat report`, `view` and `score` take it.
        experience: An experience log to share with other runs; left out, it is in `out`.
        replay_share: The share of each batch that is drawn from the log instead of generated.
        reuse_budget: How often a group is trained on at most, its first use included.
        max_replay_lag: The largest lag of a group that is drawn again; None for no limit.

    Example:
        trainer = OffPolicyGRPOTrainer("Qwen/Qwen2.5-0.5B-Instruct", reward, GRPOConfig(...), train_dataset=data,
                                       preset="grpo-off-policy", sync_every=10, out="runs/one")
    """

    def __init__(
        self,
        *args: Any,
        preset: str | Objective = "grpo-off-policy",
        sync_every: int = 1,
        out: str | os.PathLike[str] | None = None,
        experience: str | os.PathLike[str] | None = None,
        replay_share: float = 0.0,
        reuse_budget: int = 4,
        max_replay_lag: int | None = None,
        **kwargs: Any,
    ) -> None:
        objective_for(preset, host="TRL")  # before a model is loaded or vLLM started
        super().__init__(*args, **kwargs)
        objective = objective_for(preset, host="TRL", kl_coefficient=self.beta)
        if self.mask_truncated_completions:
            objective = replace(objective, truncated=CutOff.MASK)
        self.objective, self.sync_every, self.replay_share = objective, sync_every, replay_share
        self.served: int | None = None
        """The version that generates: the global step of the weights that were loaded last."""
        if self.use_vllm:
            self._count_loads(self.vllm_generation)
        self._lagged: dict[str, Tensor] = {}
        self._slices: dict[int, Rows] = {}
        self._generated_at = 0
        self.out = out
        self._kept: dict[str, Any] = {"reuse_budget": reuse_budget, "max_lag": max_replay_lag, "experience": experience}
        if reason := self._refusal():
            raise NotServable(reason)
        self._kept["settings"] = self._as_settings(preset if isinstance(preset, str) else "own")
        self._rollout: tuple[Any, ...] = ()
        self.books: Books | None = None
        """The run directory, while it trains; the main process has it."""

    def _as_settings(self, preset: str) -> dict[str, Any]:
        """Return TRL's settings under our names, for the record."""
        args, groups = self.args, self.args.generation_batch_size // self.num_generations
        dtype = "bfloat16" if args.bf16 else "float32"
        return {
            "model": {"path": str(self.model.config._name_or_path or "trl"), "compute": dtype, "serve": dtype},
            "objective": {"preset": preset, "kl_coefficient": self.beta},
            "steps": max(1, args.max_steps),
            "seed": args.seed,
            "group_size": self.num_generations,
            "prompts_per_step": groups,
            "updates_per_batch": self.num_iterations,
            "sync": {"every": self.sync_every},
            "sampling": {"max_tokens": self.max_completion_length, "temperature": self.temperature},
            "optimizer": {"learning_rate": args.learning_rate},
        }

    def _refusal(self) -> str:
        """Return the first reason why this cannot work as asked; empty if it can."""
        return next((why for wrong, why in chain(self._own_rules(), self._engine_rules()) if wrong), "")

    def _own_rules(self) -> Iterator[tuple[object, str]]:
        args, every, share = self.args, cast(Any, self.sync_every), self.replay_share
        ignored = [name for name in REPLACED if getattr(args, name) != DEFAULTS[name]]
        named = args.loss_type.replace("_", "-")
        hint = f'; for this loss_type, preset="{named}"' if named in PRESETS and "loss_type" in ignored else ""
        yield (
            ignored,
            f"{', '.join(ignored)}: the preset decides this; leave it out, or pass an offbeat.Objective{hint}",
        )
        whole = isinstance(every, int) and every >= 1
        yield not whole, f"sync_every = {every!r} must be a whole number of at least 1"
        yield not 0 <= share < 1, f"replay_share = {share!r} must be at least 0 and below 1"
        if not share:
            return
        groups = args.per_device_train_batch_size * args.steps_per_generation / self.num_generations
        budget, lag = self._kept["reuse_budget"], self._kept["max_lag"]
        yield self.out is None, "replay_share draws from the experience log of a run directory: set out"
        yield (
            groups % 1,
            "replay_share needs whole groups on every process: make its rows a multiple of num_generations",
        )
        none_or_all = not 1 <= round(share * groups) < groups
        yield none_or_all, f"replay_share = {share}: of {groups:g} groups a process, that is none or all; change one"
        yield budget < 2, f"reuse_budget = {budget} must be at least 2: the first use of a group counts"
        yield lag is not None and lag < 0, f"max_replay_lag = {lag} must be at least 0, or None for no limit"
        without = self.beta and self.ref_model is None
        yield without, "replay_share with beta needs a reference model, and an adapter has none: set beta=0"

    def _engine_rules(self) -> Iterator[tuple[object, str]]:
        args, lagged = self.args, self.sync_every > 1
        changed = [name for name in TRUNCATED_SAMPLING if getattr(args, name) not in (None, DEFAULTS[name])]
        inside = not self.use_vllm and self.rollout_func is None and Need.BEHAVIOR in self.objective.needs
        yield (
            inside and changed,
            f"{', '.join(changed)}: transformers then samples from another distribution than the log-probs are of; "
            "leave it out, generate with vLLM, or choose a preset without log-probs, such as red-drop",
        )
        asleep = self.use_vllm and args.vllm_mode == "colocate" and args.vllm_enable_sleep_mode
        yield (
            lagged and asleep,
            "vLLM drops its weights when it sleeps, and TRL loads the newest: set vllm_enable_sleep_mode=False",
        )
        sharded = not self.use_vllm and (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        yield (
            lagged and sharded,
            "sync_every above 1 keeps a copy of whole weights: set use_vllm, or use neither FSDP nor DeepSpeed",
        )

    # Generation

    def _generate(self, prompts: list[Any]) -> tuple[Any, ...]:
        """Generate with the weights of the last sync, and return their log-probs where TRL has none."""
        step, training = int(self.state.global_step), self.model.training
        due = self.served is None or step - self.served >= (self.sync_every if training else 1)
        # TRL loads weights into vLLM if this differs from the step.
        self._last_loaded_step = -1 if due else step
        if self.use_vllm or not training:
            self._rollout = tuple(super()._generate(prompts))
            return self._rollout
        if due:
            self.served = step
            self._lagged = {} if self.sync_every == 1 else {name: one.detach().clone() for name, one in self._weights()}
        with self._lagged_weights():
            found = list(super()._generate(prompts))
            if found[4] is None and found[6] is None:  # no log-probs, and no images
                found[4] = self._behavior_logprobs(found[0], found[1])
        self._rollout = tuple(found)
        return self._rollout

    def _count_loads(self, engine: Any) -> None:
        """Take the version from every load that really happens, whoever asks for it."""
        load = engine.sync_weights

        def sync_weights() -> None:
            load()
            self.served = int(self.state.global_step)

        engine.sync_weights = sync_weights

    def _weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, one) for name, one in self.model.named_parameters() if one.requires_grad)

    @contextmanager
    def _lagged_weights(self) -> Iterator[None]:
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Exchange the trainer's weights with those of the last sync, one parameter at a time."""
        for name, weight in self._weights() if self._lagged else ():
            own = weight.detach().clone()
            weight.copy_(self._lagged[name])
            self._lagged[name].copy_(own)

    @torch.no_grad()
    def _behavior_logprobs(self, prompts: list[list[int]], answers: list[list[int]]) -> list[list[float]]:
        found = self._logprobs(self.model, left_right(prompts, answers, self._tokenizer.pad_token_id))
        return [row[: len(one)].tolist() for row, one in zip(found.float().cpu(), answers, strict=True)]

    # A batch: credit of whole groups, groups to the log, past groups into the batch

    def _calculate_rewards(self, *args: Any) -> Any:
        found = super()._calculate_rewards(*args)
        self._rewards = torch.as_tensor(found).detach().double().cpu()  # of all processes; TRL passes advantages on
        return found

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Return TRL's batch, past groups after the fresh ones, with our credit for every row."""
        training, gather, step = self.model.training, self.accelerator.gather, int(self.state.global_step)
        size = self.num_generations if training else self.num_generations_eval
        rank, ranks = self.accelerator.process_index, self.accelerator.num_processes
        if training:
            self._generated_at = step
            self._open_books()
        past = self._draw(len(inputs)) if training and self.replay_share else []
        mine = past[rank * len(past) // ranks : (rank + 1) * len(past) // ranks]
        inputs = inputs[: len(inputs) - len(mine) * size]
        batch: dict[str, Tensor] = super()._generate_and_score_completions(inputs)
        mask_NT = batch["mask"] = (batch["completion_mask"] * batch.pop("tool_mask", 1)).bool()
        served = step if self.served is None else self.served
        versions_N1 = torch.tensor([[one.get("version", served)] for one in inputs], device=mask_NT.device)
        batch["lags"] = (step - versions_N1).expand_as(mask_NT)
        unknown_NT = torch.full(mask_NT.shape, torch.nan, device=mask_NT.device)
        batch["behavior"] = batch.pop("sampling_per_token_logps", unknown_NT)
        batch.pop("importance_sampling_ratio", None)
        batch["fresh"] = torch.ones(len(inputs), dtype=torch.bool, device=mask_NT.device)
        fresh = self._write(inputs, versions_N1.flatten().tolist(), size) if training else []
        self._append(batch, mine, size)

        def whole(fresh_N: Tensor, drawn: Tensor) -> Tensor:
            """Put the rows of all processes in the order of the batch: each has its fresh ones first."""
            return torch.cat([fresh_N.view(ranks, -1), drawn.view(ranks, -1)], 1).view(-1, size)

        drawn_BG, drawn_scored_BG = scores_of(past, size)
        weighted_N = (self._rewards * self.reward_weights.cpu()).nansum(1)
        bounded_N = weighted_N.abs() <= LARGEST_REWARD
        rewards_BG = whole(weighted_N.where(bounded_N, 0.0), drawn_BG)
        scored_BG = whole(bounded_N & ~self._rewards.isnan().all(1), drawn_scored_BG)  # None from all: unscored, not 0
        lengths_BG = gather(batch["mask"].sum(-1)).view(-1, size).cpu()
        seeds = [derive(self.args.seed, "group", step, group) for group in range(len(rewards_BG))]
        credit = assign_credit(
            self.objective, rewards_BG, scored_BG, lengths_BG, group_seeds=seeds, truncated_BG=lengths_BG == 0
        )
        here = torch.arange(rank * len(batch["mask"]), (rank + 1) * len(batch["mask"]))
        for name, values_BG in (("advantages", credit.advantages_BG), ("weights", credit.weights_BG)):
            batch[name] = values_BG.flatten()[here].float().to(mask_NT.device)
        batch["mask"] &= credit.trained_BG.flatten()[here, None].to(mask_NT.device)
        batch["row"] = here.to(mask_NT.device)
        counted = torch.stack([batch["mask"].sum(), batch["mask"].any(-1).sum()])
        batch["tokens"], batch["sequences"] = gather(counted).view(-1, 2).sum(0)
        if training:
            fresh_B = gather(batch["fresh"]).view(-1, size)[:, 0].cpu()
            lags_B = gather(batch["lags"].amax(-1)).view(-1, size).amax(-1).cpu()
            self._groups = WholeGroups(rewards_BG, fresh_B, ~credit.zero_variance_B, ~credit.too_small_B, lags_B)
            # In the order of the batch: each process has its fresh groups first.
            cut = [r * len(fresh) // ranks for r in range(ranks + 1)]
            drawn = [r * len(past) // ranks for r in range(ranks + 1)]
            self._trained = [
                group for r in range(ranks) for group in (*fresh[cut[r] : cut[r + 1]], *past[drawn[r] : drawn[r + 1]])
            ]
            self._replayed, self._slices = {group.id for group in past}, {}
            answers = self._rollout[1]
            self._batch_figures = {
                "completion_length": sum(map(len, answers)) / len(answers),
                "reward_mean": float(rewards_BG[scored_BG].mean()) if scored_BG.any() else float("nan"),
                "zero_variance_share": float(credit.zero_variance_B.double().mean()),
                "trained_tokens": float(batch["tokens"]),
            }
        return batch

    def _draw(self, rows: int) -> list[Group]:
        """Return past groups for this batch, the same on every process; each process trains on as many."""
        size, ranks = self.num_generations, self.accelerator.num_processes
        count = round(self.replay_share * rows / size) * ranks
        known, step = Need.BEHAVIOR in self.objective.needs, int(self.state.global_step)
        words = self.model.get_input_embeddings().num_embeddings
        limits: dict[str, Any] = {"largest": size, "known": known, "multiple": ranks, "vocabulary": words}
        found = [self.books.draw(count, k=step, **limits) if self.books else []]
        groups: list[Group] = broadcast_object_list(found)[0]
        return groups

    def _write(self, inputs: list[dict[str, Any]], versions: list[int], size: int) -> list[Group]:
        """Append what was generated to the log. The main process writes for all, and gets the groups."""
        prompts, answers, masks, _, logprobs = self._rollout[:5]
        first, names = self.accelerator.process_index * len(inputs), self.reward_func_names
        weighted = (self._rewards * self.reward_weights.cpu())[first : first + len(inputs)].tolist()
        ends = {*self.eos_token_ids, self._tokenizer.pad_token_id}
        rows = []
        for i, (one, parts) in enumerate(zip(inputs, weighted, strict=True)):
            known = {name: part for name, part in zip(names, parts, strict=True) if part == part}
            host: dict[str, Json] = {"host": "trl", "step": int(self.state.global_step), "row": first + i}
            behavior = None if logprobs is None else [torch.nan if x is None else x for x in logprobs[i]]
            row = HostRow(
                prompt_ids=prompts[i],
                token_ids=answers[i],
                logprobs=behavior,
                reward=sum(known.values()) if known else torch.nan,
                version=versions[i],
                truncated=answers[i][-1] not in ends,
                loss_mask=None if masks is None else [bool(x) for x in masks[i]],
                parts=known,
                columns=plain(one) | {"host": host},
            )
            rows.append(row)
        everyone = gather_object(rows) if self.out is not None else []
        if self.books is None:
            return []
        return self.books.write(everyone, size=size, k=int(self.state.global_step))

    def _append(self, batch: dict[str, Tensor], groups: Sequence[Group], size: int) -> None:
        """Put the rows of past groups after the fresh ones."""
        if not groups:
            return
        if any(name in batch for name in PIXELS):
            raise NotServable("past groups have no images: leave out replay_share")
        fill = self._tokenizer.pad_token_id
        past = rows_of(groups, size, k=int(self.state.global_step), fill=fill)
        past["fresh"] = torch.zeros(len(past["mask"]), dtype=torch.bool)
        for name, model in (("old_per_token_logps", self.model), ("ref_per_token_logps", self.ref_model)):
            if name in batch:
                past[name] = self._logprobs(model, past)
        fills = {"prompt_ids": fill, "completion_ids": fill, "behavior": torch.nan, "lags": NO_LAG}
        for name, values in past.items():
            batch[name] = joined(batch[name], values, left=name.startswith("prompt"), fill=fills.get(name, 0))

    @torch.no_grad()
    def _logprobs(self, model: torch.nn.Module, rows: Mapping[str, Tensor]) -> Tensor:
        """Return the log-probs of completions under a model, [N, T]."""
        whole = [torch.cat([rows[f"prompt_{name}"], rows[f"completion_{name}"]], 1) for name in ("ids", "mask")]
        ids, attention = (one.to(self.accelerator.device) for one in whole)
        width, together = rows["completion_ids"].shape[1], self.args.per_device_train_batch_size
        found: Tensor = self._get_per_token_logps_and_entropies(model, ids, attention, width, together)[0]
        return found

    # An update

    def _compute_loss(self, model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        attention = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        pixels = {name: inputs[name] for name in PIXELS if name in inputs}
        policy_NT, entropies_NT, _ = self._get_per_token_logps_and_entropies(
            model, ids, attention, inputs["completion_ids"].size(1), compute_entropy=True, **pixels
        )
        training, proximal_NT = self.model.training, inputs.get("old_per_token_logps", policy_NT.detach())
        behavior_NT, mask_NT = inputs["behavior"], inputs["mask"]
        if not training:  # TRL logs the value of the loss, which says nothing; an evaluation has no behavior policy
            behavior_NT = proximal_NT
        elif Need.BEHAVIOR in self.objective.needs:
            mask_NT = mask_NT & ~behavior_NT.isnan()  # vLLM could not say: not trained on, never guessed
        streams = Streams(
            policy_NT=policy_NT,
            behavior_NT=behavior_NT,
            proximal_NT=proximal_NT,
            reference_NT=inputs.get("ref_per_token_logps", UNKNOWN),
            advantages_N=inputs["advantages"],
            weights_N=inputs["weights"],
            mask_NT=mask_NT,
        )
        total = Counts(int(inputs["tokens"]), int(inputs["sequences"]))
        loss = policy_loss(self.objective, streams, total, length_limit=self.max_completion_length)
        if training:
            self._keep(streams, inputs, ForwardPass(policy_NT.detach(), entropies_NT.detach(), loss.passed_NT))
        # The counts are of a whole generation batch: here is the share of one window of accumulation, and gradients
        # are averaged over processes afterwards.
        updates = self.args.steps_per_generation / self.current_gradient_accumulation_steps if training else 1
        return loss.total * (updates * int(self.accelerator.num_processes))

    def _keep(self, streams: Streams, inputs: dict[str, Tensor], update: ForwardPass) -> None:
        """Keep what the figures need of a micro-batch, and log them after the last update on the batch."""
        part = self._step % self.args.steps_per_generation
        place = "cpu" if update.policy_NT.device.type == "mps" else update.policy_NT.device  # sums are float64
        if part not in self._slices:
            reference_NT = inputs.get("ref_per_token_logps")
            published_NT = inputs["fresh"][:, None] & (inputs["lags"] == self._generated_at - (self.served or 0))
            self._slices[part] = Rows(
                mask_NT=streams.mask_NT.to(place),
                behavior_NT=inputs["behavior"].to(place),
                lags_NT=inputs["lags"].to(place),
                published_NT=published_NT.to(place),
                advantages_N=streams.advantages_N.to(place),
                weights_N=streams.weights_N.to(place),
                flat_indices_N=inputs["row"].to(place),
                reference_NT=None if reference_NT is None else reference_NT.to(place),
                start_NT=streams.need(Need.PROXIMAL).to(place),
            )
        update = ForwardPass(update.policy_NT.to(place), update.entropies_NT.to(place), update.passed_NT.to(place))
        self._slices[part].passes.append(update)
        if (self._step + 1) % (self.args.steps_per_generation * self.num_iterations) == 0:
            self._log_figures()

    def _log_figures(self) -> None:
        gated = not isinstance(self.objective.gate, NoGate) or self.objective.reject is not None
        reduce = self.accelerator.reduce
        found = measure(list(self._slices.values()), self._groups, gated=gated, add_up=lambda x: reduce(x, "sum"))
        metrics = self._metrics["train"]
        for name, value in found.overall.items():
            metrics[TRL_NAMES.get(name, f"offbeat/{name}")].append(value)
        for bucket, figures in found.by_lag.items():
            for name in figures.keys() & BY_LAG:
                metrics[f"offbeat/lag {bucket}/{name}"].append(figures[name])
        metrics["offbeat/version"].append(float(self.served or 0))
        metrics["offbeat/replayed_groups"].append(float(len(self._replayed)))
        if self.books is not None:
            rate = {"learning_rate": float(self._get_learning_rate())}
            self.books.trained(
                self._trained, found, found.overall | self._batch_figures | rate, step=int(self.state.global_step) + 1,
                version=self.served, replayed=self._replayed, updates=self.num_iterations,
            )  # fmt: skip

    # A checkpoint

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.books is not None:
            directory = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
            directory.mkdir(parents=True, exist_ok=True)
            write_atomically(directory / STATE, json.dumps(self.books.state()).encode(), durable=True)
        super()._save_checkpoint(model, trial)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and (kept := Path(checkpoint) / STATE).exists():
            self._kept |= {
                "step": int(Path(checkpoint).name.rpartition("-")[2]),
                "state": json.loads(kept.read_bytes()),
            }

    def _open_books(self) -> None:
        """Open the run directory before the first batch: by then it is known whether TRL resumes."""
        if self.books is None and self.out is not None and self.accelerator.is_main_process:
            self.books = Books(self.out, host="trl", **self._kept)
            self.processing_class.save_pretrained(self.books.directory.tokenizer)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train as TRL does, and close the run directory at the end."""
        finished = False
        try:
            found = super().train(*args, **kwargs)
            finished = True
            return found
        finally:
            if self.books is not None:
                self.books.close(finished)
                self.books = None
