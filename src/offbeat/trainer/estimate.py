"""Memory and time of a training step, estimated before the first one.

    shape = StepShape(prompt=512, completion=1024, group=8)
    estimate = estimate_memory(trainer, shape)
    print(estimate)                                      # terms, the largest first, and the setting that lowers each
    worst = check_worst_case(trainer, shape, estimate)   # forward and backward of the largest possible micro-batch

The memory that the backward pass needs is measured, not guessed from the architecture: short rows run through the
model, and the allocator of the GPU, or `LiveBytes` on CPU, counts what stays alive. A batch that does not fit fails in
the first minute, with the reason.
"""

import math
import resource
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offbeat.errors import StepOutOfMemory
from offbeat.objective.spec import Need
from offbeat.trainer.batch import BLOCK, MicroBatch, build_micro_batch, plan_micro_batches
from offbeat.trainer.checkpoint_files import trainer_tensors
from offbeat.trainer.forward import UNLIMITED, ModelInputs, PolicyModel, synthetic_group, to_model_inputs
from offbeat.trainer.fsdp import transformer_blocks
from offbeat.trainer.trainer import Trainer
from offbeat.types import Group

ADVICE: Final = {
    "activations": "lower token_budget, or turn checkpoint_activations on",
    "backward of a layer": "lower token_budget, or compute in bfloat16",
    "logits of a chunk": "lower trainer.chunk_tokens",
    "AdamW": "train on more ranks",
    "master weights": "train on more ranks",
    "parameters": "train on more ranks",
    "frozen weights": "train on more ranks",
    "gathered layers": "compute in bfloat16",
    "gradients": "train on more ranks",
    "reference policy": "kl_coefficient = 0 needs none",
}
"""How to lower each term."""


@dataclass(frozen=True)
class StepShape:
    """The longest prompt and completion in tokens, and the completions of a group."""

    prompt: int
    completion: int
    group: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes on one rank at the peak of a step, by purpose.

    >>> print(MemoryEstimate({"AdamW": 8 << 30, "activations": 20 << 30}))
    28.0 GiB at the peak of a step
      20.0 GiB  activations: lower token_budget, or turn checkpoint_activations on
       8.0 GiB  AdamW: train on more ranks
    """

    terms: Mapping[str, int]

    @property
    def total(self) -> int:
        return sum(self.terms.values())

    def lines(self, most: int | None = None) -> list[str]:
        """Return one line for each of the `most` largest terms, with the advice that lowers it."""
        ordered = sorted(self.terms.items(), key=lambda term: -term[1])[:most]
        return [f"  {size / 2**30:4.1f} GiB  {name}: {ADVICE[name]}" for name, size in ordered]

    def __str__(self) -> str:
        return "\n".join([f"{self.total / 2**30:.1f} GiB at the peak of a step", *self.lines()])


@dataclass(frozen=True)
class WorstCase:
    """What the largest micro-batch took."""

    tokens: int
    seconds: float
    peak: int
    """Bytes: the peak so far of the GPU's memory, or of this process on CPU."""


def estimate_memory(trainer: Trainer, shape: StepShape) -> MemoryEstimate:
    """Estimate the terms on one rank. It runs short rows through the model, so every rank must call it."""
    policy_model = trainer.policy_model
    micro = worst_micro_batch(trainer, shape)
    rows, length = micro.token_ids_RL.shape
    kept, temporary = _backward_bytes(trainer, shape, rows, length)
    terms = _persistent_bytes(trainer) | {
        "gradients": sum(4 * _local(p).numel() for p in policy_model.parameters() if p.requires_grad),
        "activations": int(kept),
        "backward of a layer": int(temporary),
        "logits of a chunk": 0 if policy_model.keeps_logits else _chunk_bytes(policy_model, len(micro.targets)),
    }
    if isinstance(next(policy_model.parameters()), DTensor):
        terms["gathered layers"] = _gathered_elements(policy_model) * policy_model.compute_dtype.itemsize
    return MemoryEstimate({name: size for name, size in terms.items() if size})


def check_worst_case(trainer: Trainer, shape: StepShape, estimate: MemoryEstimate) -> WorstCase:
    """Run forward and backward of the largest micro-batch, without an update. Raises `StepOutOfMemory`.

    A tiny micro-batch goes before it: in a step of several, all but the first have gradients in memory already.
    """
    policy_model = trainer.policy_model
    tiny = _first_micro_batch(trainer, [synthetic_group(policy_model.vocab_size, 1, 1, 1)], UNLIMITED)
    micro = worst_micro_batch(trainer, shape)
    with explain_memory_errors(estimate):
        policy_model(_inputs(trainer, tiny)).logprobs.sum().backward()
        started = time.perf_counter()
        inputs = _inputs(trainer, micro)
        if Need.REFERENCE in trainer.settings.objective.needs:
            trainer.reference_logprobs(inputs)
        if trainer.settings.objective.needs_first_look:
            with torch.no_grad():
                policy_model(inputs)
        policy_model(inputs).logprobs.sum().backward()
        if policy_model.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - started
    trainer.optimizer.discard()
    return WorstCase(micro.token_ids_RL.size, seconds, _peak_bytes(policy_model.device))


@contextmanager
def explain_memory_errors(estimate: MemoryEstimate) -> Iterator[None]:
    """Turn an out-of-memory error into one that names the largest terms and what to change.

    >>> with explain_memory_errors(MemoryEstimate({"activations": 40 << 30, "AdamW": 1 << 30})):
    ...     raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")
    Traceback (most recent call last):
    ...
    offbeat.errors.StepOutOfMemory: a step does not fit into memory (tried to allocate 2.00 GiB). Largest terms:
      40.0 GiB  activations: lower token_budget, or turn checkpoint_activations on
       1.0 GiB  AdamW: train on more ranks
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if type(error) is RuntimeError and "allocate memory" not in str(error):  # on CPU torch has no type for it
            raise
        cause = str(error).splitlines()[0] if str(error) else "no more memory"
        largest = "\n".join(estimate.lines(3))
        raise StepOutOfMemory(f"a step does not fit into memory ({cause}). Largest terms:\n{largest}") from error


def worst_micro_batch(trainer: Trainer, shape: StepShape) -> MicroBatch:
    """Return a micro-batch with as many of the longest rows as the token budget allows."""
    budget, shared = trainer.settings.token_budget, trainer.check.shared_prefix
    if shape.prompt + shape.completion > budget:
        raise ValueError(
            f"token_budget = {budget}: a prompt of {shape.prompt} with a completion of {shape.completion} tokens would "
            f"be refused; set at least {shape.prompt + shape.completion}"
        )
    per_row = min(shape.group, (budget - shape.prompt) // shape.completion) if shared else 1
    rows = max(1, budget // (shape.prompt + per_row * shape.completion))
    vocab_size = trainer.policy_model.vocab_size
    groups = [synthetic_group(vocab_size, shape.prompt, shape.completion, per_row)] * rows
    return _first_micro_batch(trainer, groups, budget)


def _first_micro_batch(trainer: Trainer, groups: Sequence[Group], budget: int) -> MicroBatch:
    check = trainer.check
    plan, *_ = plan_micro_batches(groups, budget, shared_prefix=check.shared_prefix, packed=check.packed)
    return build_micro_batch(plan, groups)


def _inputs(trainer: Trainer, micro: MicroBatch) -> ModelInputs:
    return to_model_inputs(micro, shared_prefix=trainer.check.shared_prefix, device=trainer.policy_model.device)


def _backward_bytes(trainer: Trainer, shape: StepShape, rows: int, length: int) -> tuple[float, float]:
    """Estimate the bytes that `rows` rows keep for the backward pass, and the bytes it needs on top of them.

    The first is c + a·n + b·n², fitted to three shorter rows of n tokens. The second is the largest of several peaks:
    that of the output head does not grow with n, that of a layer does, so a line through the two longer rows gives it.
    It never falls: while short rows keep less than the head's gradient takes, what they need on top shrinks with n.
    During the measurement a chunk of logits is no larger than the shortest row, hence constant; it has its own term.
    """
    policy_model, shared = trainer.policy_model, trainer.check.shared_prefix
    chunk_tokens = policy_model.chunk_tokens
    cuts = ((1, 8), (1, 8), (2, 6), (3, 4))
    shorter = [(max(least, shape.prompt // by), max(least, shape.completion // by)) for least, by in cuts]
    size = shape.group if shared else 1
    policy_model.chunk_tokens = min(chunk_tokens, shorter[0][1] * size)
    # A packed row is padded to whole blocks: short groups are repeated, so that the three rows differ in length.
    at_least = [BLOCK * blocks if trainer.check.packed else 1 for blocks in (2, 2, 4, 6)]
    try:
        measured = []
        for (prompt, completion), tokens in zip(shorter, at_least, strict=True):  # the first allocates the gradients
            group = synthetic_group(policy_model.vocab_size, prompt, completion, size)
            groups = [group] * math.ceil(tokens / (prompt + size * completion))
            micro = _first_micro_batch(trainer, groups, UNLIMITED)
            measured.append((micro.token_ids_RL.size, *_kept_and_peak_bytes(trainer, micro)))
    finally:
        policy_model.chunk_tokens = chunk_tokens
        trainer.optimizer.discard()
    sizes, kept, peaks = np.array(measured[1:], np.float64).T
    temporary = (peaks - kept)[-2:]
    slope = max(0.0, temporary[1] - temporary[0]) / max(1.0, sizes[-1] - sizes[-2])
    return _extrapolate(sizes, kept, rows, length), float(temporary[1] + slope * (rows * length - sizes[-1]))


def _kept_and_peak_bytes(trainer: Trainer, micro: MicroBatch) -> tuple[int, int]:
    policy_model, inputs = trainer.policy_model, _inputs(trainer, micro)
    with LiveBytes() if policy_model.device.type == "cpu" else AllocatedBytes(policy_model.device) as live:
        stats = policy_model(inputs)
        kept = live.now
        stats.logprobs.sum().backward()
        return kept, live.peak


def _extrapolate(sizes: NDArray[np.float64], values: NDArray[np.float64], rows: int, length: int) -> float:
    """Count c once and the other terms for every row. Fit a line if rounding would bend the parabola downwards."""
    degree = min(2, len(set(sizes)) - 1)
    fit = np.polyfit(sizes, values, degree)
    if degree == 2 and fit[0] < 0:
        fit = np.polyfit(sizes, values, 1)
    return float(fit[-1] + rows * np.polyval([*fit[:-1], 0.0], length))


def _persistent_bytes(trainer: Trainer) -> dict[str, int]:
    """Return what this rank holds throughout training."""
    terms = {"policy": "master weights", "reference": "reference policy"}
    found: dict[str, int] = {}
    for name, tensor in trainer_tensors(trainer).items():
        term = terms.get(name.split("/")[0], "AdamW")
        found[term] = found.get(term, 0) + _local(tensor).nbytes
    parameters = [*trainer.policy_model.parameters()]
    rounded = sum(_local(p).nbytes for p in trainer.optimizer.rounded)
    frozen = sum(_local(p).nbytes for p in parameters if not p.requires_grad)
    return found | {name: size for name, size in (("parameters", rounded), ("frozen weights", frozen)) if size}


def _chunk_bytes(policy_model: PolicyModel, tokens: int) -> int:
    """Return the bytes of a chunk's logits and, on a GPU, of what is computed from all of them at once in float32."""
    each = policy_model.compute_dtype.itemsize if policy_model.device.type == "cpu" else 3 * 4
    return each * min(policy_model.chunk_tokens, tokens) * policy_model.vocab_size


def _gathered_elements(policy_model: PolicyModel) -> int:
    """Return the elements of sharded parameters that are whole at one time: the root, a block, and the next block."""
    inside = [sum(p.numel() for p in block.parameters()) for block in transformer_blocks(policy_model)]
    return sum(p.numel() for p in policy_model.parameters()) - sum(inside) + 2 * max(inside, default=0)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class AllocatedBytes:
    """What the allocator of a GPU hands out. A dispatch mode would keep torch from compiling flex_attention."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def __enter__(self) -> "AllocatedBytes":
        torch.accelerator.reset_peak_memory_stats(self._device)
        self._before = torch.accelerator.memory_allocated(self._device)
        return self

    def __exit__(self, *_: object) -> None: ...

    @property
    def now(self) -> int:
        return torch.accelerator.memory_allocated(self._device) - self._before

    @property
    def peak(self) -> int:
        return torch.accelerator.max_memory_allocated(self._device) - self._before


class LiveBytes(TorchDispatchMode):
    """Count the bytes of every storage that operations allocate, for as long as it lives.

    >>> with LiveBytes() as live:
    ...     a = torch.zeros(1000)
    ...     b = a + 1
    ...     del a
    >>> live.now, live.peak
    (4000, 8000)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _is_plain_tensor(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if _is_plain_tensor(tensor) and tensor.untyped_storage()._cdata not in given:
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._watched:
            return

        def freed(_: object) -> None:
            self.now -= size
            del self._watched[key]

        self._watched[key] = weakref.ref(storage, freed)
        self.now += size
        self.peak = max(self.peak, self.now)


def _is_plain_tensor(value: object) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter)
