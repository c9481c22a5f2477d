"""Check that an engine serves the published version: its tensors before a load, its log-probs after it.

    prober = await Prober.calibrated(engine, subscription.probe(0))     # the engine still has version 0
    verdict = await prober.check(engine, subscription.probe(12))

Before: all tensors are there, none else, of the right shape. Engines themselves would keep what a version lacks: with
full weights the previous version's values, with adapters the base's. Both serve a mixture without a word.

After: a check asks two questions. Is the gap to the trainer's log-probs at most a few times the gap at version 0? Did
the engine's log-probs move as the trainer's did? The second question needs a move larger than rounding. In float32
every step is, and a stale engine shows long before its gap grows. In 16 bits one step may be too small; then the move
adds up over versions until it can be judged. In 16 bits the log-probs of a few unlikely tokens also jump by whole nats
although hardly a weight has changed, in trainer and engine alike. So both sizes and ratios of moves are medians. The
tolerance is measured on the engine itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from offbeat.errors import AdapterMismatch, ProbeError, ProbeFailed
from offbeat.rollout.engine import Engine, Weights
from offbeat.weights.adapter import PREFIX, A, AdapterSpec, B
from offbeat.weights.probe import Probe

HEAD: Final = "lm_head.weight"


def saved_shapes(model_dir: Path) -> dict[str, list[int]]:
    """Return names and shapes of a model directory's safetensors files. Every version must provide all of them."""
    shapes: dict[str, list[int]] = {}
    for path in sorted(model_dir.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a dict
    if not shapes:
        raise FileNotFoundError(f"{model_dir} has no *.safetensors file; save the model with save_pretrained")
    return shapes


def check_weights(weights: Weights, shapes: Mapping[str, list[int]], *, tied: bool) -> Weights:
    """Yield the weights without a tied head. Raises `ValueError` if they are not exactly those of the model.

    >>> import torch
    >>> dict(check_weights([("a", torch.zeros(2)), ("lm_head.weight", torch.zeros(2))], {"a": [2]}, tied=True)).keys()
    dict_keys(['a'])
    """
    needed = {name for name in shapes if not (tied and name == HEAD)}
    for name, tensor in weights:
        if tied and name == HEAD:
            continue
        if name not in shapes:
            raise ValueError(f"the model has no weights called {name}")
        if list(tensor.shape) != list(shapes[name]):
            raise ValueError(f"{name} has shape {list(shapes[name])}, but {list(tensor.shape)} was given")
        needed.discard(name)
        yield name, tensor
    if needed:
        raise ValueError(f"weights are missing: {', '.join(sorted(needed)[:3])}")


def adapter_shapes(shapes: Mapping[str, list[int]], spec: AdapterSpec) -> dict[str, list[int]]:
    """Return names and shapes of the tensors of an adapter, given those of its base.

    >>> spec = AdapterSpec(2, 4.0, ("q_proj",), "")
    >>> adapter_shapes({"model.layers.0.self_attn.q_proj.weight": [8, 6]}, spec).values()
    dict_values([[2, 6], [8, 2]])
    """
    found: dict[str, list[int]] = {}
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if name != layer and layer.rpartition(".")[2] in spec.targets:
            found |= {f"{PREFIX}{layer}{A}": [spec.rank, shape[1]], f"{PREFIX}{layer}{B}": [shape[0], spec.rank]}
    layers = {name.removesuffix(A).rpartition(".")[2] for name in found}
    if unknown := [target for target in spec.targets if target not in layers]:
        raise AdapterMismatch(
            f"the model has no linear layer called {unknown[0]}, which the adapter changes: take another name out of "
            f"adapter.targets, or give the model that the run started from"
        )
    return found


def check_adapter(weights: Weights, shapes: Mapping[str, list[int]]) -> Weights:
    """Yield the tensors of an adapter. Raises `ValueError` if they are not exactly those of `adapter_shapes`, finite.

    >>> import torch
    >>> list(check_adapter([("x", torch.tensor([1.0, torch.nan]))], {"x": [2]}))
    Traceback (most recent call last):
    ValueError: x has values that are not finite: the policy is broken. Do not publish it
    """
    for name, tensor in check_weights(weights, shapes, tied=False):
        if not tensor.isfinite().all():
            raise ValueError(f"{name} has values that are not finite: the policy is broken. Do not publish it")
        yield name, tensor


FLOOR: Final = 1e-4
"""The smallest tolerance: a smaller gap is rounding."""
SLACK: Final = 3.0
"""The tolerance as a multiple of the gap at version 0."""
LARGEST_GAP: Final = 0.25
"""A larger mean gap at version 0 means another model, not other rounding."""
SMALLEST_MOVE: Final = 5.0
"""The smallest move that can be judged, as a multiple of rounding."""
MOVE_TOLERANCE: Final = 0.3
"""How far `followed` may be from 1, beyond rounding. This detects an engine that updated only half of the model."""


@dataclass(frozen=True)
class ProbeVerdict:
    """The result of a check.

    >>> ProbeVerdict(gap=3e-6, tolerance=1e-4, followed=0.999).passed
    True
    >>> print(ProbeVerdict(gap=0.04, tolerance=0.12, followed=0.0, doubt=0.1))
    followed 0.00 of the trainer's move; between 0.60 and 1.40 is required
    """

    gap: float
    """The engine gap: mean absolute difference to the trainer's log-probs at the same version."""
    tolerance: float
    followed: float | None = None
    """The engine's move as a fraction of the trainer's, since the last move that was judged. None if the move is too
    small to judge."""
    doubt: float = 0.0
    """How much rounding may have changed `followed`."""

    @property
    def near(self) -> bool:
        """True if the gap is within tolerance. A NaN gap is not."""
        return self.gap <= self.tolerance

    @property
    def moved(self) -> bool:
        """True if the engine followed the trainer's move, or the move is too small to judge."""
        return self.followed is None or abs(self.followed - 1) <= MOVE_TOLERANCE + self.doubt

    @property
    def passed(self) -> bool:
        return self.near and self.moved

    def __str__(self) -> str:
        if not self.near:
            return f"mean |Δlogp| to the trainer is {self.gap:.2g}, more than the tolerance of {self.tolerance:.2g}"
        if not self.moved:
            low, high = 1 - MOVE_TOLERANCE - self.doubt, 1 + MOVE_TOLERANCE + self.doubt
            return f"followed {self.followed:.2f} of the trainer's move; between {low:.2f} and {high:.2f} is required"
        return f"passed: mean |Δlogp| {self.gap:.2g}, tolerance {self.tolerance:.2g}"


@dataclass
class Prober:
    """Checks one engine, version after version."""

    rounding: float
    """The typical gap of a token at version 0, where engine and trainer differ only by rounding."""
    tolerance: float
    published: NDArray[np.float32]
    """The trainer's log-probs when a move was last judged."""
    measured: NDArray[np.float32]
    """The engine's log-probs at that time."""

    @classmethod
    async def calibrated(cls, engine: Engine, probe: Probe) -> "Prober":
        """Measure the tolerance of this engine. It must serve the probe's version, usually 0."""
        measured = await _measure(engine, probe)
        gaps = (measured - probe.values).astype(np.float64)
        gap = float(np.abs(gaps).mean())
        if not gap <= LARGEST_GAP:
            raise ProbeFailed(
                f"before any load, the engine's log-probs differ from the published ones by {gap:.2g} per token: its "
                "model directory is not the one this run started from, or the engine computes it wrongly"
            )
        return cls(robust_std(gaps), max(FLOOR, SLACK * gap), probe.values, measured)

    async def check(self, engine: Engine, probe: Probe) -> ProbeVerdict:
        """Check whether the engine serves the version of this probe."""
        measured = await _measure(engine, probe)
        verdict = judge(self, probe.values, measured)
        if verdict.passed and verdict.followed is not None:
            self.published, self.measured = probe.values, measured
        return verdict


def judge(before: Prober, published: NDArray[np.float32], measured: NDArray[np.float32]) -> ProbeVerdict:
    """Answer the two questions of the module docstring from log-probs alone.

    >>> start = Prober(0.001, 0.12, np.array([-1.0, -2.0], np.float32), np.array([-1.001, -1.999], np.float32))
    >>> new = np.array([-1.01, -1.98], np.float32)
    >>> judge(start, new, np.array([-1.011, -1.98], np.float32)).passed
    True
    >>> judge(start, new, start.measured).followed   # a stale engine: nothing moved, though the gap is within tolerance
    0.0
    """
    if published.shape != before.published.shape:
        raise ProbeError(f"the probe has {published.size} log-probs, the previous one had {before.published.size}")
    gap = float(np.abs(measured - published).mean())
    trainer_move = published.astype(np.float64) - before.published
    engine_move = measured.astype(np.float64) - before.measured
    size = robust_std(trainer_move)
    if size <= SMALLEST_MOVE * before.rounding:
        return ProbeVerdict(gap, before.tolerance)
    large = np.abs(trainer_move) >= np.median(np.abs(trainer_move))
    # The trainer's own rounding, at both ends of its move, makes the move look longer than it is.
    doubt = 2 * (before.rounding / size) ** 2
    return ProbeVerdict(gap, before.tolerance, float(np.median(engine_move[large] / trainer_move[large])), doubt)


def robust_std(moves: NDArray[np.float64]) -> float:
    """Return the standard deviation that normal values around 0 with the same median size would have.

    >>> round(robust_std(np.array([0.1, -0.1, 0.1, -9.0])), 3)
    0.148
    """
    return 1.4826 * float(np.median(np.abs(moves)))


async def _measure(engine: Engine, probe: Probe) -> NDArray[np.float32]:
    return np.concatenate(await engine.logprobs(probe.sequences))
