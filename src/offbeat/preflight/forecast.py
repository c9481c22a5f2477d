"""Memory and time of a run, estimated from the model's files before anything is loaded. No torch.

    files ─ data_lengths ─ forecast: bytes by `placement/memory`, operations and calls ─ seconds at `speed_now()`

The estimate answers "does it fit at all". It assumes a decoder like Llama and completions of the maximum length. The
run itself computes its largest micro-batch before its first step (`trainer/worst_case.py`).
"""

import json
import math
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np

from offbeat.config import Config
from offbeat.errors import ModelUnreadable
from offbeat.hub import count_elements, model_problems, read_object
from offbeat.imports import missing_modules
from offbeat.placement.hardware import CPUINFO, cache_directory
from offbeat.placement.memory import cpu_engine_bytes, host_copies, rank_memory, trained_parameters
from offbeat.placement.shape import ModelShape
from offbeat.tasks.data import Deferred
from offbeat.tasks.task import make
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
READ: Final = 64
"""Prompts that are read for their lengths."""
TEMPLATE: Final = 8
"""Tokens that a chat template adds to each message, about."""
SECONDS: Final = 0.5
"""How long the speed of this moment is measured."""
SIZE, PRODUCTS, CALLS = 768, 12, 500
"""A measurement's rows of a square matrix, products of two of them, and calls between two looks at the clock."""


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


def data_lengths(config: Config, files: ModelFiles) -> Lengths | None:
    """Return the mean lengths in the data, or None if only a download or a run would tell.

    Completions that have yet to be generated count as long as `sampling.max_tokens` allows.
    """
    if config.run.mode == "offline":
        return _of_log(config)
    options, file = config.task.options, files.path / "tokenizer.json"
    examples = make(config.task.name, options).examples
    local = str(options.get("source", config.task.name)).endswith((".py", ".jsonl", ".parquet"))
    if not file.is_file() or missing_modules(["tokenizers"]) or (isinstance(examples, Deferred) and not local):
        return None
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception:  # tokenizers raises Exception itself; a run that loads this file says what is wrong with it
        return None
    counts = []
    for one in islice(examples, READ):
        messages = [{"content": one.prompt}] if isinstance(one.prompt, str) else one.prompt
        added = 0 if isinstance(one.prompt, str) else TEMPLATE * len(messages)
        counts.append(added + sum(len(tokenizer.encode(str(message["content"])).ids) for message in messages))
    fitting = [count for count in counts if count <= config.engine.max_prompt_tokens]
    return Lengths(sum(fitting) / len(fitting), config.sampling.max_tokens) if fitting else None


def _of_log(config: Config) -> Lengths | None:
    """Count the tokens of the log; a group counts its prompt once."""
    if missing_modules(["lance"]) or not log_exists(config.run.experience):
        return None
    from offbeat.experience.reader import LogReader

    rows = LogReader.open(config.run.experience).index_since(None)[0]
    completions = int(rows.completions.sum())
    return Lengths(0.0, float(rows.tokens.sum()) / completions) if completions else None


def log_exists(uri: str) -> bool:
    """Return True if there is an experience log at `uri`."""
    from offbeat.experience.lance_table import exists

    return exists(f"{uri.rstrip('/')}/groups.lance")


@dataclass(frozen=True)
class Speed:
    """What a processor computes if nothing else runs on it."""

    products: float
    """Floating-point operations a second in products of matrices."""
    call: float = 0.0
    """Seconds of a call of NumPy with a tiny array: the unit of what does not depend on the size of a model."""
    free: float = 1.0
    """Share of the processor that this process gets now."""


ASSUMED_GPU: Final = Speed(100e12)
"""What estimates of hours assume of one GPU."""


def speed_now(seconds: float = SECONDS) -> Speed:
    """Return the machine's speed, and how much of it is free in the next seconds."""
    tiny, fastest, calls = np.ones(8, np.float32), float("inf"), 0
    begun = last = time.perf_counter()
    while last - begun < seconds:
        for _ in range(CALLS):
            np.add(tiny, tiny)
        now = time.perf_counter()
        fastest, last, calls = min(fastest, (now - last) / CALLS), now, calls + CALLS
    return Speed(machine_speed(), fastest, fastest * calls / (last - begun))


def machine_speed() -> float:
    """Return float32 operations a second: the most that was measured, now or before. A busy machine only takes away."""
    path, machine, speed = cache_directory() / "cpu-speed.json", _processor(), measure_speed()
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
        if kept["machine"] == machine and kept["flops"] >= speed:
            return float(kept["flops"])
    except (OSError, ValueError, KeyError, TypeError):  # never measured, or the file is damaged
        pass
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine, "flops": speed}), encoding="utf-8")
    except OSError:  # a home that cannot be written: measure again next time
        pass
    return speed


def measure_speed() -> float:
    """Measure the speed of matrix products. The fastest of them counts: others may have shared the CPU."""
    matrix, seconds = np.ones((SIZE, SIZE), np.float32), []
    for _ in range(PRODUCTS):
        start = time.perf_counter()
        matrix @ matrix
        seconds.append(time.perf_counter() - start)
    return 2 * SIZE**3 / min(seconds)


def _processor() -> str:
    """Return what the speed depends on: the processor's name and how many cores this process may use."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS") or os.environ.get("OPENBLAS_NUM_THREADS") or "all"
    return f"{name}, {cores} cores, {threads} threads"


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
    shape, count, adapted = ModelShape.from_config(files.config), files.parameters, bool(config.adapter.rank)
    completion = min(config.sampling.max_tokens, shape.context - 1)
    lengths = lengths or Lengths(min(config.engine.max_prompt_tokens, shape.context - completion), completion)
    tokens = config.prompts_per_step * (lengths.prompt + config.group_size * lengths.completion)
    passes = 4 if adapted else 6  # frozen weights get no gradient
    passes += 2 if config.trainer.checkpoint_activations else 0
    passes += 2 if config.objective.resolve().needs_first_look else 0
    rank = rank_memory(config, shape, shards=config.trainer.ranks, on_cpu=True)
    return Forecast(
        count,
        rank.terms,
        host_copies(config, trained_parameters(config, shape) if adapted else count, rank),
        cpu_engine_bytes(config, shape),
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


def _format_terms(terms: Mapping[str, int]) -> str:
    ordered = sorted(terms.items(), key=lambda term: -term[1])
    shown = ", ".join(f"{name} {memory_size(size)}" for name, size in ordered)
    return f"{memory_size(sum(terms.values()))} ({shown})"
