"""Export a checkpoint as a plain Hugging Face model directory, which transformers and vLLM load.

A run that trained an adapter has no whole weights: its policy is exported as a directory of peft, or merged.
"""

import shutil
from pathlib import Path
from typing import Final

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from offbeat.errors import CheckpointError
from offbeat.imports import without_progress_bars
from offbeat.trainer.adapter_export import AdapterCheckpoint
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

    Whole weights are rounded to `dtype`, by default bfloat16. Of an adapter, A and B are written as they were served,
    or with `merge` whole weights: W + scale · B A in float32, rounded once. `base` is the directory of its base, by
    default the model of the run's configuration. Both are loaded again and compared with the trainer's log-probs.
    Tokenizer files are copied from `tokenizer`, by default the directory `tokenizer` next to the run's checkpoints.
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

    An adapter is merged into its base.
    """
    # Buffers that no checkpoint holds, such as rotary frequencies, are computed on a real device only.
    return _build_model(Checkpoint.open(find_checkpoint(place)), dtype, device="cpu").eval()


def _build_model(
    checkpoint: Checkpoint, dtype: torch.dtype, device: str = "meta", base: Path | None = None
) -> PreTrainedModel:
    folder, settings = checkpoint.folder, checkpoint.manifest.model
    if not isinstance(settings, dict) or not isinstance(model_type := settings.get("model_type"), str):
        raise CheckpointError(f"the manifest of the checkpoint in {folder} has no model_type")
    config = AutoConfig.for_model(**(settings | {"model_type": model_type}))
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    whole = AdapterCheckpoint.open(checkpoint, base).merged() if checkpoint.manifest.adapter else checkpoint.policy()
    weights = {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in whole}
    unknown = model.load_state_dict(weights, strict=False, assign=True).unexpected_keys
    model.tie_weights()
    if unknown or (missing := [name for name, p in model.named_parameters() if p.is_meta]):
        problem = f"unknown weights {unknown}" if unknown else f"missing weights {missing}"
        raise CheckpointError(f"the checkpoint in {folder} does not fit {type(model).__name__}: {problem}")
    return model
