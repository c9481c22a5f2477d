"""The trainer of a run, built from its configuration: one rank of it, with the model on this rank's device."""

import random

import torch

from offbeat.config import Config
from offbeat.errors import AdapterMismatch
from offbeat.objective.spec import Need
from offbeat.placement.hardware import cpu_products
from offbeat.seeds import derive
from offbeat.trainer.forward import PolicyModel
from offbeat.trainer.fsdp import Ranks
from offbeat.trainer.loading import load_policy_model
from offbeat.trainer.optimizer import Decay, MasterAdamW, OptimizerSettings, Schedule, dither
from offbeat.trainer.trainer import StepSettings, Trainer
from offbeat.weights.adapter import AdapterSpec, load_base_digest


def make_trainer(config: Config, ranks: Ranks) -> Trainer:
    """Load the model (and the reference policy, if the objective needs one) and build the trainer of one rank."""
    random.seed(config.seed)
    torch.manual_seed(derive(config.seed, "torch") % 2**63)
    objective = config.objective.resolve()
    policy_model = _load_policy_model(config, ranks)
    second = Need.REFERENCE in objective.needs and not config.adapter.rank  # an adapter's reference is its own base
    reference = _load_policy_model(config, ranks).requires_grad_(False) if second else None
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
    adamw = MasterAdamW(policy_model, settings, _dtypes(config, ranks)[1])
    if config.model.compute == config.model.serve == "bfloat16":
        dither(adamw, config.seed)
    return Trainer(policy_model, adamw, step, reference, ranks=ranks)


def _load_policy_model(config: Config, ranks: Ranks) -> PolicyModel:
    adapter = adapter_spec(config)
    if adapter is not None:
        _require_one_base(adapter, ranks)
    compute, rounds_to = _dtypes(config, ranks)
    return load_policy_model(
        config.model.directory(),
        ranks,
        compute=compute,
        rounds_to=rounds_to,
        temperature=config.sampling.temperature,
        chunk_tokens=config.trainer.chunk_tokens,
        checkpoint_activations=config.trainer.checkpoint_activations,
        adapter=adapter,
        serve=getattr(torch, config.model.serve),
        seed=config.seed,
    )


def _dtypes(config: Config, ranks: Ranks) -> tuple[torch.dtype, torch.dtype | None]:
    """Return the dtype of products, and that of the weights' values if it is narrower.

    A CPU that only emulates bfloat16 computes in float32, with the weights that engines serve. One rank alone can do
    that: FSDP has one dtype for both.
    """
    wanted: torch.dtype = getattr(torch, config.model.compute)
    if ranks.size > 1 or torch.accelerator.is_available():
        return wanted, None
    products: torch.dtype = getattr(torch, cpu_products(config.model.compute))
    return products, None if products == wanted else wanted


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
