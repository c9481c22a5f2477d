"""Checks of a version's tensors before an engine loads them: all there, none else, of the right shape.

Engines themselves would keep what a version lacks: with full weights the previous version's values, with adapters the
base's. Both serve a mixture without a word.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from safetensors import safe_open

from offbeat.errors import AdapterMismatch
from offbeat.rollout.engine import Weights
from offbeat.weights.adapter import PREFIX, A, AdapterSpec, B

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
