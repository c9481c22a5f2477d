"""The adapter of a policy model: peft's layers around frozen linear layers, without peft's wrapper around the model.

    attach(model, spec)              A and B beside every target layer, in place; all other weights are frozen
    load_adapter(model, state)       the A and B of a version; `loading.py` draws those of version 0
    with switched_off(model): …      the base alone: the reference policy, without a second model

The model keeps its class, so shared prefixes, the output head and FSDP find what they know. A tensor that is
`….q_proj.lora_A.default.weight` in the model is `base_model.model.….q_proj.lora_A.weight` in the weight log, in
checkpoints and in exported files.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from offbeat.errors import AdapterMismatch, RunError, UnsupportedModel, suggest_nearest
from offbeat.imports import install_command, missing_modules
from offbeat.weights.adapter import PREFIX, AdapterSpec

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

_NAME: Final = ".default."
"""The name that peft gives an adapter, as a part of its parameters' names."""
_FROZEN: Final = ".base_layer."
"""What peft puts into the names of the weights that it wraps."""


def attach(model: PreTrainedModel, spec: AdapterSpec) -> None:
    """Put A and B beside the target layers of `model`, in place, in its dtype, and freeze all other weights.

    The values of A and B mean nothing until they are set.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> sizes = dict(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    >>> model = LlamaForCausalLM(LlamaConfig(**sizes))
    >>> attach(model, AdapterSpec(rank=2, alpha=4.0, targets=("q_proj",), base=""))
    >>> [stored_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad][0]
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    if missing_modules(["peft"]):
        raise RunError(f"an adapter needs peft, which is not installed: {install_command('lora')}")
    from peft import LoraConfig, inject_adapter_in_model

    _require_linear(model, spec.targets)
    known = spec.peft_config() | {"inference_mode": False}
    with torch.random.fork_rng(devices=[]):  # peft draws from the global generator, which is not its own
        inject_adapter_in_model(LoraConfig(**known), model)


@contextmanager
def switched_off(model: nn.Module) -> Iterator[None]:
    """Let the model compute as its base alone, for the length of the block."""
    layers = list(adapted_layers(model))
    try:
        for layer in layers:
            # Not enable_adapters(False): it changes requires_grad, and FSDP looks at its first pass at what is trained.
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapted_layers(model: nn.Module) -> "Iterator[LoraLayer]":
    """Yield the layers that have A and B."""
    from peft.tuners.lora import LoraLayer

    return (module for module in model.modules() if isinstance(module, LoraLayer))


@torch.no_grad()
def load_adapter(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Copy the A and B of a version into a model that `attach` has prepared. Raises if any is missing or unknown."""
    own = {stored_name(name): tensor for name, tensor in model.named_parameters() if is_adapter(name)}
    if odd := sorted(own.keys() ^ state.keys()):
        where = "the model has no layer for it" if odd[0] in state else "it is missing"
        raise AdapterMismatch(f"the adapter does not fit {type(model).__name__}: {odd[0]}: {where}")
    for name, tensor in own.items():
        if tensor.shape != state[name].shape:
            raise AdapterMismatch(f"{name} is {list(state[name].shape)}, but the model has {list(tensor.shape)}")
        tensor.copy_(state[name])


def is_adapter(name: str) -> bool:
    """True if a parameter of the model is an A or a B."""
    return ".lora_A." in name or ".lora_B." in name


def stored_name(name: str) -> str:
    """Return the name of an A or B in the weight log.

    >>> stored_name("model.layers.0.self_attn.q_proj.lora_A.default.weight")
    'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
    """
    return PREFIX + name.replace(_NAME, ".")


def base_name(name: str) -> str:
    """Return the name of a frozen weight in the files of the base.

    >>> base_name("model.layers.0.self_attn.q_proj.base_layer.weight")
    'model.layers.0.self_attn.q_proj.weight'
    """
    return name.replace(_FROZEN, ".")


def _require_linear(model: PreTrainedModel, targets: tuple[str, ...]) -> None:
    """Raise if a target is not a linear layer of the model's body."""
    head = model.get_output_embeddings()
    linear = {n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head}
    for target in targets:
        if target not in linear:
            raise UnsupportedModel(
                f"adapter.targets: {type(model).__name__} has no linear layer {target!r} beside its output head; "
                f"{suggest_nearest(target, sorted(linear))}"
            )
