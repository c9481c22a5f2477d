"""AdamW on float32 master weights, with learning-rate schedules, gradient clipping and dithered masters.

AdamW moves a float32 master copy of each bfloat16 parameter. Gradients of all micro-batches add up in float32. After
the update, the parameter is the rounded master. A float32 parameter is its own master, also when FSDP shards the model
with mixed precision, unless it is to have the values of a narrower dtype. No other part of the trainer sees the
difference.

A new run starts each master at a random place of the interval that rounds to its weight: version 0 is the model of the
file, and an update that is smaller than the rounding still has its effect on average.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW

from offbeat.seeds import derive
from offbeat.trainer.fsdp import own_rows

HALF_STEP: Final = 1 << 15
"""Half the distance of two neighbours in bfloat16, in units of the last bit of float32."""
LARGEST_WEIGHT: Final = 1e4
"""No policy has such weights, and sums of their products overflow. Far below the largest values of 16-bit types."""
STREAM: Final = 1 << 20
"""Values that share a random stream. Each rank draws the blocks of its rows, so their number changes nothing."""


class Decay(StrEnum):
    """The shape of the learning rate after the warm-up."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


@dataclass(frozen=True)
class Schedule:
    """The learning rate as a function of the step, so a checkpoint need not hold it.

    >>> schedule = Schedule(1e-6, warmup_steps=4, decay=Decay.COSINE, total_steps=104, floor=0.1)
    >>> [round(schedule.at(step) * 1e6, 3) for step in (0, 3, 4, 54, 104, 500)]
    [0.25, 1.0, 1.0, 0.55, 0.1, 0.1]
    """

    peak: float
    warmup_steps: int = 0
    """Steps of linear increase. The first step has peak / warmup_steps, never 0."""
    decay: Decay = Decay.CONSTANT
    total_steps: int = 0
    """The step at which the decay reaches the floor. A constant rate ignores it."""
    floor: float = 0.0
    """The final rate as a fraction of the peak."""

    def __post_init__(self) -> None:
        if self.decay is not Decay.CONSTANT and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps = {self.total_steps}: a {self.decay.value} decay must end after the warm-up of "
                f"{self.warmup_steps} steps; give the number of steps of the run"
            )

    def at(self, step: int) -> float:
        """Return the rate for the next step after `step` steps."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.decay is Decay.CONSTANT:
            return self.peak
        done = min((step - self.warmup_steps) / (self.total_steps - self.warmup_steps), 1.0)
        left = 1 - done if self.decay is Decay.LINEAR else (1 + math.cos(math.pi * done)) / 2
        return self.peak * (self.floor + (1 - self.floor) * left)


@dataclass(frozen=True)
class OptimizerSettings:
    """The settings of AdamW."""

    schedule: Schedule = Schedule(1e-6)
    betas: tuple[float, float] = (0.9, 0.999)
    """beta1 = 0 drops the momentum of earlier batches, which helps when lag jumps."""
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    """Applied to matrices only. Norms and biases are scales. An embedding row would shrink with every batch that does
    not contain its token, so words that the task never uses would fade."""
    max_grad_norm: float = 1.0
    """Limit for the norm of all gradients together; math.inf does not clip."""


class MasterAdamW:
    """AdamW for one model. With `rounds_to`, float32 parameters have values of that dtype.

    >>> model = nn.Linear(2, 1, bias=False, dtype=torch.bfloat16)
    >>> optimizer = MasterAdamW(model, OptimizerSettings(Schedule(1e-2)))
    >>> before = model.weight.detach().clone()
    >>> model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    >>> round(optimizer.grad_norm(), 3), optimizer.update(step=0), bool((model.weight != before).all())
    (1.414, 0.01, True)
    """

    def __init__(self, model: nn.Module, settings: OptimizerSettings, rounds_to: torch.dtype | None = None) -> None:
        self.settings = settings
        self._rounds_to = rounds_to
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._masters = {name: _master(p, rounds_to) for name, p in self._parameters.items()}
        embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
        decayed = {n for n, p in self._parameters.items() if p.ndim >= 2 and id(p) not in embeddings}
        matrices: dict[str, Any] = {"params": [m for n, m in self._masters.items() if n in decayed]}
        others = {"params": [m for n, m in self._masters.items() if n not in decayed], "weight_decay": 0.0}
        self._adamw = AdamW(
            [matrices, others],
            lr=settings.schedule.peak,
            betas=settings.betas,
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        # Allocate the moments now. Then every checkpoint has the same tensors, and a lack of memory shows before the
        # first batch.
        for master in self._masters.values():
            moments = {"exp_avg": torch.zeros_like(master), "exp_avg_sq": torch.zeros_like(master)}
            self._adamw.state[master] = {"step": torch.zeros((), device=master.device)} | moments
        self.round_parameters()

    @property
    def updates(self) -> int:
        """The updates made so far, counted by AdamW itself; a checkpoint keeps the count."""
        return int(next(iter(self._adamw.state.values()))["step"])

    def grad_norm(self) -> float:
        """Return the norm of the gradients since the last update. If it is not finite, call `discard`."""
        norm = nn.utils.get_total_norm(self._gradients())
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def update(self, step: int, norm: float | None = None) -> float:
        """Clip, update and clear the gradients; return the learning rate. Give `norm` if you know it already."""
        norm = self.grad_norm() if norm is None else norm
        if not math.isfinite(norm):
            raise ValueError(f"the gradient's norm is {norm}: call discard() instead of update()")
        rate = self.settings.schedule.at(step)
        if norm > self.settings.max_grad_norm:
            torch._foreach_mul_(self._gradients(), self.settings.max_grad_norm / norm)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        self._adamw.step()
        self.discard()
        self.round_parameters()
        return rate

    def discard(self) -> None:
        """Clear the gradients without an update."""
        self._adamw.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Return the state by kind and parameter name. After you fill it in place, call `round_parameters`.

        >>> optimizer = MasterAdamW(nn.Linear(2, 1, bias=False), OptimizerSettings())
        >>> sorted(optimizer.tensors())
        ['exp_avg/weight', 'exp_avg_sq/weight', 'master/weight', 'step/weight']
        """
        found = {f"master/{name}": master.detach() for name, master in self._masters.items()}
        for name, master in self._masters.items():
            found |= {f"{kind}/{name}": value for kind, value in self._adamw.state[master].items()}
        return found

    @torch.no_grad()
    def overflows(self) -> dict[str, Tensor]:
        """Return for each tensor of `tensors` whether a value on this rank is NaN, or too large to compute with."""
        found = {}
        for name, tensor in self.tensors().items():
            values = own_rows(name, tensor)[1].view(-1)
            low, high = torch.aminmax(values) if len(values) else (values.sum(), values.sum())
            limit = LARGEST_WEIGHT if name.startswith("master/") else torch.finfo(values.dtype).max
            found[name] = ~((low >= -limit) & (high <= limit))
        return found

    def move(self, device: torch.device | str) -> None:
        """Move the moments, and masters that are not the parameters themselves, to another device and back.

        On the host they leave the GPU's memory to an engine between two steps.
        """
        for name, master in self._masters.items():
            state = self._adamw.state[master]
            for kind in ("exp_avg", "exp_avg_sq"):
                state[kind] = state[kind].to(device)
            if master is not self._parameters[name]:
                master.data = master.data.to(device)

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self._masters.values() if master.grad is not None]

    @torch.no_grad()
    def round_parameters(self) -> None:
        """Copy every master that is not the parameter itself into its parameter, rounded."""
        for name, parameter in self._parameters.items():
            if self._masters[name] is not parameter:
                parameter.copy_(self._masters[name].to(self._rounds_to or parameter.dtype))


def _master(parameter: nn.Parameter, rounds_to: torch.dtype | None) -> Tensor:
    """Return the tensor that AdamW updates. The gradients of all backward passes accumulate on it."""
    if rounds_to is None and parameter.dtype.itemsize >= 4:
        return parameter
    master = parameter.detach().to(torch.float32, copy=True)

    def move_gradient(source: Tensor) -> None:
        assert source.grad is not None
        if master.grad is None:
            master.grad = source.grad.float()
        else:
            master.grad += source.grad
        source.grad = None

    parameter.register_post_accumulate_grad_hook(move_gradient)
    return master


@torch.no_grad()
def dither(optimizer: MasterAdamW, seed: int) -> None:
    """Move every master that bfloat16 represents exactly to a random place of its rounding interval, in place.

    The parameters stay as they are. Masters that are zero, or lie between two values of bfloat16 already, stay too.

    >>> model = torch.nn.Linear(1, 1, bias=False, dtype=torch.bfloat16)
    >>> _ = model.weight.data.fill_(0.5)
    >>> optimizer = MasterAdamW(model, OptimizerSettings())
    >>> dither(optimizer, seed=1)
    >>> round(optimizer.tensors()["master/weight"].item(), 6), model.weight.item()
    (0.500174, 0.5)
    """
    for name, master in optimizer.tensors().items():
        kind, _, parameter = name.partition("/")
        if kind == "master":
            start, rows = own_rows(parameter, master)
            first = start * math.prod(master.shape[1:])
            _dither(rows.view(-1), first, master.numel(), derive(seed, "dither", parameter))
    optimizer.round_parameters()


def _dither(values: Tensor, first: int, size: int, seed: int) -> None:
    """Dither this rank's values: those from index `first` on, of a tensor with `size` values."""
    bits, end = values.view(torch.int32), first + len(values)
    generator = torch.Generator(values.device)
    for block in range(first // STREAM * STREAM, end, STREAM):
        generator.manual_seed(derive(seed, block))
        shape = (min(STREAM, size - block),)
        noise = torch.randint(
            1 - HALF_STEP, HALF_STEP, shape, generator=generator, device=values.device, dtype=torch.int32
        )
        low, high = max(first, block), min(end, block + STREAM)
        piece = bits[low - first : high - first]
        on_grid = ((piece & 0xFFFF) == 0) & (piece << 1 != 0)
        piece += torch.where(on_grid, noise[low - block : high - block], 0)
