"""A trainer of a few thousand parameters, groups for it, and what ranks do with them: for tests and torture."""

import hashlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import KL
from offbeat.seeds import derive
from offbeat.trainer.checkpoint import Checkpoints
from offbeat.trainer.checkpoint_state import own_rows, pieces
from offbeat.trainer.forward import TokenScorer
from offbeat.trainer.fsdp import serving_state, shard
from offbeat.trainer.optimizer import MasterAdamW, OptimizerSettings, Schedule
from offbeat.trainer.ranks import Ranks
from offbeat.trainer.trainer import StepSettings, Trained, Trainer
from offbeat.types import Completion, Group, Json, Prompt, Score, VersionSpan
from offbeat.weights.bits import Bits

VOCABULARY = 50


def small_model(*, tied: bool = True, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    """Two layers with shared key heads; the same weights every time."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return LlamaForCausalLM(config).to(dtype)


def small_trainer(
    preset: str = "grpo",
    *,
    ranks: Ranks | None = None,
    compute: torch.dtype = torch.float32,
    dtype: torch.dtype = torch.float32,
    reference: bool = False,
    tied: bool = True,
    sharded: bool = False,
) -> Trainer:
    """With i = 2, and several micro-batches a batch."""
    objective = PRESETS[preset].objective
    if reference:
        objective = replace(objective, regularizers=(*objective.regularizers, KL(0.1)))
    scorer = TokenScorer(small_model(tied=tied, dtype=dtype))
    other = TokenScorer(small_model(tied=tied, dtype=dtype)) if reference else None
    if sharded:
        shard(scorer, compute=compute)
        if other is not None:
            shard(other, compute=compute)
    optimizer = MasterAdamW(scorer, OptimizerSettings(Schedule(1e-3), weight_decay=0.1))
    settings = StepSettings(objective, updates_per_batch=2, token_budget=48, length_limit=8, refresh_every=2)
    return Trainer(scorer, optimizer, settings, other, ranks or Ranks())


def small_batch(step: int, groups: int = 5, size: int = 4) -> list[Group]:
    """Groups of random tokens for a step, the same for the same step; the first always has contrast."""
    return list(_groups(np.random.default_rng(derive(3, "small", step)), step, groups, size))


def _groups(rng: np.random.Generator, step: int, groups: int, size: int) -> Iterator[Group]:
    for g in range(groups):
        rewards = rng.integers(0, 2, size) if g else np.arange(size) % 2
        name, prompt = f"s{step}g{g}", rng.integers(3, VOCABULARY, rng.integers(2, 7), np.int32)
        answers = []
        for i in range(size):
            tokens = rng.integers(3, VOCABULARY, rng.integers(1, 9), np.int32)
            logprobs = rng.normal(np.log(1 / VOCABULARY), 0.1, len(tokens)).astype(np.float32)
            spans = (VersionSpan(max(0, step - g % 3), 0, len(tokens)),)
            answers.append(Completion(f"{name}/{i}", tokens, logprobs, spans, score=Score(float(rewards[i]))))
        yield Group(name, Prompt(f"p{g}", prompt, "small"), tuple(answers))


def digest_of(trainer: Trainer) -> str:
    """Of every bit of this rank's state: parameters, moments, reference, generators, step."""
    sha256 = hashlib.sha256(str(trainer.step).encode() + torch.get_rng_state().numpy().tobytes())
    for name, tensor in sorted(pieces(trainer).items()):
        _, local = own_rows(name, tensor)
        sha256.update(name.encode() + Bits.of(local).raw())
    return sha256.hexdigest()


def one_step_each(ranks: Ranks, presets: Sequence[str], place: str, sharded: bool) -> Json:
    """A step with every preset, `+kl` with a reference policy; rank 0 leaves the weights in files. The metrics."""
    torch.set_num_threads(1)
    found: dict[str, Json] = {}
    for preset in presets:
        trainer = small_trainer(
            preset.removesuffix("+kl"), ranks=ranks, sharded=sharded, reference=preset.endswith("+kl")
        )
        done = trainer.train(small_batch(0, groups=11))
        assert isinstance(done, Trained), done
        weights = dict(serving_state(trainer.scorer, torch.float32))
        if ranks.rank == 0:
            save_file(weights, Path(place) / f"{preset}-{ranks.size}-{sharded}.safetensors")
        found[preset] = dict(done.metrics)
    return found


def steps_with_checkpoints(ranks: Ranks, place: str, steps: int, every: int, pause: float = 0.0) -> Json:
    """Resume from the newest checkpoint if there is one, train to the end, and tell the digest of every step taken.

    The file `at` says how far it is; after each step it waits for `pause` seconds.
    """
    torch.set_num_threads(1)
    trainer = small_trainer(ranks=ranks, sharded=True)
    digests: dict[str, Json] = {}
    with Checkpoints(place, config={"every": every}, ranks=ranks) as checkpoints:
        if (newest := checkpoints.newest()) is not None:
            newest.restore(trainer)
            digests[str(trainer.step)] = digest_of(trainer)
        while trainer.step < steps:
            trainer.train(small_batch(trainer.step))
            digests[str(trainer.step)] = digest_of(trainer)
            checkpoints.check()
            if trainer.step % every == 0:
                checkpoints.save(trainer, {"step": trainer.step})
            if ranks.rank == 0:
                (Path(place) / "at").write_text(str(trainer.step))
            time.sleep(pause)
    return digests
