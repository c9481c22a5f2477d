"""Adapters: a policy as a frozen base and small matrices A and B beside some of its linear layers (LoRA).

    y = W x + (alpha / rank) · B (A x)        W: the base's weight, out × in;  A: rank × in;  B: out × rank

A version of such a run is its A and B, named as peft names them in adapter_model.safetensors. They are published in
`model.serve`, rounded once from the trainer's float32 masters: the probe and every engine compute with exactly these
values. They do not contain the factor alpha / rank, which is applied once, when they are used. Version 0 has B = 0: it
is the base itself.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from offbeat.errors import AdapterMismatch, ModelUnreadable
from offbeat.hub import weight_files
from offbeat.types import Json
from offbeat.weights.delta import Bits, state_digest

PREFIX: Final = "base_model.model."
"""What peft puts before the path of a module."""
A: Final = ".lora_A.weight"
B: Final = ".lora_B.weight"


@dataclass(frozen=True)
class AdapterSpec:
    """Everything about an adapter but its values. Every version of its run has it in its manifest.

    >>> spec = AdapterSpec(rank=8, alpha=32.0, targets=("q_proj", "v_proj"), base="1f" * 32)
    >>> spec.scale, AdapterSpec.from_json(spec.to_json()) == spec
    (4.0, True)
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]
    """Names of the modules beside which A and B are, in every layer: the last part of a module's path."""
    base: str
    """The digest of the base's weights; see `load_base_digest`."""

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank

    def to_json(self) -> Json:
        """Return JSON for a manifest."""
        return {**asdict(self), "targets": [*self.targets]}

    @classmethod
    def from_json(cls, data: Json) -> "AdapterSpec":
        """Read what `to_json` returned. Raises ValueError, KeyError or TypeError if it is something else."""
        fields = cast("dict[str, Any]", data)
        spec = cls(int(fields["rank"]), float(fields["alpha"]), tuple(map(str, fields["targets"])), str(fields["base"]))
        if spec.rank < 1 or not spec.targets:
            raise ValueError(f"an adapter needs a rank of at least 1 and a target, not {spec}")
        return spec

    def peft_config(self) -> dict[str, Json]:
        """Return the content of adapter_config.json, which peft and vLLM read."""
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha.is_integer() else self.alpha,
            "target_modules": [*self.targets],
            "lora_dropout": 0.0,
            "bias": "none",
            "use_rslora": False,
            "use_dora": False,
            "modules_to_save": None,
            "inference_mode": True,
        }

    def require_base(self, digest: str, where: str) -> None:
        """Raise `AdapterMismatch` if the weights of a model are not those that the adapter was trained on."""
        if digest != self.base:
            raise AdapterMismatch(
                f"the adapter was trained on a base with the digest {self.base[:12]}…, but the weights in {where} have "
                f"{digest[:12]}…: another model, revision or dtype. Give the directory that the run started from"
            )


def load_base_digest(model_dir: Path) -> str:
    """Return the digest of a model's weights: of the names, dtypes, shapes and bits of all tensors in its files.

    How the tensors are spread over files does not matter. Files that did not change are read once in a process.
    """
    files = [model_dir / name for name in weight_files(model_dir, [file.name for file in model_dir.iterdir()])]
    return _digest(tuple((file, (stat := file.stat()).st_size, stat.st_mtime_ns) for file in files))


@lru_cache(maxsize=8)
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    tensors = []
    for path, *_ in files:
        try:
            with safe_open(path, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a mapping)
                    bits = Bits.of(file.get_tensor(key))
                    tensors.append((key, bits.dtype, bits.shape, bits.fingerprint()))
        except (OSError, SafetensorError) as error:
            raise ModelUnreadable(f"{path} cannot be read: {error}; download the model again") from None
    return state_digest(tensors)


def layer_of(name: str) -> str:
    """Return the module, by its path in the model, that a tensor of an adapter belongs to.

    >>> layer_of("base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight")
    'model.layers.0.self_attn.q_proj'
    """
    layer = name.removeprefix(PREFIX).removesuffix(A).removesuffix(B)
    if name not in (f"{PREFIX}{layer}{A}", f"{PREFIX}{layer}{B}"):
        raise AdapterMismatch(f"{name} is not a tensor of an adapter: expected {PREFIX}<module>{A} or {B}")
    return layer


def merged(
    base: Iterable[tuple[str, Tensor]], adapter: Mapping[str, Tensor], spec: AdapterSpec
) -> Iterator[tuple[str, Tensor]]:
    """Yield the base's tensors with the adapter added. Each sum is computed in float32 and rounded once.

    The result has the dtypes of `base`. Raises `AdapterMismatch` if A, B or the module that they belong to is missing.

    >>> spec = AdapterSpec(1, 2.0, ("q",), "")
    >>> adapter = {f"{PREFIX}q{A}": torch.ones(1, 2), f"{PREFIX}q{B}": torch.ones(2, 1)}
    >>> dict(merged([("q.weight", torch.eye(2))], adapter, spec))["q.weight"].tolist()
    [[3.0, 2.0], [2.0, 3.0]]
    """
    left = {layer_of(name) for name in adapter}
    for name, weight in base:
        layer = name.removesuffix(".weight")
        if layer not in left:
            yield name, weight
            continue
        left.remove(layer)
        yield name, merged_weight(weight, adapter, layer, spec)
    if left:
        raise AdapterMismatch(f"the base has no weight of {sorted(left)[0]}, which the adapter changes: another model")


def merged_weight(weight: Tensor, adapter: Mapping[str, Tensor], layer: str, spec: AdapterSpec) -> Tensor:
    """Return W + scale · B A of one layer, computed in float32 at least and rounded once to the dtype of W."""
    try:
        a, b = adapter[f"{PREFIX}{layer}{A}"], adapter[f"{PREFIX}{layer}{B}"]
    except KeyError as error:
        raise AdapterMismatch(f"the adapter lacks {error.args[0]}") from None
    if (*b.shape, *a.shape) != (weight.shape[0], spec.rank, spec.rank, weight.shape[1]):
        raise AdapterMismatch(
            f"{layer} is {list(weight.shape)} in the base, but its adapter of rank {spec.rank} has A {list(a.shape)} "
            f"and B {list(b.shape)}"
        )
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + spec.scale * (b.to(wide) @ a.to(wide))).to(weight.dtype)
