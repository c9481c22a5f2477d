"""The trainer of a run in this process: trains, publishes with a probe, saves."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch

from offbeat.rollout.hf import score_sequences
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.trainer.fsdp import serving_state
from offbeat.trainer.trainer import Refused, Trained, Trainer
from offbeat.types import Group, Json
from offbeat.weights.log import WeightLog
from offbeat.weights.probe import Probe, Sequences


@dataclass
class LocalLearner:
    """The `Learner` of one process. Work runs in a thread, so that workers of the same process go on meanwhile."""

    trainer: Trainer
    weights: WeightLog
    checkpoints: Checkpoints
    sequences: Sequences
    """What every version is probed with."""
    serve: torch.dtype
    pinned: int = 3
    """Checkpoints whose version is kept: those that are kept, and the one being written."""
    _pins: dict[int, int] = field(default_factory=dict)

    @property
    def step(self) -> int:
        """See `Learner`."""
        return self.trainer.step

    async def train(self, groups: Sequence[Group]) -> Trained | Refused:
        """See `Learner`."""
        self.checkpoints.check()
        return await asyncio.to_thread(self.trainer.train, groups)

    async def publish(self, version: int) -> Mapping[str, Json]:
        """See `Learner`."""
        return await asyncio.to_thread(self._publish, version)

    def _publish(self, version: int) -> Mapping[str, Json]:
        model = self.trainer.scorer.model
        probe = Probe(self.sequences, score_sequences(model, self.sequences))
        done = self.weights.publish(version, serving_state(self.trainer.scorer, self.serve), probe)
        return {"how": done.kind, "bytes": done.bytes, "changed": done.changed}

    async def save(self, state: Mapping[str, Json]) -> None:
        """See `Learner`. It is written while training goes on; `train` asks how that went."""
        await asyncio.to_thread(self._save, state)

    def _save(self, state: Mapping[str, Json]) -> None:
        # A run that goes on from here serves this version again, however many have come and gone since.
        published = cast(int, state["published"])
        self.weights.pin(published, by=f"step {self.step}")
        self.checkpoints.save(self.trainer, state)
        self._pins[self.step] = published
        for step in sorted(self._pins)[: -self.pinned]:
            self.weights.unpin(self._pins.pop(step), by=f"step {step}")
