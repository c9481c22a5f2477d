"""What a model's directory says about the model, without loading it. No torch.

A directory that brings code, or weights that would have to be unpickled, is refused: nothing of a stranger's is run.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final, cast

from offbeat.types import Json

LONGEST_HEADER: Final = 100 << 20
"""Bytes; safetensors itself admits no longer one."""
_OWN_END: Final = ("PreTrainedTokenizerFast", "TokenizersBackend", "")
"""Tokenizer classes without an end-of-text token of their own: it is in the files, or there is none."""


class Unreadable(ValueError):
    """A file of a model that is not what it should be."""


@dataclass(frozen=True)
class ModelFiles:
    """A directory in the form of Hugging Face."""

    path: Path

    @cached_property
    def config(self) -> Mapping[str, Json]:
        """config.json."""
        return self._read("config.json")

    @cached_property
    def tokenizer(self) -> Mapping[str, Json]:
        """tokenizer_config.json; empty where there is none."""
        return self._read("tokenizer_config.json") if (self.path / "tokenizer_config.json").is_file() else {}

    def _read(self, name: str) -> Mapping[str, Json]:
        try:
            found = json.loads((self.path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise Unreadable(f"{self.path / name} cannot be read: {error}") from None
        if not isinstance(found, dict):
            raise Unreadable(f"{self.path / name} holds no table of settings")
        return found

    @cached_property
    def parameters(self) -> int:
        """Counted from the headers of the weight files."""
        return sum(_elements(file) for file in sorted(self.path.glob("*.safetensors")))

    def size(self, name: str, otherwise: int = 0) -> int:
        """A whole number of config.json."""
        value = self.config.get(name)
        return value if isinstance(value, int) else otherwise

    def problems(self) -> list[str]:
        """Why no run can begin with it; each begins with the key of the configuration that names it."""
        at = f"model.path = {str(self.path)!r}"
        if not (self.path / "config.json").is_file():
            return [f"{at}: there is no config.json; give the directory of a Hugging Face model"]
        try:
            found = self._code() + self._weights() + self._tokenizer()
        except Unreadable as error:
            found = [f"{error}; download the model again"]
        return [f"{at}: {problem}" for problem in found]

    def _code(self) -> list[str]:
        files = sorted(file.name for file in self.path.rglob("*.py"))
        mapped = [name for name, data in (("config.json", self.config), ("tokenizer_config.json", self.tokenizer))
                  if "auto_map" in data]  # fmt: skip
        if not files and not mapped:
            return []
        what = ", ".join([*files[:3], *(f"auto_map in {name}" for name in mapped)])
        return [f"it brings code ({what}), which is never run; use a model that transformers has built in"]

    def _weights(self) -> list[str]:
        if not list(self.path.glob("*.safetensors")):
            pickled = sorted(file.name for file in self.path.glob("*.bin"))
            why = f"{pickled[0]} would have to be unpickled" if pickled else "there are no weights"
            return [f"{why}; it needs *.safetensors, which `save_pretrained` of transformers writes"]
        index = self.path / "model.safetensors.index.json"
        if index.is_file():
            shards = cast("Mapping[str, str]", self._read(index.name).get("weight_map", {}))
            if absent := sorted(name for name in set(shards.values()) if not (self.path / name).is_file()):
                return [f"{absent[0]} is missing ({len(absent)} of its weight files are); download them again"]
        return [] if self.parameters else ["its weight files hold no weights; download the model again"]

    def _tokenizer(self) -> list[str]:
        if not any((self.path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            return ["there is no tokenizer; save it beside the model, into the same directory"]
        kind = self.tokenizer.get("tokenizer_class")
        special = self.path / "special_tokens_map.json"
        ends = [
            self.tokenizer.get("eos_token"),
            self._read(special.name).get("eos_token") if special.is_file() else None,
        ]
        if not any(ends) and (kind is None or kind in _OWN_END):
            return ["its tokenizer names no end-of-text token, completions would never stop; set eos_token in "
                    "tokenizer_config.json"]  # fmt: skip
        return []

    @property
    def chats(self) -> bool:
        """Whether its tokenizer has a chat template."""
        return "chat_template" in self.tokenizer or (self.path / "chat_template.jinja").is_file()


def _elements(file: Path) -> int:
    """Numbers in a safetensors file, from its header alone."""
    try:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= LONGEST_HEADER:
                raise Unreadable(f"{file} is not a safetensors file")
            header = json.loads(stream.read(length))
        tensors = [entry for name, entry in header.items() if name != "__metadata__"]
        return sum(math.prod(entry["shape"]) for entry in tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(f"{file} is not a safetensors file: {error}") from None
