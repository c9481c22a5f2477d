"""Export a checkpoint as a plain Hugging Face model directory, which transformers and vLLM load.

A checkpoint holds the float32 masters of the optimizer, and no engine ever computes with those. The policy of a run is
what was served: masters, rounded. So `served_state` is the way from a checkpoint to every evaluation and export.

A run that trained an adapter has no whole weights: its policy is exported as a directory of peft, or merged. Its base
must be proven the right one, and what is written is loaded again and compared with the trainer's log-probs.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from offbeat.config.sections import ModelConfig
from offbeat.errors import AdapterMismatch, CheckpointError
from offbeat.hub import model_directory
from offbeat.imports import without_progress_bars
from offbeat.trainer.adapter import attach, load_adapter
from offbeat.trainer.checkpoint import Checkpoint
from offbeat.trainer.forward import TOLERANCE, sequence_logprobs
from offbeat.trainer.loading import read_model, read_rounded
from offbeat.weights.adapter import AdapterSpec, load_base_digest, merged
from offbeat.weights.probe import Probe

PROBE: Final = "probe"
"""The extra of a checkpoint that holds sequences and the trainer's log-probs of them."""
CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"

LogProbs = NDArray[np.float32]
TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "generation_config.json",
)


def find_checkpoint(place: Path) -> Path:
    """Return a checkpoint's directory: `place` itself, or the newest complete one in a run or checkpoints directory."""
    if (place / "manifest.json").exists():
        return place
    for folder in (place, place / "checkpoints"):
        if complete := sorted(path.parent for path in folder.glob("step-*/manifest.json")):
            return complete[-1]
    raise CheckpointError(f"{place} is neither a checkpoint nor a run that has one")


def export(
    place: Path,
    out: Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: Path | None = None,
    merge: bool = False,
    base: Path | None = None,
) -> Checkpoint:
    """Verify a checkpoint and write its policy to a new directory; return the checkpoint.

    Whole weights are those that were served, in `dtype`, by default bfloat16. Of an adapter, A and B are written as
    they were served, or with `merge` whole weights: W + scale · B A in float32, rounded once. `base` is the directory
    of its base, by default the model of the run's configuration. Both are loaded again and compared with the trainer's
    log-probs. Tokenizer files are copied from `tokenizer`, by default the directory `tokenizer` next to the run's
    checkpoints.
    """
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty; give a new directory")
    checkpoint = Checkpoint.open(find_checkpoint(place))
    part = out.with_name(f"{out.name}.part")  # `out` appears only when it is complete
    adapter = AdapterCheckpoint.open(checkpoint, base) if checkpoint.manifest.adapter else None
    if adapter is None and (merge or base):
        raise CheckpointError(f"{place} trained all weights, not an adapter: leave `merge` and `base` out")
    if adapter is not None and not merge and dtype is not None:
        raise CheckpointError("an adapter is exported as it was served: leave `dtype` out, or set `merge`")
    try:
        if adapter is not None and not merge:
            adapter.write(part)
        else:
            rounded = dtype or torch.bfloat16
            with without_progress_bars():
                _build_model(checkpoint, rounded, base=base).save_pretrained(part)
            if adapter is not None:
                adapter.check_merged(_build_model(checkpoint, torch.float32, "cpu", base).eval(), part, rounded)
        _copy_tokenizer(tokenizer or checkpoint.folder.parent.parent / "tokenizer", part)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise
    part.replace(out)
    return checkpoint


def _copy_tokenizer(source: Path, to: Path) -> None:
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy2(source / name, to / name)


def load_policy(place: Path, *, dtype: torch.dtype) -> PreTrainedModel:
    """Verify the newest checkpoint of a run and return its policy as a transformers model on the CPU, in eval mode.

    Its weights have the values that were served; an adapter is merged into its base.
    """
    # Buffers that no checkpoint holds, such as rotary frequencies, are computed on a real device only.
    return _build_model(Checkpoint.open(find_checkpoint(place)), dtype, device="cpu").eval()


def served_state(checkpoint: Checkpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield the trained tensors as the run served them: rounded as the trainer does, then as engines do."""
    settings = _model_settings(checkpoint)
    compute, serve = getattr(torch, settings.compute), getattr(torch, settings.serve)
    for name, master in checkpoint.policy():
        yield name, master.to(compute).to(serve) if master.is_floating_point() else master


def _build_model(
    checkpoint: Checkpoint, dtype: torch.dtype, device: str = "meta", base: Path | None = None
) -> PreTrainedModel:
    folder, settings = checkpoint.folder, checkpoint.manifest.model
    if not isinstance(settings, dict) or not isinstance(model_type := settings.get("model_type"), str):
        raise CheckpointError(f"the manifest of the checkpoint in {folder} has no model_type")
    config = AutoConfig.for_model(**(settings | {"model_type": model_type}))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    whole = (
        AdapterCheckpoint.open(checkpoint, base).merged() if checkpoint.manifest.adapter else served_state(checkpoint)
    )
    weights = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in whole}
    unknown = model.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    model.tie_weights()
    if unknown or (missing := [name for name, p in model.named_parameters() if p.is_meta]):
        problem = f"unknown weights {unknown}" if unknown else f"missing weights {missing}"
        raise CheckpointError(f"the checkpoint in {folder} does not fit {type(model).__name__}: {problem}")
    return model


@dataclass(frozen=True)
class AdapterCheckpoint:
    """A checkpoint of an adapter, and the directory of its base, whose weights are proven to be the right ones."""

    checkpoint: Checkpoint
    spec: AdapterSpec
    base: Path

    @classmethod
    def open(cls, checkpoint: Checkpoint, base: Path | None = None) -> "AdapterCheckpoint":
        """Find the base: the model of the run's configuration, or `base`. Raises `AdapterMismatch` if it is another."""
        spec, settings = AdapterSpec.from_json(checkpoint.manifest.adapter), _model_settings(checkpoint)
        if base is None and not settings.path:
            raise CheckpointError("the checkpoint does not say where the base of its adapter is; give its directory")
        place = base or model_directory(settings.path, settings.revision)
        spec.require_base(load_base_digest(place), str(place))
        return cls(checkpoint, spec, place)

    @property
    def _model(self) -> ModelConfig:
        return _model_settings(self.checkpoint)

    @property
    def state(self) -> dict[str, Tensor]:
        """A and B as they are served."""
        return dict(served_state(self.checkpoint))

    def read_base(self) -> PreTrainedModel:
        """Load the base in float32, with the values that engines serve."""
        return read_rounded(self.base, getattr(torch, self._model.serve))

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the whole weights of the policy in float32, not rounded."""
        return merged(self.read_base().state_dict().items(), self.state, self.spec)

    def logprobs(self) -> LogProbs:
        """Return the policy's log-probs of the probe, computed in float32 from base and adapter.

        Raises `AdapterMismatch` if they are not those that the trainer computed.
        """
        probe, model = self.probe, self.read_base()
        attach(model, self.spec)
        load_adapter(model, self.state)
        found = logprobs_of(model, probe)
        compute = getattr(torch, self._model.compute)
        require_equal(found, probe.values, TOLERANCE[compute], f"the checkpoint of step {self.checkpoint.step}")
        return found

    @property
    def probe(self) -> Probe:
        """Sequences, and the trainer's log-probs of them when the checkpoint was saved."""
        return Probe.from_json(self.checkpoint.extra(PROBE))

    def write(self, folder: Path) -> None:
        """Write the adapter as peft does, load it again with peft, and check it."""
        from peft import PeftModel

        expected = self.logprobs()
        folder.mkdir(parents=True, exist_ok=True)
        config = self.spec.peft_config() | {"base_model_name_or_path": self._model.path}
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        save_file(self.state, folder / WEIGHTS_FILE, {"format": "pt", "base": self.spec.base})
        loaded = PeftModel.from_pretrained(self.read_base(), folder).get_base_model()
        require_equal(logprobs_of(loaded, self.probe), expected, TOLERANCE[torch.float32], f"the files in {folder}")

    def check_merged(self, unrounded: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
        """Check merged weights before they are rounded, and as they were written to `folder` in `dtype`."""
        expected = self.logprobs()
        require_equal(logprobs_of(unrounded, self.probe), expected, TOLERANCE[torch.float32], "the merged weights")
        written = read_model(folder, torch.float32).eval()
        require_equal(logprobs_of(written, self.probe), expected, TOLERANCE[dtype], f"the files in {folder}")


def _model_settings(checkpoint: Checkpoint) -> ModelConfig:
    """Return the section [model] of the run's configuration. Checkpoints of another loop may have none: no rounding."""
    config, exact = checkpoint.manifest.config, {"compute": "float32", "serve": "float32"}
    return ModelConfig.model_validate(config["model"] if isinstance(config, dict) and "model" in config else exact)


def logprobs_of(model: PreTrainedModel, probe: Probe) -> LogProbs:
    """Return a model's log-probs of a probe's sequences, concatenated."""
    return np.concatenate(sequence_logprobs(model, probe.sequences))


def require_equal(found: LogProbs, expected: LogProbs, tolerance: float, what: str) -> None:
    """Raise `AdapterMismatch` if log-probs differ by more than rounding explains."""
    gap = float(np.abs(found - expected).mean())
    if not gap <= tolerance:
        raise AdapterMismatch(
            f"{what} compute other log-probs than the trainer did: the mean difference is {gap:.2g}, and rounding "
            f"explains {tolerance:.2g}. Nothing was exported; export an earlier checkpoint, or report this"
        )
