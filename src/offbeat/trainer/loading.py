"""Load the policy model: whole on one rank, and on several ranks each rank only its slices.

    meta device ─ shard ─ memory for the slices ─ each rank reads the bytes of its rows from the safetensors files

No rank ever holds the whole model, on its GPU or in host memory. Files are read in small pieces and not mapped: mapped
pages would count as the memory of this process.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import logging as transformers_logging

from offbeat.errors import ModelUnreadable, UnsupportedModel, first_line
from offbeat.hub import safetensors_header, weight_files
from offbeat.imports import without_progress_bars
from offbeat.seeds import derive
from offbeat.trainer.adapter import base_name, is_adapter
from offbeat.trainer.forward import PolicyModel
from offbeat.trainer.fsdp import Ranks, make_mesh, model_tensors, named_tensors, own_rows, shard
from offbeat.weights.adapter import AdapterSpec, B
from offbeat.weights.delta import DTYPES

PIECE_BYTES: Final = 8 << 20
"""Bytes that are read at once."""


def load_policy_model(
    directory: Path,
    ranks: Ranks,
    *,
    compute: torch.dtype,
    rounds_to: torch.dtype | None = None,
    temperature: float = 1.0,
    chunk_tokens: int = 512,
    checkpoint_activations: bool = False,
    adapter: AdapterSpec | None = None,
    serve: torch.dtype = torch.float32,
    seed: int = 0,
) -> PolicyModel:
    """Load the model in `directory` onto this rank's device.

    On one rank the parameters have the dtype `compute`. On several, each rank gets its slices in float32, the master
    weights. The values of what is trained fit into `rounds_to`, by default `compute`, on any number of ranks. Raises
    `ModelUnreadable` if files do not hold exactly the tensors of the model.

    With an `adapter`, the weights of the model are frozen. They have the values that engines serve, rounded to `serve`,
    and on several ranks that dtype as well. `seed` decides A.
    """
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    rounds_to = rounds_to or compute
    if ranks.size == 1:
        model = convert_parameters(read_model(directory, rounds_to).to(device), compute)
    else:
        model = empty_model(directory)
    policy_model = PolicyModel(
        model,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        checkpoint_activations=checkpoint_activations,
        adapter=adapter,
    )
    if ranks.size == 1 and adapter is not None:
        freeze_as_served(policy_model, serve)
    if ranks.size > 1:
        if adapter is not None:
            for frozen in (one for one in policy_model.parameters() if not one.requires_grad):
                frozen.data = frozen.data.to(serve)
        shard(policy_model, compute=compute, mesh=make_mesh(ranks, device.type))
        allocate(policy_model, device)
        fill(policy_model, directory)
    if adapter is not None:
        draw_adapter(policy_model, seed)
    for _, tensor in named_tensors(policy_model):  # slices of files in float32, and an adapter's A
        if tensor.is_floating_point():
            tensor.copy_(tensor.to(rounds_to))
    return policy_model


@torch.no_grad()
def freeze_as_served(policy_model: PolicyModel, serve: torch.dtype) -> None:
    """Round the frozen weights to the values that engines serve, in place. Their dtype stays."""
    for frozen in (one for one in policy_model.parameters() if not one.requires_grad):
        frozen.copy_(frozen.to(serve))


@torch.no_grad()
def draw_adapter(policy_model: PolicyModel, seed: int) -> None:
    """Set the adapter of version 0: A from `seed`, B = 0, so that the policy is the base.

    A is uniform within ±1/√in, as in peft. Every A has a random stream of its own and is drawn whole, so that neither
    the number of ranks nor the order of layers matters.
    """
    for name, tensor in named_tensors(policy_model):
        start, local = own_rows(name, tensor)
        if name.endswith(B):
            local.zero_()
            continue
        generator = torch.Generator().manual_seed(derive(seed, "adapter", name))
        limit = tensor.shape[1] ** -0.5
        drawn = torch.empty(tensor.shape).uniform_(-limit, limit, generator=generator)
        local.copy_(drawn[start : start + len(local)])


def read_model(directory: Path, dtype: torch.dtype | str | None = None) -> PreTrainedModel:
    """Load a whole model onto the CPU, by default in its own dtype. Code in the directory is never executed.

    Raises `ModelUnreadable` with one sentence, also if a weight is missing: transformers would invent it.
    """
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its table of missing weights; we refuse those
    try:
        with without_progress_bars():
            model, report = AutoModelForCausalLM.from_pretrained(
                str(directory), dtype=dtype or "auto", local_files_only=True, trust_remote_code=False,
                use_safetensors=True, output_loading_info=True,
            )  # fmt: skip
    except MemoryError:
        raise
    except Exception as error:  # transformers and safetensors raise whatever damaged files cause
        raise ModelUnreadable(
            f"the model in {directory} cannot be loaded: {first_line(error)}; download it again, or save it with "
            "`save_pretrained` of transformers"
        ) from error
    finally:
        transformers_logging.set_verbosity(before)
    if missing := sorted(report["missing_keys"]):
        raise ModelUnreadable(
            f"the weight files in {directory} lack {missing[0]} (tensors missing: {len(missing)}); download it again"
        )
    return model


def read_rounded(directory: Path, *dtypes: torch.dtype) -> PreTrainedModel:
    """Load a model in float32, with values that are rounded to these dtypes in turn, in eval mode."""
    model = read_model(directory, dtypes[0])
    for dtype in (*dtypes[1:], torch.float32):
        convert_parameters(model, dtype)
    return model.eval()


def convert_parameters(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """Convert the parameters, in place. `model.to(dtype)` would round buffers too, such as rotary frequencies."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def empty_model(directory: Path) -> PreTrainedModel:
    """Return the model with its parameters on the meta device, in float32, and its buffers on the CPU."""
    config = AutoConfig.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    with _parameters_on_meta():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False)
    return model


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device as soon as a module registers it, before its memory is touched.

    A meta device for everything would take the buffers too, and models compute rotary frequencies only once.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:  # one that is tied is on meta already, and stays the same
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = register_on_meta  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def allocate(policy_model: PolicyModel, device: torch.device) -> None:
    """Give parameters on the meta device memory on `device`; move the buffers there."""
    buffers = {name: buffer.clone() for name, buffer in policy_model.named_buffers()}
    policy_model.to_empty(device=device)
    for name, buffer in policy_model.named_buffers():
        buffer.copy_(buffers[name])
    policy_model.model.tie_weights()


@torch.no_grad()
def fill(policy_model: PolicyModel, directory: Path) -> None:
    """Read this rank's rows of every tensor of the model from the safetensors files in `directory`."""
    model = policy_model.model
    stored = _by_parameter(model, _stored_tensors(directory), directory)
    shared = _shared_names(model)
    buffer = bytearray(PIECE_BYTES)
    for name, tensor in _base_tensors(policy_model):
        sources = [stored[one] for one in shared.get(name, [name]) if one in stored]
        start, local = own_rows(name, tensor)
        if tuple(tensor.shape) != sources[0].shape:
            raise ModelUnreadable(
                f"{name} is {list(sources[0].shape)} in {sources[0].file} and {list(tensor.shape)} in the model of "
                "config.json; download the model again"
            )
        sources[0].read(start, local, buffer)
        for other in sources[1:]:
            _require_equal(name, other, start, local, buffer)


def _base_tensors(policy_model: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that the files hold: all but those of an adapter."""
    found = ((name, tensor) for name, tensor in model_tensors(policy_model) if not is_adapter(name))
    yield from ((base_name(name), tensor) for name, tensor in found)


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """The position of its first byte in the file."""

    def read(self, start: int, to: Tensor, buffer: bytearray) -> None:
        """Read rows from `start` on into the contiguous tensor `to`, as many as it has, converted to its dtype."""
        row = math.prod(self.shape[1:])
        size = self.dtype.itemsize
        flat, step = to.view(-1), len(buffer) // size
        descriptor = os.open(self.file, os.O_RDONLY)
        try:
            for low in range(0, flat.numel(), step):
                high = min(low + step, flat.numel())
                piece = memoryview(buffer)[: (high - low) * size]
                _read_exactly(descriptor, piece, self.offset + (start * row + low) * size, self.file)
                flat[low:high].copy_(torch.frombuffer(piece, dtype=self.dtype))
        finally:
            os.close(descriptor)


def _read_exactly(descriptor: int, piece: memoryview, offset: int, file: Path) -> None:
    done = 0
    while done < len(piece):
        count = os.preadv(descriptor, [piece[done:]], offset + done)
        if count == 0:
            raise ModelUnreadable(
                f"{file} ends after {offset + done} bytes, in the middle of a tensor; download it again"
            )
        done += count


def _stored_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor of the files, by its name in them."""
    files = weight_files(directory, [file.name for file in directory.iterdir()])
    if not files:
        raise ModelUnreadable(
            f"{directory} has no *.safetensors; save the model with `save_pretrained` of transformers"
        )
    return {name: tensor for file in files for name, tensor in _tensors_in(directory / file).items()}


def _tensors_in(file: Path) -> dict[str, StoredTensor]:
    header, begins = safetensors_header(file)
    try:
        return {
            name: StoredTensor(file, DTYPES[entry["dtype"]], tuple(entry["shape"]), begins + entry["data_offsets"][0])
            for name, entry in header.items()
        }
    except (KeyError, TypeError) as error:
        raise ModelUnreadable(f"{file} is not a safetensors file: {type(error).__name__}: {error}") from None


def _by_parameter(
    model: PreTrainedModel, stored: Mapping[str, StoredTensor], directory: Path
) -> dict[str, StoredTensor]:
    """Return the stored tensors by their names in the model, renamed as transformers does; raise if they do not fit."""
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    known = {base_name(name): tensor for name, tensor in model.state_dict().items() if not is_adapter(name)}
    found: dict[str, StoredTensor] = {}
    for key, tensor in stored.items():
        name, merged = rename_source_key(key, renamings, converters, model.base_model_prefix, known)
        if merged is not None:
            raise UnsupportedModel(
                f"{type(model).__name__} merges tensors of its files ({key}) while it loads, and several ranks cannot "
                "do that slice by slice; set trainer.ranks = 1, or use a model without experts"
            )
        quantized = tensor.dtype.itemsize < 2 or not tensor.dtype.is_floating_point
        if quantized and name in known and known[name].is_floating_point():
            raise UnsupportedModel(f"{key} in {directory} is {tensor.dtype}: quantized models cannot be trained")
        found[name] = tensor
    shared = _shared_names(model)
    missing = [name for name in known if not found.keys() & set(shared.get(name, [name]))]
    unexpected = [name for name in found if name not in known and not _ignored(model, name)]
    for what, names in (("lack", missing), ("also hold", unexpected)):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise ModelUnreadable(
                f"the weights in {directory} {what} {', '.join(names[:3])}{more}, so they do not belong to the "
                f"{type(model).__name__} of config.json; download the model again"
            )
    return found


def _shared_names(model: PreTrainedModel) -> dict[str, list[str]]:
    """Return, for every name of a tied parameter, all its names."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: group for group in names.values() if len(group) > 1 for name in group}


def _ignored(model: PreTrainedModel, name: str) -> bool:
    """True if transformers ignores this tensor too, such as rotary frequencies of early Llama files."""
    patterns = [*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq", r"(^|\.)position_ids$"]
    return any(re.search(pattern, name) for pattern in patterns)


def _require_equal(name: str, other: StoredTensor, start: int, local: Tensor, buffer: bytearray) -> None:
    """Raise if a second copy of a tied tensor has other values: config.json is wrong then."""
    copied = torch.empty_like(local)
    other.read(start, copied, buffer)
    if not torch.equal(copied, local):
        raise ModelUnreadable(
            f"config.json ties {name} to another tensor, but {other.file} holds both with different values; set "
            "tie_word_embeddings to false in config.json"
        )
