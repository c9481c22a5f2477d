"""The trainer of a run: trains, publishes with a probe, saves. One rank of it, and one alone in this process."""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerBase

from offbeat.config import Config
from offbeat.errors import RunError
from offbeat.rollout.hf import sequence_logprobs
from offbeat.run.build import make_trainer
from offbeat.run.directory import RunDirectory
from offbeat.seeds import derive
from offbeat.tasks.data import prompt_at
from offbeat.tasks.task import Task
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.trainer.estimate import StepShape, check_worst_case, estimate_memory
from offbeat.trainer.forward import PolicyModel
from offbeat.trainer.fsdp import Ranks, serving_state
from offbeat.trainer.trainer import RefusedBatch, Trained, Trainer
from offbeat.types import Group, Json
from offbeat.weights.probe import Probe, Sequences, probe_sequences
from offbeat.weights.publisher import WeightLog


def identity(config: Config) -> Json:
    """What a run is, apart from how long it goes on and on what: that may change when it is resumed."""
    settings: dict[str, Any] = config.model_dump(mode="json", exclude={"steps", "cluster", "workers"})
    del settings["trainer"]["ranks"], settings["run"]["place"], settings["run"]["silence"]
    return settings


@dataclass
class RankLearner:
    """One rank's share of the work. All ranks are asked the same things in the same order; rank 0 has the weight log.

    Every method blocks.
    """

    config: Config
    trainer: Trainer
    weights: WeightLog | None
    checkpoints: Checkpoints
    sequences: Sequences
    """What every version is probed with."""
    _pins: dict[int, int] = field(default_factory=dict)

    @classmethod
    def open(cls, config: Config, directory: RunDirectory, task: Task, tokenizer: PreTrainedTokenizerBase,
             stack: ExitStack, ranks: Ranks | None = None) -> "RankLearner":  # fmt: skip
        """At the beginning of a run; what has to be closed is on the stack."""
        ranks = ranks or Ranks()
        trainer = make_trainer(config, ranks)
        weights = None
        if ranks.rank == 0:
            log = WeightLog.open(directory.weights, anchor_every=config.sync.anchor_every)
            weights = stack.enter_context(log)
        settings = identity(config)
        checkpoints = Checkpoints(directory.checkpoints, config=settings, keep=config.trainer.keep, ranks=ranks)
        stack.enter_context(checkpoints)
        order = prompt_at(task, tokenizer, derive(config.seed, "prompts"))
        probed = [order(place).token_ids.tolist() for place in range(4)]
        sequences = probe_sequences(probed, trainer.policy_model.vocabulary, config.seed)
        return cls(config, trainer, weights, checkpoints, sequences)

    def restore(self) -> dict[str, Json] | None:
        """Go to the newest checkpoint, if there is one; returns its step and what the loop kept in it."""
        checkpoint = self.checkpoints.newest()
        if self.weights is not None:  # what was published since did not happen; without a checkpoint, nothing did
            self.weights.rewind(-1 if checkpoint is None else checkpoint.step)
        if checkpoint is None:
            return None
        checkpoint.restore(self.trainer)
        return {"step": checkpoint.step, **checkpoint.manifest.extras}

    def estimate(self) -> dict[str, Json]:
        """What a step will take, and that the largest one fits, before anything is generated."""
        config, longest = self.config, self.trainer.policy_model.model.config.max_position_embeddings
        prompt = min(config.engine.max_prompt_tokens, longest - config.sampling.max_tokens)
        if prompt + config.sampling.max_tokens > config.trainer.token_budget:
            raise RunError(
                f"trainer.token_budget = {config.trainer.token_budget} cannot hold a prompt of {prompt} tokens and a "
                f"completion of {config.sampling.max_tokens}; raise it, or lower engine.max_prompt_tokens"
            )
        shape = StepShape(prompt, config.sampling.max_tokens, config.group_size)
        estimate = estimate_memory(self.trainer, shape)
        worst = check_worst_case(self.trainer, shape, estimate)
        return {"memory": str(estimate), "worst_seconds": worst.seconds}

    def train(self, groups: Sequence[Group]) -> Trained | RefusedBatch:
        """One step."""
        self.checkpoints.check()
        return self.trainer.train(groups)

    def publish(self, version: int) -> dict[str, Json]:
        """The policy as it is now; returns what there is to say about it, on rank 0."""
        policy_model = self.trainer.policy_model
        alone = self.trainer.ranks.size == 1
        logprobs = (
            sequence_logprobs(policy_model.model, self.sequences) if alone else _scores(policy_model, self.sequences)
        )
        state = serving_state(policy_model, getattr(torch, self.config.model.serve))
        if self.weights is None:
            return {"gathered": sum(1 for _ in state)}
        done = self.weights.publish(version, state, Probe(self.sequences, logprobs))
        return {"how": done.kind, "bytes": done.bytes, "changed": done.changed}

    def save(self, state: Mapping[str, Json]) -> None:
        """A checkpoint, written while training goes on; `train` asks how that went."""
        step, published = self.trainer.step, cast(int, state["published"])
        # A run that goes on from here serves this version again, however many have come and gone since.
        if self.weights is not None:
            self.weights.pin(published, by=f"step {step}")
        self.checkpoints.save(self.trainer, state)
        self._pins[step] = published
        for earlier in sorted(self._pins)[: -self.config.trainer.keep - 1]:  # those kept, and the one being written
            version = self._pins.pop(earlier)
            if self.weights is not None:
                self.weights.unpin(version, by=f"step {earlier}")


@torch.inference_mode()
def _scores(policy_model: PolicyModel, sequences: Sequences) -> list[NDArray[np.float32]]:
    """As `sequence_logprobs`, through the one way in that gathers what ranks hold in slices."""
    found = []
    for one in sequences:
        ids_T = torch.tensor(one, device=policy_model.device)
        logprobs_TV = policy_model.logits(ids_T[None])[0, :-1].float().log_softmax(-1)
        found.append(logprobs_TV.gather(-1, ids_T[1:, None]).flatten().cpu().numpy())
    return found


@dataclass
class LocalLearner:
    """The `Learner` of one process. Work runs in a thread, so that workers of the same process go on meanwhile."""

    rank: RankLearner

    @property
    def step(self) -> int:
        """See `Learner`."""
        return self.rank.trainer.step

    def check(self) -> None:
        """See `Learner`."""
        self.rank.checkpoints.check()

    async def train(self, groups: Sequence[Group]) -> Trained | RefusedBatch:
        """See `Learner`."""
        return await asyncio.to_thread(self.rank.train, groups)

    async def publish(self, version: int) -> Mapping[str, Json]:
        """See `Learner`."""
        return await asyncio.to_thread(self.rank.publish, version)

    async def save(self, state: Mapping[str, Json]) -> None:
        """See `Learner`."""
        await asyncio.to_thread(self.rank.save, state)

    async def finish(self) -> None:
        """See `Learner`."""
        await asyncio.to_thread(self.rank.checkpoints.wait)
