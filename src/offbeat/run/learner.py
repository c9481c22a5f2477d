"""The trainer of a run, built from its configuration: it trains, publishes versions, and saves checkpoints.

`make_trainer` builds one rank of it, `RankLearner` is the work of one rank, and `LocalLearner` is a trainer of one rank
in this process.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, ParamSpec, TypeVar, cast

import torch
from transformers import PreTrainedTokenizerBase

from offbeat.config import Config, examine
from offbeat.config.parsing import translate
from offbeat.errors import AdapterMismatch, ModelUnreadable, RunError
from offbeat.objective.spec import Need
from offbeat.placement.hardware import cpu_products
from offbeat.placement.memory import RankMemory, explain_memory_errors, rank_memory
from offbeat.placement.shape import ModelShape
from offbeat.run.cadence import PublishEvidence
from offbeat.run.directory import RunDirectory, changed_inputs, digest_inputs, keep_sources
from offbeat.run.protocols import REPAIRED
from offbeat.run.turns import GpuUser, SharedGpu
from offbeat.seeds import derive
from offbeat.tasks.task import Task, prompt_at
from offbeat.trainer.allocator import keep_freed_memory
from offbeat.trainer.checkpoint import Checkpoints, differences, kept
from offbeat.trainer.export import PROBE
from offbeat.trainer.forward import PolicyModel, sequence_logprobs
from offbeat.trainer.fsdp import Ranks, as_served, serving_state
from offbeat.trainer.loading import load_policy_model
from offbeat.trainer.optimizer import Decay, MasterAdamW, OptimizerSettings, Schedule, dither
from offbeat.trainer.trainer import RefusedBatch, StepSettings, Trained, Trainer
from offbeat.trainer.worst_case import StepShape, check_worst_case
from offbeat.types import Group, Json, StepContext
from offbeat.weights.adapter import AdapterSpec, load_base_digest
from offbeat.weights.probe import LENGTH as PROBE_LENGTH
from offbeat.weights.probe import Probe, Sequences, probe_sequences
from offbeat.weights.publisher import KEEP, State, WeightLog

P = ParamSpec("P")
T = TypeVar("T")

PUBLISHED_STATE: Final = "published_state"
"""The extra of a checkpoint that holds the digest of the published version's weights."""


def fixed_settings(config: Config) -> dict[str, Json]:
    """Return the settings to compare when a run is resumed: all but its length and where it runs."""
    settings: dict[str, Any] = config.model_dump(mode="json", exclude={"steps", "cluster", "workers"})
    del settings["trainer"]["ranks"], settings["run"]["place"], settings["run"]["silence"]
    for name in ("tensor_parallel", "gpu_memory_utilization", "extra"):
        del settings["engine"][name]
    if not config.evaluation.holds_out:
        settings["evaluation"]["hold_out"] = 0.0  # as in checkpoints of earlier releases, which held nothing out
    return settings


def recorded_settings(recorded: Json) -> dict[str, Json]:
    """Return the fixed settings of a checkpoint, which an earlier version may have saved, in today's settings."""
    return fixed_settings(examine(translate(cast("dict[str, Any]", recorded))).config)


def _exhaust(state: State) -> int:
    """Take part in gathering every tensor, and return their number."""
    return sum(1 for _ in state)


@dataclass
class RankLearner:
    """The work of one rank. All ranks get the same calls in the same order; only rank 0 has the weight log.

    Every method blocks.
    """

    config: Config
    trainer: Trainer
    weights: WeightLog | None
    """None on other ranks than 0, and in an offline run."""
    checkpoints: Checkpoints
    sequences: Sequences
    """The token sequences of every version's probe."""
    inputs: Mapping[str, Json] = field(default_factory=dict)
    """Digests of what the run depends on; rank 0 puts them into every checkpoint."""
    _pins: dict[int, int] = field(default_factory=dict)

    @classmethod
    def open(cls, config: Config, directory: RunDirectory, task: Task, tokenizer: PreTrainedTokenizerBase,
             stack: ExitStack, ranks: Ranks | None = None) -> "RankLearner":  # fmt: skip
        """Load the model and open weight log and checkpoints; `stack` closes them."""
        ranks = ranks or Ranks()
        trainer = make_trainer(config, ranks)
        if trainer.policy_model.device.type == "cpu":
            keep_freed_memory()
        if ranks.rank == 0 and (directory.events.exists() or directory.weights.exists()):  # else the run is new
            from offbeat.run.fsck import require_checkpoint  # it reads what this module writes

            require_checkpoint(directory, verify=False)  # before anything is changed; `restore` reads every byte
        weights = None
        if ranks.rank == 0 and config.run.mode != "offline":  # an offline run has no workers to publish for
            adapter = trainer.policy_model.adapter
            # Beyond those of groups that wait to be trained, so that `offbeat gap` finds those of groups just trained.
            keep = KEEP + config.open_versions - 1
            log = WeightLog.open(directory.weights, anchor_every=config.sync.anchor_every, keep=keep, adapter=adapter)
            weights = stack.enter_context(log)
        settings = fixed_settings(config)
        checkpoints = Checkpoints(
            directory.checkpoints, config=settings, keep=config.trainer.keep, ranks=ranks,
            record=directory.record_saved,
            translate=lambda recorded: recorded_settings(recorded) | {"optimizer": settings["optimizer"]},
        )  # fmt: skip
        stack.enter_context(checkpoints)
        order = prompt_at(task, tokenizer, derive(config.seed, "prompts"))
        probed = [order(place).token_ids.tolist() for place in range(4)]
        # vLLM generates one more token after each sequence of a probe, which has to fit too.
        length = min(PROBE_LENGTH, trainer.policy_model.model.config.max_position_embeddings - 1)
        sequences = probe_sequences(probed, trainer.policy_model.vocab_size, config.seed, length)
        inputs = digest_inputs(config) if ranks.rank == 0 else {}
        if ranks.rank == 0:
            keep_sources(directory, config)
        return cls(config, trainer, weights, checkpoints, sequences, inputs)

    def restore(self) -> dict[str, Json] | None:
        """Go to the newest checkpoint, if there is one; return its step, the loop's state, and changed inputs.

        If workers could not load the version that the checkpoint serves, its policy is published again; see `_repair`.
        """
        checkpoint = self.checkpoints.newest()
        published = -1 if checkpoint is None else cast("int", checkpoint.manifest.extras["published"])
        if self.weights is not None:  # versions after the checkpoint are published again; without one, all are
            self.weights.rewind(published)
        if checkpoint is None:
            return None
        changed = changed_inputs(checkpoint.manifest.extras.get("inputs"), self.inputs) if self.inputs else []
        ours, theirs = fixed_settings(self.config), recorded_settings(checkpoint.manifest.config)
        changed += differences(ours["optimizer"], theirs["optimizer"], "optimizer")
        state = dict(checkpoint.manifest.extras)
        problem = self._weight_problem(published, cast("str | None", state.pop(PUBLISHED_STATE, None)))
        self._calibrate_if_lost(bool(problem))  # now: the model is still the one that the run began with
        checkpoint.restore(self.trainer)
        repaired = self._repair(problem, state) if self._any_rank(bool(problem)) else {}
        return {"step": checkpoint.step, **state, "changed": [*changed], **repaired}

    def _weight_problem(self, published: int, state: str | None) -> str:
        """Return why workers could not load the published version; empty if they can, and on other ranks than 0.

        `state` is the digest of its weights; None in a checkpoint of an earlier release.
        """
        if self.weights is None:
            return ""
        if state is not None and self.weights.state_of(published) not in (None, state):
            self.weights.rewind(-1)
            return f"version {published} has other weights than this run published: the weight log is of another run"
        return self.weights.find_problem(published) or ""

    def _calibrate_if_lost(self, damaged: bool) -> None:
        """Write the probe of version 0 again if it is lost or damaged, or if it may be that of another run."""
        probe = None if self.weights is None else self.weights.calibration
        lost = self.weights is not None and (damaged or probe is None or probe.sequences != self.sequences)
        if not self._any_rank(lost):
            return
        state, probe = self._served()
        if self.weights is None:
            _exhaust(state)
        else:
            self.weights.calibrate(state, probe)

    def _repair(self, problem: str, state: Mapping[str, Json]) -> dict[str, Json]:
        """Publish the policy of the checkpoint as an anchor; return the changed part of the loop's state.

        The checkpoint may be some steps after the version that was lost, so the number of the new one is its step.
        """
        if self.weights is not None:
            self.weights.remove_damaged()
        step = self.trainer.step
        details = self.publish(step)
        evidence = PublishEvidence.restore(cast("dict[str, Json]", state["evidence"]))
        evidence.published()
        repaired: Json = {"version": step, "why": problem, "how": details.get("how"), "bytes": details.get("bytes")}
        return {"published": step, "evidence": evidence.state(), REPAIRED: repaired}

    def _any_rank(self, condition: bool) -> bool:
        return bool(float(self.trainer.ranks.sum(torch.tensor([float(condition)]))))

    def estimate(self) -> dict[str, Json]:
        """Estimate the memory of a step, and compute the largest micro-batch once, before the first step."""
        config, longest = self.config, self.trainer.policy_model.model.config.max_position_embeddings
        completion = config.sampling.max_tokens
        if not config.asks:  # nothing is sampled: stored groups fit into the context and the budget, whatever is set
            longest = min(longest, config.trainer.token_budget)
            completion = min(completion, longest - 1)
        prompt = min(config.engine.max_prompt_tokens, longest - completion)
        if prompt + completion > config.trainer.token_budget:
            raise RunError(
                f"trainer.token_budget = {config.trainer.token_budget} cannot hold a prompt of {prompt} tokens and a "
                f"completion of {completion}; raise it, or lower engine.max_prompt_tokens"
            )
        memory = self._memory()
        with explain_memory_errors(memory):
            seconds = check_worst_case(self.trainer, StepShape(prompt, completion, config.group_size))
        return {"memory": str(memory or ""), "worst_seconds": seconds, "steps": config.steps}

    def _memory(self) -> RankMemory | None:
        """Return the bytes of this rank; None for a model whose config.json does not tell, as a mixture of experts."""
        ranks, on_cpu = self.trainer.ranks, self.trainer.policy_model.device.type == "cpu"
        try:
            shape = ModelShape.read(self.config.model.directory())
        except ModelUnreadable:
            return None
        shards, once = ranks.size // max(1, len(ranks.nodes)), ranks.reduce == "once"
        return rank_memory(self.config, shape, shards=shards, reduce_once=once, on_cpu=on_cpu)

    def train(self, groups: Sequence[Group], context: StepContext) -> Trained | RefusedBatch:
        self.checkpoints.check()
        return self.trainer.train(groups, context)

    def publish(self, version: int) -> dict[str, Json]:
        """Publish the current policy; rank 0 returns fields for the `published` event."""
        state, probe = self._served()
        if self.weights is None:
            return {"gathered": _exhaust(state)}
        done = self.weights.publish(version, state, probe)
        return {"how": done.kind, "bytes": done.bytes, "changed": done.changed}

    def _served(self) -> tuple[State, Probe]:
        """Return the weights that workers serve, and their probe. All ranks must iterate the weights."""
        serve = getattr(torch, self.config.model.serve)
        return serving_state(self.trainer.policy_model, serve), self._probe()

    def _probe(self) -> Probe:
        with self.rounded():
            return Probe(self.sequences, sequence_logprobs(self.trainer.policy_model, self.sequences))

    def rounded(self) -> AbstractContextManager[None]:
        """Let the trainer's model compute with the weights that are served, for the length of the block."""
        if self.config.model.compute != "float32":  # a trainer that computes in 16 bits has rounded its weights already
            return nullcontext()
        return as_served(self.trainer.policy_model, getattr(torch, self.config.model.serve))

    def save(self, state: Mapping[str, Json]) -> None:
        """Start to write a checkpoint while training continues; `train` raises if that failed."""
        self.finish()
        step, published = self.trainer.step, cast("int", state["published"])
        # A run that resumes from this checkpoint serves this version again, so the weight log must keep it.
        if self.weights is not None:
            self.weights.pin(published, by=f"step {step}")
            state = {**state, PUBLISHED_STATE: self.weights.state_of(published)}
        if self.trainer.policy_model.adapter is not None:  # `offbeat export` checks what it writes with it
            state = {**state, PROBE: self._probe().to_json()}
        self.checkpoints.save(self.trainer, {**state, "inputs": {**self.inputs}})
        self._pins[step] = published
        keep = self.config.trainer.keep + 1  # the one being written included
        for earlier in self._pins.keys() - kept(sorted(self._pins), keep, state.get("healthy")):
            version = self._pins.pop(earlier)
            if self.weights is not None:
                self.weights.unpin(version, by=f"step {earlier}")

    def finish(self) -> None:
        """Wait until the last checkpoint is on disk. Then nothing needs what `restore` set aside any more."""
        self.checkpoints.wait()
        if self.weights is not None and self.checkpoints.on_disk is not None:
            self.weights.drop_superseded()


@dataclass
class LocalLearner:
    """The `Learner` of a run in one process. Calls run in a thread of its own, so that the workers continue meanwhile.

    It is always the same thread: each thread has its own share of freed memory, and one that trains now and then
    keeps gigabytes that no other thread can use.
    """

    rank: RankLearner
    gpu: SharedGpu | None = field(default=None, kw_only=True)
    """If an engine shares the GPU, the trainer works only in its turn."""
    _thread: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(1, thread_name_prefix="trainer"), init=False
    )

    @property
    def step(self) -> int:
        return self.rank.trainer.step

    def check(self) -> None:
        self.rank.checkpoints.check()

    async def estimate(self) -> Mapping[str, Json]:
        return await self._call(self.rank.estimate)

    async def train(self, groups: Sequence[Group], context: StepContext) -> Trained | RefusedBatch:
        return await self._call(self.rank.train, groups, context)

    async def publish(self, version: int) -> Mapping[str, Json]:
        return await self._call(self.rank.publish, version)

    async def save(self, state: Mapping[str, Json]) -> None:
        await self._call(self.rank.save, state)

    async def finish(self) -> None:
        await asyncio.to_thread(self.rank.finish)

    async def _call(self, method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        async with self.gpu.take(GpuUser.TRAINER) if self.gpu else nullcontext():
            return await asyncio.wrap_future(self._thread.submit(method, *args, **kwargs))


def make_trainer(config: Config, ranks: Ranks) -> Trainer:
    """Load the model (and the reference policy, if the objective needs one) and build the trainer of one rank."""
    random.seed(config.seed)
    torch.manual_seed(derive(config.seed, "torch") % 2**63)
    objective = config.objective.resolve()
    policy_model = policy_model_of(config, ranks)
    second = Need.REFERENCE in objective.needs and not config.adapter.rank  # an adapter's reference is its own base
    reference = policy_model_of(config, ranks).requires_grad_(False) if second else None
    optimizer = config.optimizer
    schedule = Schedule(
        optimizer.learning_rate, optimizer.warmup_steps, Decay(optimizer.decay), config.steps, optimizer.floor
    )
    settings = OptimizerSettings(
        schedule, optimizer.betas, weight_decay=optimizer.weight_decay, max_grad_norm=optimizer.max_grad_norm
    )
    step = StepSettings(
        objective,
        config.updates_per_batch,
        config.trainer.token_budget,
        config.sampling.max_tokens,
        config.reference.refresh_every,
        config.seed,
    )
    adamw = MasterAdamW(policy_model, settings, _rounds_to(config, ranks))
    if config.optimizer.dither and config.model.compute == config.model.serve == "bfloat16":
        dither(adamw, config.seed)
    return Trainer(policy_model, adamw, step, reference, ranks=ranks)


def policy_model_of(config: Config, ranks: Ranks) -> PolicyModel:
    """Load the model that a run begins with, as its trainer computes with it."""
    adapter = adapter_spec(config)
    if adapter is not None:
        _require_one_base(adapter, ranks)
    wanted: torch.dtype = getattr(torch, config.model.compute)
    return load_policy_model(
        config.model.directory(),
        ranks,
        compute=torch.float32 if _rounds_to(config, ranks) else wanted,
        rounds_to=wanted,
        temperature=config.sampling.temperature,
        chunk_tokens=config.trainer.chunk_tokens,
        checkpoint_activations=config.trainer.checkpoint_activations,
        adapter=adapter,
        serve=getattr(torch, config.model.serve),
        seed=config.seed,
    )


def _rounds_to(config: Config, ranks: Ranks) -> torch.dtype | None:
    """Return the dtype of the values that weights have, if it is narrower than that of the products.

    A CPU that only emulates bfloat16 computes in float32, with the weights that engines serve. One rank alone can do
    that: FSDP has one dtype for both.
    """
    compute = config.model.compute
    if ranks.size > 1 or torch.accelerator.is_available() or cpu_products(compute) == compute:
        return None
    return cast("torch.dtype", getattr(torch, compute))


def adapter_spec(config: Config) -> AdapterSpec | None:
    """Return the adapter that a run trains; None if it trains all weights. Reads every byte of the base's weights."""
    adapter = config.adapter
    if not adapter.rank:
        return None
    return AdapterSpec(adapter.rank, adapter.alpha, adapter.names, load_base_digest(config.model.directory()))


def _require_one_base(adapter: AdapterSpec, ranks: Ranks) -> None:
    """Raise on every rank if one of them, on another machine, reads other weights."""
    own = float(int(adapter.base[:12], 16))  # 48 bits, whose sums are exact in float64
    if float(ranks.sum(torch.tensor([own], dtype=torch.float64))) != own * ranks.size:
        raise AdapterMismatch(
            f"ranks read different weights of the base (here {adapter.base[:12]}…); copy one model to every machine"
        )
