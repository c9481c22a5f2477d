"""Memory and time of a run, reckoned from a model's files before anything is loaded. No torch.

An estimate, good for "does it fit at all": a decoder of the Llama kind is assumed, and completions as long as they may
get. The run itself measures before its first step (`trainer/estimate.py`).
"""

import time
from dataclasses import dataclass
from typing import Final

import numpy as np

from offbeat.config import Config
from offbeat.objective.spec import Need
from offbeat.run.model_files import ModelFiles

BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
GIB: Final = 2**30
CHUNK_TOKENS: Final = 512
"""Of the head; as in `trainer/forward.py`."""


@dataclass(frozen=True)
class Forecast:
    """What a run will take.

    >>> print(Forecast(135_000_000, {"AdamW": 1 << 30, "gradients": 1 << 29}, 3 << 28, 9e11, 2e11))
    135.0 M parameters
    trainer: 1.5 GiB (AdamW 1.0 GiB, gradients 512 MiB)
    each engine: 768 MiB
    a step: at most 9e+11 operations to train on and 2e+11 to generate
    """

    parameters: int
    trainer: dict[str, int]
    """Bytes of one rank, by what for."""
    engine: int
    """Bytes of one engine on CPU."""
    training: float
    """Operations of one step, at most."""
    generating: float

    def seconds(self, speed: float) -> float:
        """Of one step at so many operations a second, in lockstep."""
        return (self.training + self.generating) / speed

    def __str__(self) -> str:
        terms = sorted(self.trainer.items(), key=lambda term: -term[1])
        shown = ", ".join(f"{name} {_size(size)}" for name, size in terms)
        return "\n".join(
            [
                f"{self.parameters / 1e6:.1f} M parameters",
                f"trainer: {_size(sum(self.trainer.values()))} ({shown})",
                f"each engine: {_size(self.engine)}",
                f"a step: at most {self.training:.0e} operations to train on and {self.generating:.0e} to generate",
            ]
        )


def forecast(config: Config, files: ModelFiles) -> Forecast:
    """For a configuration and a model that passed `preflight`."""
    count, ranks = files.parameters, config.trainer.ranks
    compute, serve = BYTES[config.model.compute], BYTES[config.model.serve]
    completion, group = config.sampling.max_tokens, config.group_size
    prompt = min(config.engine.max_prompt_tokens, files.size("max_position_embeddings", 1 << 30) - completion)
    hidden, layers = files.size("hidden_size"), files.size("num_hidden_layers")
    inner, vocabulary = files.size("intermediate_size", 4 * hidden), files.size("vocab_size")
    held = {"master weights": 4, "AdamW": 8, "gradients": 4, "parameters": compute if compute < 4 else 0}
    if Need.REFERENCE in config.objective.resolve().needs:
        held["reference policy"] = compute
    terms = {name: each * count // ranks for name, each in held.items()}
    # What a layer keeps for its backward pass: twelve vectors of its width and four of its inner width for each token
    # (within a quarter of what is measured on SmolLM2), or only its input where activations are computed twice.
    kept = hidden if config.trainer.checkpoint_activations else 12 * hidden + 4 * inner
    terms["activations"] = config.trainer.token_budget * layers * kept * compute
    terms["logits"] = 3 * 4 * CHUNK_TOKENS * vocabulary
    written = config.prompts_per_step * group * completion
    trained = written + config.prompts_per_step * prompt
    passes = 8 if config.trainer.checkpoint_activations else 6
    return Forecast(
        count,
        {name: size for name, size in terms.items() if size},
        count * serve + _cache(config, files, prompt + completion, serve),
        float(passes) * count * trained * config.updates_per_batch,
        0.0 if config.run.mode == "offline" else 2.0 * count * trained,
    )


def _cache(config: Config, files: ModelFiles, length: int, each: int) -> int:
    """Keys and values."""
    if config.engine.kind == "vllm":
        return config.engine.kv_cache_gib * GIB
    heads = files.size("num_attention_heads", 1)
    width = files.size("head_dim", files.size("hidden_size") // heads) * files.size("num_key_value_heads", heads)
    rows = config.workers.groups_at_once * config.group_size
    return 2 * files.size("num_hidden_layers") * width * length * rows * each


def _size(count: int) -> str:
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.0f} MiB"


def machine_speed() -> float:
    """Operations a second of this machine's CPU in float32: a matrix product in numpy, the median of five."""
    matrix = np.ones((512, 512), np.float32)
    taken = []
    for _ in range(6):
        begun = time.perf_counter()
        matrix @ matrix
        taken.append(time.perf_counter() - begun)
    return 2 * 512**3 / sorted(taken[1:])[2]  # the first one starts threads
