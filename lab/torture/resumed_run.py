"""A lagged run with replay in one process that resumes after any kill: `python -m lab.torture.trainer resume` kills it.

    every v steps publish π_k, the engine loads it ─ generate until the sampler can draw ─ train i updates ─ checkpoint

The id, the prompt and the random numbers of group n depend on n alone. So a resumed run would append the same groups
that the killed run has appended, and it continues after them.
"""

import asyncio
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import torch

from offbeat.experience.ledger import LedgerEvent, LedgerEventKind
from offbeat.experience.log import ExperienceLog
from offbeat.experience.modes import Replay
from offbeat.experience.sampler import Draw, Sampler, SamplerLimits
from offbeat.experience.schema import Snapshot
from offbeat.objective.presets import PRESETS
from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.hf import HfEngine
from offbeat.seeds import derive
from offbeat.trainer.checkpoint import Checkpoint, Checkpoints
from offbeat.trainer.forward import PolicyModel
from offbeat.trainer.fsdp import serving_state
from offbeat.trainer.optimizer import MasterAdamW, OptimizerSettings, Schedule
from offbeat.trainer.trainer import StepSettings, Trained, Trainer
from offbeat.types import Completion, Group, Json, Prompt, Score
from offbeat.weights.publisher import WeightLog
from offbeat.weights.subscriber import Subscription
from tests.fixtures.processes import Send, Work
from tests.fixtures.small_trainer import VOCABULARY, digest_of, small_model

SEED = 11
SYNC_EVERY = 4
SAVE_EVERY = 3
GROUPS, SIZE = 4, 4
SAMPLING = Sampling(max_tokens=6, stop_token_ids=(1,))


@dataclass
class Run:
    """The parts of a run, connected without the loop of `offbeat.run`."""

    place: Path
    trainer: Trainer
    sampler: Sampler
    log: ExperienceLog
    weights: WeightLog
    engine: HfEngine
    cursor: Snapshot | None = None
    published: int = 0

    def resume(self, checkpoint: Checkpoint) -> None:
        """Restore everything from the checkpoint. The ledger forgets later steps."""
        checkpoint.restore(self.trainer)
        snapshot = Snapshot.from_json(cast("dict[str, int]", checkpoint.extra("snapshot")))
        rows, self.cursor = self.log.index_since(None, snapshot)
        self.sampler.feed(rows)
        self.sampler.restore(cast("dict[str, Json]", checkpoint.extra("sampler")))
        self.published = cast(int, checkpoint.extra("published"))
        self.log.record([LedgerEvent("", LedgerEventKind.REWOUND, step=self.trainer.step)])

    def step(self) -> str:
        """Make one step and return its line for the history."""
        k = self.trainer.step
        if k % SYNC_EVERY == 0:
            self.weights.publish(k, serving_state(self.trainer.policy_model, torch.float32))
            self.published = k
        draw = self._draw(k)
        done = self.trainer.train(self.log.read(draw.ordinals, self.cursor))
        assert isinstance(done, Trained), done
        self.log.record(LedgerEvent(one, LedgerEventKind.TRAINED, step=done.step) for one in done.groups)
        self.log.record(LedgerEvent(one, LedgerEventKind.ZERO_VARIANCE, step=done.step) for one in done.zero_variance)
        figures = {name: value.hex() for name, value in done.metrics.items()}
        line = {"step": done.step, "drawn": draw.ordinals, "lags": draw.lags, "replayed": draw.replayed}
        return json.dumps(line | {"state": digest_of(self.trainer), "figures": figures})

    def state(self) -> dict[str, Json]:
        """Return what the checkpoint holds besides the trainer."""
        assert self.cursor is not None
        snapshot: dict[str, Json] = {**self.cursor.to_json()}
        return {"sampler": self.sampler.state(), "snapshot": snapshot, "published": self.published}

    def _draw(self, k: int) -> Draw:
        while True:
            rows, self.cursor = self.log.index_since(self.cursor)
            self.sampler.feed(rows)
            draw = self.sampler.draw(k)
            if isinstance(draw, Draw):
                return draw
            at = self.log.size()
            self.log.append(self._generate(range(at, at + draw.needed)))

    def _generate(self, places: range) -> list[Group]:
        if self.engine.version != self.published:
            with Subscription.open(self.place / "weights", name="engine") as reader:
                asyncio.run(self.engine.load(self.published, reader.fetch(self.published).items()))
        prompts = [_prompt(place) for place in places]
        requests = [
            Request(prompt.id, prompt.token_ids, SIZE, SAMPLING, derive(SEED, "group", prompt.id)) for prompt in prompts
        ]
        answered = asyncio.run(self.engine.generate(requests))
        pairs = zip(prompts, answered, strict=True)
        return [Group(prompt.id, prompt, tuple(_scored(one) for one in answers)) for prompt, answers in pairs]


def _prompt(place: int) -> Prompt:
    rng = np.random.default_rng(derive(SEED, "prompt", place))
    return Prompt(f"g{place}", rng.integers(3, VOCABULARY, 5, np.int32), "even")


def _scored(completion: Completion) -> Completion:
    """Score a completion: 1 if the sum of its tokens is even."""
    return replace(completion, score=Score(float(completion.token_ids.sum() % 2 == 0)))


def running(place: Path, steps: int) -> Work:
    """Start or resume a run in a directory. It sends each step before it starts, and the final state."""

    def work(send: Send) -> None:
        torch.set_num_threads(1)
        policy_model = PolicyModel(small_model())
        optimizer = MasterAdamW(policy_model, OptimizerSettings(Schedule(2e-3, warmup_steps=5)))
        objective = PRESETS["rec-oneside-is"].objective
        trainer = Trainer(policy_model, optimizer, StepSettings(objective, updates_per_batch=2, token_budget=96))
        sampler = Sampler(Replay(share=0.5, reuse_budget=3), SamplerLimits(batch=GROUPS), seed=SEED)
        with (
            ExperienceLog.open(place / "experience") as log,
            WeightLog.open(place / "weights") as weights,
            Checkpoints(place / "checkpoints", config={"seed": SEED}) as checkpoints,
            (place / "history").open("ab", buffering=0) as history,
        ):
            run = Run(place, trainer, sampler, log, weights, HfEngine(small_model(), version=-1))
            if (newest := checkpoints.newest()) is not None:
                run.resume(newest)
            while trainer.step < steps:
                send(f"step {trainer.step}")
                history.write(run.step().encode() + b"\n")
                checkpoints.check()
                if trainer.step % SAVE_EVERY == 0:
                    checkpoints.save(trainer, run.state())
            ledger = log.ledger()
            ledger.check()
            send(f"ledger {ledger}, {ledger.conflicts} conflicts")
        send(f"done {digest_of(trainer)}")

    os.makedirs(place, exist_ok=True)
    return work


def history_of(place: Path) -> dict[int, set[str]]:
    """Return the recorded lines of each step: more than one if a repeated step had another result."""
    found: dict[int, set[str]] = {}
    for line in (place / "history").read_text().splitlines():
        found.setdefault(json.loads(line)["step"], set()).add(line)
    return found
