"""Memory and time of a run, estimated from the model's files before anything is loaded. No torch.

The estimate answers "does it fit at all". It assumes a decoder like Llama and completions of the maximum length. The
run itself measures before its first step (`trainer/estimate.py`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Final

from offbeat.config import Config
from offbeat.config.parts import EngineKind
from offbeat.errors import ModelUnreadable
from offbeat.hub import count_elements, model_problems, read_object
from offbeat.placement.hardware import GIB, cpu_products
from offbeat.placement.memory import BYTES, engine_memory, rank_memory, trained_parameters
from offbeat.placement.shape import ModelShape
from offbeat.preflight.speed import Speed
from offbeat.types import Json
from offbeat.words import memory_size

TINY: Final = 1_000_000
"""Parameters below which a second CPU thread, or starting vLLM, costs more than it saves."""
LAYER_CALLS: Final = 1_200
"""Small calls that a layer takes in a forward pass of any size: what PyTorch and Python cost beside arithmetic."""
MODEL_CALLS: Final = 2_000
"""Likewise, a whole model beside its layers."""
ANSWER_CALLS: Final = 1_500
"""Likewise, to sample, score and store a completion."""
_NO_DEFAULT_END: Final = ("PreTrainedTokenizerFast", "TokenizersBackend", "")
"""Tokenizer classes without a default end-of-text token: the files must name one."""


@dataclass(frozen=True)
class ModelFiles:
    """The directory of a Hugging Face model, read without loading the model."""

    path: Path
    remote_parameters: int = 0
    """The number of parameters, if the weights are still on the hub and only small files are here."""

    @cached_property
    def config(self) -> Mapping[str, Json]:
        return read_object(self.path / "config.json")

    @cached_property
    def tokenizer(self) -> Mapping[str, Json]:
        """The content of tokenizer_config.json; empty if there is no such file."""
        return (
            read_object(self.path / "tokenizer_config.json") if (self.path / "tokenizer_config.json").is_file() else {}
        )

    @cached_property
    def parameters(self) -> int:
        """The number of parameters, from the headers of the weight files."""
        return self.remote_parameters or sum(count_elements(file) for file in sorted(self.path.glob("*.safetensors")))

    @property
    def tiny(self) -> bool:
        """True for the models of examples and tests."""
        return 0 < self.parameters < TINY

    def integer(self, name: str, default: int = 0) -> int:
        """Return an integer of config.json, or the default."""
        value = self.config.get(name)
        return value if isinstance(value, int) else default

    def problems(self) -> list[str]:
        """Return why no run can start with this model. Each problem begins with the setting that it is about."""
        at = f"model.path = {str(self.path)!r}"
        found = model_problems(self.path, weights=not self.remote_parameters)
        try:
            found = found or self._check_tokenizer()
        except ModelUnreadable as error:
            found = [f"{error}; download the model again"]
        return [f"{at}: {problem}" for problem in found]

    def _check_tokenizer(self) -> list[str]:
        if not any((self.path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
            return ["there is no tokenizer; save it beside the model, into the same directory"]
        kind = self.tokenizer.get("tokenizer_class")
        special = self.path / "special_tokens_map.json"
        ends = [
            self.tokenizer.get("eos_token"),
            read_object(special).get("eos_token") if special.is_file() else None,
        ]
        if not any(ends) and (kind is None or kind in _NO_DEFAULT_END):
            return ["its tokenizer has no end-of-text token, so completions would never stop; set eos_token in "
                    "tokenizer_config.json"]  # fmt: skip
        return []

    @property
    def chat_template(self) -> str:
        """The chat template, or all of them as one text; empty if there is none."""
        file = self.path / "chat_template.jinja"
        return file.read_text(encoding="utf-8") if file.is_file() else str(self.tokenizer.get("chat_template", ""))


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a prompt and of a completion."""

    prompt: float
    completion: float


@dataclass(frozen=True)
class Forecast:
    """The memory and work that a run needs.

    >>> trainer, copies = {"AdamW": 1 << 30, "gradients": 1 << 29}, {"checkpoint": 1 << 30}
    >>> print(Forecast(135_000_000, trainer, copies, 3 << 28, 9e11, 2e11))
    135.0 M parameters
    trainer: 1.5 GiB (AdamW 1.0 GiB, gradients 512 MiB)
    copies in host memory: 1.0 GiB (checkpoint 1.0 GiB)
    each engine: 768 MiB
    a step: about 9e+11 operations to train and 2e+11 to generate
    """

    parameters: int
    trainer: dict[str, int]
    """Bytes of one rank, by purpose."""
    copies: dict[str, int]
    """Bytes of host memory that the process of the first rank needs beside its step, by purpose."""
    engine: int
    """Bytes of one engine on CPU."""
    training: float
    """Operations of one step, at most."""
    generating: float
    """Operations of one step, at most."""
    calls: float = 0.0
    """Small calls of one step, at most, to generate and to train."""
    evaluated: float = 0.0
    """Answers that are evaluated for each answer that is trained on."""

    def seconds(self, speed: Speed) -> float:
        """Return the seconds of one lockstep step, with its share of evaluations."""
        evaluating = self.evaluated * self.generating
        return (self.training + self.generating + evaluating) / speed.products + self.calls * speed.call

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{self.parameters / 1e6:.1f} M parameters",
                f"trainer: {_format_terms(self.trainer)}",
                f"copies in host memory: {_format_terms(self.copies)}",
                f"each engine: {memory_size(self.engine)}",
                f"a step: about {self.training:.0e} operations to train and {self.generating:.0e} to generate",
            ]
        )


def forecast(config: Config, files: ModelFiles, lengths: Lengths | None = None) -> Forecast:
    """Estimate a run from a configuration and a model that passed `preflight`.

    Memory is that of the longest rows; work is that of `lengths`, by default the longest too. Raises
    `ModelUnreadable` if config.json lacks the sizes of a decoder like Llama.
    """
    shape, count = ModelShape.from_config(files.config), files.parameters
    completion = min(config.sampling.max_tokens, shape.context - 1)
    prompt = min(config.engine.max_prompt_tokens, shape.context - completion)
    engine, adapted = engine_memory(config, shape), bool(config.adapter.rank)
    if EngineKind.of(config.engine.kind).batches:
        wider = BYTES[cpu_products(config.model.serve)] // BYTES[config.model.serve]
        copies = 1 if adapted else 2  # on CPU it loads whole weights beside those that generate
        served = copies * wider * engine.weights + config.engine.kv_cache_gib * GIB
    else:  # it merges an adapter into a copy of the base
        served = (2 if adapted else 1) * engine.weights + engine.per_sequence * engine.sequences
    lengths = lengths or Lengths(prompt, completion)
    answers = config.prompts_per_step * config.group_size
    tokens = config.prompts_per_step * lengths.prompt + answers * lengths.completion
    passes = 4 if adapted else 6  # frozen weights get no gradient
    passes += 2 if config.trainer.checkpoint_activations else 0
    passes += 2 if config.objective.resolve().needs_first_look else 0
    trainer = rank_memory(config, shape, shards=config.trainer.ranks, on_cpu=True).terms
    return Forecast(
        count,
        trainer,
        _copies(config, trained_parameters(config, shape) if adapted else count, trainer),
        served,
        float(passes) * count * tokens * config.updates_per_batch,
        0.0 if config.run.mode == "offline" else 2.0 * count * tokens,
        _calls(config, shape.layers, lengths, passes),
        config.evaluation_share,
    )


def _calls(config: Config, layers: int, lengths: Lengths, passes: int) -> float:
    """Return the small calls of a step: those of every micro-batch, of every token that an engine adds, of answers."""
    each, answers = MODEL_CALLS + layers * LAYER_CALLS, config.prompts_per_step * config.group_size
    tokens = config.prompts_per_step * lengths.prompt + answers * lengths.completion
    training = config.updates_per_batch * math.ceil(tokens / config.trainer.token_budget) * passes / 2 * each
    if config.run.mode == "offline":
        return training + answers * ANSWER_CALLS
    rounds = math.ceil(config.fresh / (config.workers.groups_at_once * config.workers.count))
    generating = rounds * lengths.completion * each + answers * ANSWER_CALLS
    return training + (1 + config.evaluation_share) * generating


def _copies(config: Config, published: int, trainer: Mapping[str, int]) -> dict[str, int]:
    """Return what the first rank holds in host memory: a checkpoint while it is written, and published weights.

    `published` is their number of parameters.
    """
    saved = sum(trainer.get(name, 0) for name in ("master weights", "AdamW", "reference policy"))
    if config.run.mode == "offline":
        return {"checkpoint": saved}
    state = BYTES[config.model.serve] * published
    workers = config.workers.count if config.run.place == "local" else 0  # on Ray they have processes of their own
    return {"checkpoint": saved, "published weights": state} | (
        {"weights of workers": workers * state} if workers else {}
    )


def _format_terms(terms: Mapping[str, int]) -> str:
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    shown = ", ".join(f"{name} {memory_size(size)}" for name, size in ordered)
    return f"{memory_size(sum(terms.values()))} ({shown})"
