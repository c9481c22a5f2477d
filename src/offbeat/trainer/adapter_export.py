"""The policy of an adapter's checkpoint outside a run: merged into its base, or as a directory that peft and vLLM read.

What is written is loaded again, and must compute the log-probs that the trainer computed when the checkpoint was saved:
a factor alpha / rank that is applied twice, a missing layer or another base would show there.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from offbeat.config.sections import ModelConfig
from offbeat.errors import AdapterMismatch, CheckpointError
from offbeat.hub import model_directory
from offbeat.trainer.adapter import attach, load_adapter
from offbeat.trainer.checkpoint import Checkpoint
from offbeat.trainer.forward import TOLERANCE, sequence_logprobs
from offbeat.trainer.loading import read_model
from offbeat.weights.adapter import AdapterSpec, load_base_digest, merged
from offbeat.weights.probe import Probe

PROBE: Final = "probe"
"""The extra of a checkpoint that holds sequences and the trainer's log-probs of them."""
CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"

LogProbs = NDArray[np.float32]


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
        serve = getattr(torch, self._model.serve)
        return {name: tensor.to(serve) for name, tensor in self.checkpoint.policy()}

    def read_base(self) -> PreTrainedModel:
        """Load the base in float32, with the values that engines serve."""
        model = read_model(self.base, getattr(torch, self._model.serve))
        for parameter in model.parameters():  # not model.float(): buffers stay as they are
            parameter.data = parameter.data.float()
        return model.eval()

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
    """Return the section [model] of the run's configuration. Checkpoints of another loop may have none."""
    config = checkpoint.manifest.config
    return ModelConfig.model_validate(config["model"] if isinstance(config, dict) and "model" in config else {})


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
