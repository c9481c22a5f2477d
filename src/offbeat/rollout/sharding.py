"""Into how many parts vLLM can split a model: tensor parallel sizes, read from config.json. No torch."""

import json
from collections.abc import Mapping
from pathlib import Path

from offbeat.errors import ConfigError
from offbeat.types import Json


def legal_sizes(config: Mapping[str, Json]) -> list[int]:
    """Return the tensor parallel sizes that a model with this config.json allows.

    Each process gets whole attention heads, and whole key-value heads or a copy of one.

    >>> legal_sizes({"num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536})
    [1, 3]
    >>> legal_sizes({"num_attention_heads": 14, "num_key_value_heads": 2, "intermediate_size": 4864})
    [1, 2]
    """
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    heads = _integer(config, "num_attention_heads") or 1
    shared = _integer(config, "num_key_value_heads") or heads
    width = _integer(config, "intermediate_size")
    return [
        size
        for size in range(1, heads + 1)
        if heads % size == 0 and (shared % size == 0 or size % shared == 0) and (width is None or width % size == 0)
    ]


def check_tensor_parallel(model_dir: Path, size: int) -> None:
    """Raise `ConfigError` with the nearest legal size if the model cannot be split into `size` parts."""
    if size == 1:
        return
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    legal = legal_sizes(config)
    if size in legal:
        return
    nearest = min(legal, key=lambda one: (abs(one - size), one))
    inner = config.get("text_config") or config
    heads, shared = inner.get("num_attention_heads"), inner.get("num_key_value_heads")
    raise ConfigError(
        [
            f"engine.tensor_parallel = {size}: {model_dir.name} has {heads} attention heads, {shared} key-value heads "
            f"and an intermediate size of {inner.get('intermediate_size')}, which do not split into {size} equal "
            f"parts; set engine.tensor_parallel = {nearest}"
        ]
    )


def _integer(config: Mapping[str, Json], name: str) -> int | None:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else None
