"""The sizes of a model that decide how much memory it needs, read from its config.json. No torch."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from offbeat.errors import ModelUnreadable
from offbeat.hub import read_object
from offbeat.types import Json

_QKV_BIAS = {"qwen2"}
"""Model types with biases on the query, key and value projections, whatever `attention_bias` says."""
_QK_NORM = {"qwen3"}
"""Model types that normalize each query and key head."""


@dataclass(frozen=True)
class ModelShape:
    """A decoder of the Llama family.

    >>> shape = ModelShape(vocabulary=151936, hidden=896, inner=4864, layers=24, heads=14, kv_heads=2, head_size=64,
    ...                    tied=True, qkv_bias=True)
    >>> f"{shape.parameters:,}"
    '494,032,768'
    """

    vocabulary: int
    hidden: int
    inner: int
    """Width of the MLP."""
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    context: int = 1 << 30
    """The most tokens it reads."""

    @classmethod
    def from_config(cls, config: Mapping[str, Json]) -> "ModelShape":
        """Read the sizes. Raises `ModelUnreadable` if one is missing, or if the model is not a dense decoder."""
        inner = config.get("text_config")
        config = inner if isinstance(inner, dict) else config

        def size(name: str, default: int | None = None) -> int:
            value = config.get(name, default)
            value = default if value is None else value
            if not isinstance(value, int):
                raise ModelUnreadable(f"config.json has no {name}: its memory cannot be estimated")
            return value

        if any(config.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts")):
            raise ModelUnreadable("config.json describes a mixture of experts, which offbeat does not estimate yet")
        kind, heads, hidden = config.get("model_type"), size("num_attention_heads"), size("hidden_size")
        return cls(
            vocabulary=size("vocab_size"),
            hidden=hidden,
            inner=size("intermediate_size", 4 * hidden),
            layers=size("num_hidden_layers"),
            heads=heads,
            kv_heads=size("num_key_value_heads", heads),
            head_size=size("head_dim", hidden // heads),
            tied=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=kind in _QKV_BIAS or bool(config.get("attention_bias", False)),
            qk_norm=kind in _QK_NORM,
            context=size("max_position_embeddings", 1 << 30),
        )

    @classmethod
    def read(cls, model_dir: Path) -> "ModelShape":
        """Read the sizes from a model directory."""
        return cls.from_config(read_object(model_dir / "config.json"))

    @property
    def legal_splits(self) -> list[int]:
        """Into how many parts an engine can split it: whole heads each, and whole key-value heads or a copy of one.

        >>> ModelShape(49152, 576, 1536, 30, heads=9, kv_heads=3, head_size=64).legal_splits
        [1, 3]
        """
        return [
            size
            for size in range(1, self.heads + 1)
            if self.heads % size == 0
            and (self.kv_heads % size == 0 or size % self.kv_heads == 0)
            and self.inner % size == 0
        ]

    @property
    def query_width(self) -> int:
        return self.heads * self.head_size

    @property
    def key_width(self) -> int:
        return self.kv_heads * self.head_size

    @property
    def layer_parameters(self) -> int:
        """Parameters of one transformer layer."""
        projections = 2 * self.hidden * (self.query_width + self.key_width)
        biases = (self.query_width + 2 * self.key_width) if self.qkv_bias else 0
        norms = 2 * self.hidden + (2 * self.head_size if self.qk_norm else 0)
        return projections + biases + 3 * self.hidden * self.inner + norms

    def adapter_parameters(self, rank: int, targets: Collection[str]) -> int:
        """Parameters of an adapter beside these layers: `rank` for each row and each column of their weights.

        >>> shape = ModelShape(49152, 576, 1536, 30, heads=9, kv_heads=3, head_size=64)
        >>> f"{shape.adapter_parameters(8, ['q_proj', 'v_proj']):,}"
        '460,800'
        """
        attention = dict.fromkeys(("q_proj", "o_proj"), self.hidden + self.query_width)
        attention |= dict.fromkeys(("k_proj", "v_proj"), self.hidden + self.key_width)
        widest = self.hidden + self.inner  # layers of the MLP, and an upper limit for names that are not known here
        return self.layers * rank * sum(attention.get(name, widest) for name in targets)

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers: embeddings, output head and final norm."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.root_parameters
