"""Versions of an adapter run without a trainer: a base in transformers, and an adapter that moves at random."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from offbeat.rollout.weight_checks import adapter_shapes
from offbeat.weights.adapter import PREFIX, A, AdapterSpec, B, layer_of, load_base_digest, merged
from offbeat.weights.probe import Probe, Sequences

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
State = dict[str, Tensor]


@dataclass
class AdaptedModel:
    """A base and the newest version of its adapter."""

    model: PreTrainedModel
    spec: AdapterSpec
    base: State
    adapter: State

    @classmethod
    def open(cls, directory: Path, *, rank: int = 8, alpha: float = 16.0, dtype: str = "float32") -> "AdaptedModel":
        """Read a base. Version 0 of its adapter has B = 0, and A as peft draws it."""
        model = AutoModelForCausalLM.from_pretrained(str(directory), dtype=dtype, local_files_only=True)
        model.eval().requires_grad_(False)
        spec = AdapterSpec(rank, alpha, LINEAR, load_base_digest(directory))
        base = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        shapes = adapter_shapes({name: list(tensor.shape) for name, tensor in base.items()}, spec)
        generator = torch.Generator().manual_seed(0)
        adapter = {}
        for name, shape in shapes.items():
            spread = shape[1] ** -0.5 if name.endswith(A) else 0.0
            adapter[name] = (spread * (2 * torch.rand(shape, generator=generator) - 1)).to(model.dtype)
        return cls(model, spec, base, adapter)

    def move(self, seed: int, size: float) -> State:
        """Make the next version: move every value of A and B by `size` in a random direction, as Adam would."""
        generator = torch.Generator().manual_seed(seed)
        for name, tensor in self.adapter.items():
            signs = torch.randint(0, 2, tensor.shape, generator=generator) * 2 - 1
            self.adapter[name] = (tensor.float() + size * signs).to(tensor.dtype)
        return dict(self.adapter)

    def merged_logprobs(self, adapter: Mapping[str, Tensor], ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the log-probs of the tokens after the first, computed with merged weights."""
        self.model.load_state_dict(dict(merged(self.base.items(), adapter, self.spec)))
        return _logprobs(self.model, ids)

    def probe(self, sequences: Sequences) -> Probe:
        """Return the probe of the newest version, computed as a trainer does: the adapter beside the base."""
        self.model.load_state_dict(self.base)
        with beside(self.model, self.adapter, self.spec):
            return Probe(sequences, [_logprobs(self.model, one) for one in sequences])


@contextmanager
def beside(model: nn.Module, adapter: Mapping[str, Tensor], spec: AdapterSpec) -> Iterator[None]:
    """Add scale · B A x to the outputs of the layers that the adapter changes."""
    hooks = []
    for layer in {layer_of(name) for name in adapter}:
        a, b = adapter[f"{PREFIX}{layer}{A}"], adapter[f"{PREFIX}{layer}{B}"]

        def add(_: nn.Module, inputs: tuple[Tensor], output: Tensor, a: Tensor = a, b: Tensor = b) -> Tensor:
            return output + spec.scale * (inputs[0] @ a.T @ b.T)

        hooks.append(model.get_submodule(layer).register_forward_hook(add))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _logprobs(model: PreTrainedModel, ids: Sequence[int]) -> NDArray[np.float32]:
    with torch.inference_mode():
        logits_TV = model(torch.tensor([list(ids)])).logits[0, :-1].float()
    values: NDArray[np.float32] = logits_TV.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()
    return values
