"""From a configuration to the parts of a run: one function for each, the same in one process and on many."""

import random
from collections.abc import Awaitable, Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from offbeat.config import Config
from offbeat.experience.modes import Fresh, Mode, Offline, Replay
from offbeat.experience.sampler import Limits
from offbeat.objective.spec import Need
from offbeat.rollout.engine import Engine
from offbeat.rollout.worker import Pace
from offbeat.run import admission
from offbeat.run.directory import RunError
from offbeat.run.parts import Plan
from offbeat.seeds import derive
from offbeat.tasks.registry import make
from offbeat.tasks.task import Task
from offbeat.trainer.forward import TokenScorer
from offbeat.trainer.fsdp import shard
from offbeat.trainer.optimizer import Decay, MasterAdamW, OptimizerSettings, Schedule
from offbeat.trainer.ranks import Ranks
from offbeat.trainer.trainer import StepSettings, Trainer
from offbeat.weights.cadence import Cadence, Drift, Fixed

disable_progress_bar()  # a bar of transformers' would cut through the live view


def load_tokenizer(config: Config) -> PreTrainedTokenizerBase:
    """Of the model."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.path, local_files_only=True, trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        raise RunError(f"the tokenizer of {config.model.path} names no end-of-text token: completions would never stop")
    return tokenizer


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[..., str]:
    """A completion's text as scorers see it."""
    return lambda token_ids: str(tokenizer.decode(token_ids, skip_special_tokens=True))


def make_task(config: Config) -> Task:
    """By name, or from a file of the user's."""
    if config.task.name.endswith(".py"):
        return make("custom", {**config.task.options, "path": config.task.name})
    return make(config.task.name, config.task.options)


def make_trainer(config: Config, ranks: Ranks) -> Trainer:
    """A model, its optimiser, and what a step is; spread over ranks where there are several."""
    random.seed(config.seed)
    torch.manual_seed(derive(config.seed, "torch") % 2**63)
    objective = config.objective.resolve()
    scorer = _scorer(config, ranks)
    reference = _scorer(config, ranks).requires_grad_(False) if Need.REFERENCE in objective.needs else None
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
    return Trainer(scorer, MasterAdamW(scorer, settings), step, reference, ranks=ranks)


def _scorer(config: Config, ranks: Ranks) -> TokenScorer:
    path = Path(config.model.path)
    if not path.is_dir():
        raise RunError(f"model.path = {config.model.path!r} is not a directory with a model")
    model = AutoModelForCausalLM.from_pretrained(
        str(path),
        dtype=config.model.compute if ranks.size == 1 else "float32",  # slices are the master weights
        local_files_only=True,
        trust_remote_code=False,
    )
    scorer = TokenScorer(
        model.to(torch.accelerator.current_accelerator() or torch.device("cpu")),
        temperature=config.sampling.temperature,
        checkpoint_activations=config.trainer.checkpoint_activations,
    )
    if ranks.size > 1:
        shard(scorer, compute=getattr(torch, config.model.compute))
    return scorer


def start_engine(config: Config) -> Awaitable[Engine]:
    """An engine that serves the model the run begins with."""
    return _hf(config) if config.engine.kind == "hf" else _vllm(config)


async def _hf(config: Config) -> Engine:
    from offbeat.rollout.hf import HfEngine

    return HfEngine.start(Path(config.model.path), dtype=config.model.serve)


async def _vllm(config: Config) -> Engine:
    from offbeat.rollout.vllm import VllmEngine

    engine = config.engine
    return await VllmEngine.start(
        Path(config.model.path),
        dtype=config.model.serve,
        max_model_len=engine.max_prompt_tokens + config.sampling.max_tokens,
        max_num_seqs=config.workers.groups_at_once * config.group_size,
        on_update=engine.on_update,
        threads=engine.threads,
        kv_cache_gib=engine.kv_cache_gib,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        answer_within=config.run.silence,
    )


def pace(config: Config) -> Pace:
    """One call for all groups where the engine wants batches, a call each where it makes them itself."""
    seconds, at_once = config.workers.lease_seconds, config.workers.groups_at_once
    if config.engine.kind == "vllm":
        return Pace(lanes=at_once, call_seconds=seconds)
    return Pace(groups_per_call=at_once, call_seconds=seconds)


def sampler_mode(config: Config) -> Mode:
    """Which groups a step takes."""
    settings = config.sampler
    if settings.mode == "fresh":
        return Fresh()
    if settings.mode == "replay":
        return Replay(settings.share, settings.reuse_budget, settings.cooldown)
    return Offline(settings.epochs, settings.cooldown)


def sampler_limits(config: Config) -> Limits:
    """Lag, and whether groups without contrast are asked for again."""
    offline = config.run.mode == "offline"
    masked = config.objective.resolve().zero_variance_mask
    return Limits(
        config.prompts_per_step,
        max_lag=None if offline else config.largest_lag,
        drop_zero_variance=masked and not offline,
    )


def admission_rule(config: Config) -> admission.Admission:
    """What may be begun."""
    if config.run.mode == "lockstep":
        return admission.Lockstep()
    if config.run.mode == "offline":
        return admission.Offline()
    return admission.Concurrent(config.largest_lag, max(1, config.fresh))


def cadence(config: Config) -> Cadence:
    """When to publish."""
    sync = config.sync
    return Fixed(sync.every) if sync.drift_budget is None else Drift(sync.drift_budget, sync.at_least, sync.every)


def plan(config: Config) -> Plan:
    """The loop's numbers."""
    return Plan(
        steps=config.steps,
        batch=config.prompts_per_step,
        fresh=config.fresh,
        refill=config.sampler.refill,
        save_every=config.trainer.save_every,
        evaluate_every=config.evaluation.every,
        patience=config.run.patience,
    )
