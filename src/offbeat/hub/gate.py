"""The gate for model directories: every command asks it before a library opens a file of the model. No torch.

    *.py, auto_map                   code that a library could run
    adapter_config.json              a library would load another model than the one in the directory
    *.bin, *.pt, … alone             weights that would have to be unpickled
    torn headers, missing shards     damage that a library reports in its own words, late, or never

A refusal is one sentence: the file, what is wrong with it, and what to do.
"""

import json
import math
from pathlib import Path
from typing import Any, Final

from offbeat.errors import ModelUnreadable

INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
PICKLES: Final = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
"""How names of files end that would have to be unpickled."""
LONGEST_HEADER: Final = 100 << 20
"""Bytes; the limit of safetensors itself."""
_MAY_NAME_CODE: Final = ("config.json", "tokenizer_config.json", "generation_config.json", "processor_config.json")
_ADAPTER: Final = "adapter_config.json"


def check_model(directory: Path) -> None:
    """Raise `ModelUnreadable` with one sentence if no command may open this model."""
    if problems := model_problems(directory):
        raise ModelUnreadable(f"{directory}: {problems[0]}")


def model_problems(directory: Path, *, weights: bool = True) -> list[str]:
    """Return why no command may open the model in a directory. Without `weights`, they are not downloaded yet.

    >>> model_problems(Path("nowhere"))
    ['there is no config.json; give the directory of a Hugging Face model']
    """
    if not (directory / "config.json").is_file():
        return ["there is no config.json; give the directory of a Hugging Face model"]
    try:
        found = _find_code(directory)
        return found + _find_broken_weights(directory) if weights else found
    except ModelUnreadable as error:
        return [f"{error}; download the model again"]


def mapped_code(directory: Path) -> list[str]:
    """Return the JSON files of a model that name code to run."""
    files = [name for name in _MAY_NAME_CODE if (directory / name).is_file()]
    return [name for name in files if "auto_map" in read_object(directory / name)]


def read_object(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a model. Raises `ModelUnreadable`."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelUnreadable(f"{file} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise ModelUnreadable(f"{file} is not a JSON object")
    return found


def count_elements(file: Path) -> int:
    """Count the numbers in a safetensors file from its header. Raises `ModelUnreadable`, also if the file is cut."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= LONGEST_HEADER:
                raise ModelUnreadable(f"{file} is not a safetensors file")
            header = json.loads(stream.read(length))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        end = 8 + length + max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
        elements = sum(int(math.prod(entry["shape"])) for entry in tensors)
    except (OSError, ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ModelUnreadable):
            raise
        raise ModelUnreadable(f"{file} is not a safetensors file: {error}") from None
    if (size := file.stat().st_size) != end:
        raise ModelUnreadable(f"{file} is damaged: it has {size} bytes, and its header says {end}")
    return elements


def _find_code(directory: Path) -> list[str]:
    files = sorted(file.name for file in directory.rglob("*.py"))
    what = [*files[:3], *(f"auto_map in {name}" for name in mapped_code(directory))]
    if what:
        return [f"it brings code ({', '.join(what)}), which offbeat never runs; use a model that is built in to "
                "transformers"]  # fmt: skip
    if (directory / _ADAPTER).is_file():
        return [f"it holds an adapter ({_ADAPTER}), which stands for another model; merge the two with `offbeat export "
                "--merge`, or with `merge_and_unload` of peft, and use the result"]  # fmt: skip
    return []


def _find_broken_weights(directory: Path) -> list[str]:
    if not (files := sorted(directory.glob("*.safetensors"))):
        pickled = sorted(file.name for file in directory.iterdir() if file.name.endswith(PICKLES))
        why = f"{pickled[0]} would have to be unpickled" if pickled else "there are no weights"
        return [f"{why}; save it as *.safetensors with `save_pretrained` of transformers"]
    if (directory / INDEX).is_file():
        shards = read_object(directory / INDEX).get("weight_map")
        if not isinstance(shards, dict) or any(not isinstance(one, str) or "/" in one for one in shards.values()):
            return [f"{INDEX} is not an index of weight files; download the model again"]
        if missing := sorted(name for name in set(shards.values()) if not (directory / name).is_file()):
            return [f"{missing[0]} is missing (weight files missing: {len(missing)}); download the model again"]
    if not sum(count_elements(file) for file in files):
        return ["its weight files hold no weights; download the model again"]
    return []
