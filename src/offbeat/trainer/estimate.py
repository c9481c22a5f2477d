"""Memory and time of a step, told before the first one.

    estimate = estimate_memory(trainer, shape := StepShape(prompt=512, completion=1024, group=8))
    print(estimate)                                      # terms, the largest first, with the setting that changes each
    worst = check_worst_case(trainer, shape, estimate)   # the largest micro-batch there can be, forward and backward

What the backward pass keeps is not guessed from an architecture: short rows are run through the model at hand and what
stays alive is counted. A batch that would not fit fails in the first minute, with a message that says why.
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
from offbeat.trainer.checkpoint_files import pieces
from offbeat.trainer.forward import PolicyModel, to_model_inputs
from offbeat.trainer.fsdp import blocks_of
from offbeat.trainer.packing import MicroBatch, lay_out, plan
from offbeat.trainer.trainer import Trainer
from offbeat.types import UNKNOWN, Completion, Group, Prompt


class LiveBytes(TorchDispatchMode):
    """Counts every storage that an operation makes, for as long as it lives.

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
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if _plain(t)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if _plain(tensor) and tensor.untyped_storage()._cdata not in given:
                self._watch(tensor.untyped_storage())
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._watched:
            return

        def gone(_: object) -> None:
            self.now -= size
            del self._watched[key]

        self._watched[key] = weakref.ref(storage, gone)
        self.now += size
        self.peak = max(self.peak, self.now)


def _plain(value: object) -> bool:
    return type(value) in (Tensor, torch.nn.Parameter)


ADVICE: Final = {
    "activations": "lower token_budget, or turn checkpoint_activations on",
    "backward of a layer": "lower token_budget, or compute in bfloat16",
    "logits of a chunk": "lower chunk_tokens",
    "AdamW": "train on more ranks",
    "master weights": "train on more ranks",
    "parameters": "train on more ranks",
    "gathered layers": "compute in bfloat16",
    "gradients": "train on more ranks",
    "reference policy": "kl_coefficient = 0 needs none",
}
"""The setting that makes each term smaller."""


@dataclass(frozen=True)
class StepShape:
    """The longest prompt and completion, and the size of a group."""

    prompt: int
    completion: int
    group: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of one rank at the peak of a step, by what they are for.

    >>> print(MemoryEstimate({"AdamW": 8 << 30, "activations": 20 << 30}))
    28.0 GiB at the peak of a step
      20.0 GiB  activations: lower token_budget, or turn checkpoint_activations on
       8.0 GiB  AdamW: train on more ranks
    """

    terms: Mapping[str, int]

    @property
    def total(self) -> int:
        """All terms at once."""
        return sum(self.terms.values())

    def lines(self, most: int | None = None) -> list[str]:
        """The largest terms, each with what makes it smaller."""
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
    """Bytes: of the device's memory at most so far, or of this process where the device is the CPU."""

    def step_seconds(self, tokens: int, updates: int, ranks: int = 1) -> float:
        """What a step over so many tokens will take at this rate."""
        return self.seconds * updates * math.ceil(tokens / self.tokens / ranks)


def estimate_memory(trainer: Trainer, shape: StepShape) -> MemoryEstimate:
    """The terms for one rank. Short rows are computed; every rank must call it."""
    policy_model = trainer.policy_model
    held = _bytes_by_kind(trainer)
    micro = worst_micro_batch(trainer, shape)
    rows, length = micro.token_ids_RL.shape
    kept, beside = _of_rows(trainer, shape, rows, length)
    terms = held | {
        "gradients": sum(4 * _local(p).numel() for p in policy_model.parameters() if p.requires_grad),
        "activations": int(kept),
        "backward of a layer": int(beside),
        "logits of a chunk": 3 * 4 * min(policy_model.chunk_tokens, len(micro.targets)) * policy_model.vocabulary,
    }
    if isinstance(next(policy_model.parameters()), DTensor):
        terms["gathered layers"] = _gathered(policy_model) * policy_model.compute_dtype.itemsize
    return MemoryEstimate({name: size for name, size in terms.items() if size})


def check_worst_case(trainer: Trainer, shape: StepShape, estimate: MemoryEstimate) -> WorstCase:
    """Forward and backward of the largest micro-batch, without an update; raises `StepOutOfMemory` if too large."""
    policy_model = trainer.policy_model
    micro = worst_micro_batch(trainer, shape)
    with explained(estimate):
        begun = time.perf_counter()
        layout = to_model_inputs(micro, shared_prefix=trainer.check.shared_prefix, device=policy_model.device)
        if trainer.reference is not None:
            with torch.no_grad():
                trainer.reference(layout)
        policy_model(layout).logprobs.sum().backward()
        if policy_model.device.type != "cpu":
            torch.accelerator.synchronize()
        seconds = time.perf_counter() - begun
    trainer.optimizer.discard()
    return WorstCase(micro.token_ids_RL.size, seconds, _peak(policy_model.device))


@contextmanager
def explained(estimate: MemoryEstimate) -> Iterator[None]:
    """Turn an out-of-memory error into one that names the largest terms and what to change.

    >>> with explained(MemoryEstimate({"activations": 40 << 30, "AdamW": 1 << 30})):
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
        if type(error) is RuntimeError and "allocate memory" not in str(error):  # torch has no other name for it on CPU
            raise
        what = str(error).splitlines()[0] if str(error) else "no more memory"
        largest = "\n".join(estimate.lines(3))
        raise StepOutOfMemory(f"a step does not fit into memory ({what}). Largest terms:\n{largest}") from error


def worst_micro_batch(trainer: Trainer, shape: StepShape) -> MicroBatch:
    """As many of the longest rows as the token budget admits."""
    budget, shared = trainer.settings.token_budget, trainer.check.shared_prefix
    if shape.prompt + shape.completion > budget:
        raise ValueError(
            f"token_budget = {budget}: a prompt of {shape.prompt} with a completion of {shape.completion} tokens would "
            f"be refused; set at least {shape.prompt + shape.completion}"
        )
    fitting = min(shape.group, (budget - shape.prompt) // shape.completion) if shared else 1
    rows = max(1, budget // (shape.prompt + fitting * shape.completion))
    groups = [_made_up(shape, fitting, trainer.policy_model.vocabulary) for _ in range(rows)]
    return lay_out(plan(groups, budget, shared_prefix=shared)[0], groups)


def _made_up(shape: StepShape, completions: int, vocabulary: int) -> Group:
    tokens = np.arange(shape.prompt + shape.completion) * 7919 % vocabulary
    answers = (Completion(f"made-up/{i}", tokens[shape.prompt :], UNKNOWN) for i in range(completions))
    return Group("made-up", Prompt("made-up", tokens[: shape.prompt], "made-up"), tuple(answers))


def _of_rows(trainer: Trainer, shape: StepShape, rows: int, length: int) -> tuple[float, float]:
    """Bytes that rows of so many tokens keep for their backward pass, and that the backward pass needs beside them.

    The first is c + a·n + b·n² through three shorter rows of n tokens. The second is the largest of several moments, of
    which the head's does not grow and a layer's does: a line through the longer two. A chunk of logits is as large as
    the shortest row allows meanwhile, and so a constant: it has a term of its own.
    """
    policy_model, chunk_tokens, shared = (
        trainer.policy_model,
        trainer.policy_model.chunk_tokens,
        trainer.check.shared_prefix,
    )
    shorter = [
        StepShape(max(1, shape.prompt // by), max(1, shape.completion // by), shape.group) for by in (8, 8, 6, 4)
    ]
    members = shape.group if shared else 1
    policy_model.chunk_tokens = min(chunk_tokens, shorter[0].completion * members)
    try:
        measured = []
        for short in shorter:  # the first makes the gradients, and does not count
            group = _made_up(short, members, policy_model.vocabulary)
            micro = lay_out(plan([group], 1 << 62, shared_prefix=shared)[0], [group])
            measured.append((micro.token_ids_RL.size, *_kept_and_peak(trainer, micro)))
    finally:
        policy_model.chunk_tokens = chunk_tokens
        trainer.optimizer.discard()
    sizes, kept, peaks = np.array(measured[1:], np.float64).T
    beside = (peaks - kept)[-2:]
    slope = (beside[1] - beside[0]) / max(1.0, sizes[-1] - sizes[-2])
    return _extrapolated(sizes, kept, rows, length), float(beside[1] + slope * (rows * length - sizes[-1]))


def _kept_and_peak(trainer: Trainer, micro: MicroBatch) -> tuple[int, int]:
    policy_model = trainer.policy_model
    layout = to_model_inputs(micro, shared_prefix=trainer.check.shared_prefix, device=policy_model.device)
    with LiveBytes() as live:
        stats = policy_model(layout)
        kept = live.now
        stats.logprobs.sum().backward()
    return kept, live.peak


def _extrapolated(sizes: NDArray[np.float64], values: NDArray[np.float64], rows: int, length: int) -> float:
    """c once, the rest for every row: a parabola where it is one, a line where rounding would bend it downwards."""
    degree = min(2, len(set(sizes)) - 1)
    fit = np.polyfit(sizes, values, degree)
    if degree == 2 and fit[0] < 0:
        fit = np.polyfit(sizes, values, 1)
    return float(fit[-1] + rows * np.polyval([*fit[:-1], 0.0], length))


def _bytes_by_kind(trainer: Trainer) -> dict[str, int]:
    """What is held all the time, on this rank."""
    kinds = {"policy": "master weights", "reference": "reference policy"}
    found: dict[str, int] = {}
    for name, tensor in pieces(trainer).items():
        kind = kinds.get(name.split("/")[0], "AdamW")
        found[kind] = found.get(kind, 0) + _local(tensor).nbytes
    parameters = sum(_local(p).nbytes for p in trainer.policy_model.parameters() if p.dtype.itemsize < 4)
    return found | ({"parameters": parameters} if parameters else {})


def _gathered(policy_model: PolicyModel) -> int:
    """Elements that are whole at one time where parameters are sharded: the root, a block, and the next one."""
    inside = [sum(p.numel() for p in block.parameters()) for block in blocks_of(policy_model)]
    return sum(p.numel() for p in policy_model.parameters()) - sum(inside) + 2 * max(inside, default=0)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _peak(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
