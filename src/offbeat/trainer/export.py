"""A checkpoint as a plain Hugging Face directory: what transformers, vLLM and everybody else load."""

import shutil
from pathlib import Path
from typing import Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from offbeat.errors import CheckpointError
from offbeat.trainer.checkpoint import Checkpoint

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
    """The directory of a checkpoint: the one given, or the newest finished one of a run or of its checkpoints."""
    if (place / "manifest.json").exists():
        return place
    for among in (place, place / "checkpoints"):
        if finished := sorted(path.parent for path in among.glob("step-*/manifest.json")):
            return finished[-1]
    raise CheckpointError(f"{place} is neither a checkpoint nor a run that has one")


def export(place: Path, out: Path, *, dtype: torch.dtype, tokenizer: Path | None = None) -> Checkpoint:
    """Write the policy of a verified checkpoint, rounded to `dtype`, into a new directory; returns the checkpoint.

    Tokenizer files are copied from `tokenizer`, or from a directory `tokenizer` beside the run's checkpoints.
    """
    if out.exists() and any(out.iterdir()):
        raise CheckpointError(f"{out} is not empty; give a new directory")
    folder = find_checkpoint(place)
    checkpoint = Checkpoint.open(folder)
    described = checkpoint.manifest.model
    if not isinstance(described, dict) or not isinstance(kind := described.get("model_type"), str):
        raise CheckpointError(f"the checkpoint in {folder} does not say which model it is of")
    config = AutoConfig.for_model(**(described | {"model_type": kind}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    weights = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in checkpoint.policy()}
    unknown = model.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    model.tie_weights()
    if unknown or (empty := [name for name, p in model.named_parameters() if p.is_meta]):
        raise CheckpointError(f"{type(model).__name__} and the checkpoint in {folder} do not fit: {unknown or empty}")
    part = out.with_name(f"{out.name}.part")  # the directory appears when it is complete
    model.save_pretrained(part)
    source = tokenizer or folder.parent.parent / "tokenizer"
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            shutil.copy2(source / name, part / name)
    part.replace(out)
    return checkpoint
