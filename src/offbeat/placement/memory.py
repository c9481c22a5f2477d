"""How many bytes a rank of the trainer and an engine need, from the model's shape alone: the one model of memory.

Device plans, `offbeat check`, the `estimated` event and the error of a step that does not fit all use it. No torch.

A rank holds its slices all the time (`held`), and in each micro-batch passes three moments, of which the largest
decides (`moments`):

    head      the output head is gathered and computes its gradient; every layer's activations are kept
    layer     the last layer runs backward; with recomputed activations, all of one layer's are there as well
    reduce    the gradients of embeddings and head are summed over ranks in float32

`lab/parity/fake_ranks.py` compares this with what torch's memory tracker counts on fake ranks, at real shapes.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from offbeat.config import Config
from offbeat.config.parts import EngineKind
from offbeat.errors import StepOutOfMemory
from offbeat.objective.spec import Need
from offbeat.placement.hardware import GIB, cpu_products
from offbeat.placement.shape import ModelShape

BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
CONTEXT_BYTES: Final = GIB
"""A process on a GPU: the CUDA context, libraries and NCCL's buffers."""
USABLE: Final = 0.92
"""Share of a GPU's memory that a plan gives away. The rest is lost to fragmentation and to the driver."""
ENGINE_BYTES: Final = 2 * GIB
"""What vLLM needs beside weights, keys and values, and logits: its context, CUDA graphs and workspaces."""
LOGIT_COPIES: Final = 3
"""Copies in float32 of a chunk of logits that exist at once: log-probs, probabilities and their gradient."""


ADVICE: Final = {
    "activations": "lower token_budget, or turn checkpoint_activations on",
    "backward of a layer": "lower token_budget, or compute in bfloat16",
    "logits of a chunk": "lower trainer.chunk_tokens",
    "gradient of the head": "compute in bfloat16",
    "gathered layers": "compute in bfloat16",
    "reference policy": "kl_coefficient = 0 needs none",
} | dict.fromkeys(("AdamW", "master weights", "parameters", "frozen weights", "gradients"), "train on more ranks")
"""How to lower each term of a rank."""


@dataclass(frozen=True)
class RankMemory:
    """The bytes of one rank at the peak of a step, by purpose.

    >>> print(RankMemory({"AdamW": 8 << 30}, {"head": {"activations": 20 << 30}, "layer": {"activations": 9 << 30}}))
    28.0 GiB at the peak of a step
      20.0 GiB  activations: lower token_budget, or turn checkpoint_activations on
       8.0 GiB  AdamW: train on more ranks
    """

    held: Mapping[str, int]
    moments: Mapping[str, Mapping[str, int]]

    @property
    def terms(self) -> dict[str, int]:
        """What is held, and what the largest moment adds."""
        largest = max(self.moments.values(), key=lambda moment: sum(moment.values()))
        return {name: size for name, size in {**self.held, **largest}.items() if size}

    @property
    def peak(self) -> int:
        return sum(self.terms.values())

    @property
    def ordered(self) -> list[tuple[str, int]]:
        """The terms, the largest first."""
        return sorted(self.terms.items(), key=lambda term: -term[1])

    def advice(self, most: int | None = None) -> str:
        """Return a line for each of the `most` largest terms, with the setting that lowers it."""
        return "\n".join(f"  {size / GIB:4.1f} GiB  {name}: {ADVICE[name]}" for name, size in self.ordered[:most])

    def __str__(self) -> str:
        return f"{self.peak / GIB:.1f} GiB at the peak of a step\n{self.advice()}"

    @property
    def between_steps(self) -> int:
        """Bytes between two steps, when there are no gradients."""
        return sum(size for name, size in self.held.items() if name != "gradients")

    @property
    def movable(self) -> int:
        """Bytes that can wait in host memory while the engine has its turn: masters, moments, and frozen weights."""
        masters = self.held["master weights"] if self.held.get("parameters") else 0
        return self.held["AdamW"] + masters + self.held.get("frozen weights", 0)


@contextmanager
def explain_memory_errors(memory: RankMemory | None) -> Iterator[None]:
    """Turn an out-of-memory error into one that names the largest terms, if they are known, and what to change.

    >>> with explain_memory_errors(RankMemory({"AdamW": 1 << 30}, {"head": {"activations": 40 << 30}})):
    ...     raise MemoryError("tried to allocate 2.00 GiB")
    Traceback (most recent call last):
    ...
    offbeat.errors.StepOutOfMemory: a step does not fit into memory (tried to allocate 2.00 GiB). Largest terms:
      40.0 GiB  activations: lower token_budget, or turn checkpoint_activations on
       1.0 GiB  AdamW: train on more ranks
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        typed = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"  # torch's
        if not typed and not (type(error) is RuntimeError and "allocate memory" in str(error)):  # torch's on CPU
            raise
        cause = str(error).splitlines()[0] if str(error) else "no more memory"
        largest = f"Largest terms:\n{memory.advice(3)}" if memory else f"To need less, {ADVICE['activations']}"
        raise StepOutOfMemory(f"a step does not fit into memory ({cause}). {largest}") from error


def rank_memory(
    config: Config, shape: ModelShape, *, shards: int, reduce_once: bool = False, on_cpu: bool = False
) -> RankMemory:
    """Estimate one rank whose parameters are sharded over `shards` ranks.

    With `reduce_once`, gradients of the whole model wait on every rank until the last micro-batch.
    """
    ranks = config.trainer.ranks
    compute = BYTES[cpu_products(config.model.compute) if on_cpu and ranks == 1 else config.model.compute]
    root, layer, trained = shape.root_parameters, shape.layer_parameters, trained_parameters(config, shape)
    adapted = bool(config.adapter.rank)
    tokens, completion = config.trainer.token_budget, min(config.trainer.token_budget, _completion_tokens(config))
    held = {
        "master weights": 4 * trained // shards,
        "AdamW": 8 * trained // shards,
        "gradients": 4 * trained // (1 if reduce_once else shards),
        "parameters": compute * trained if ranks == 1 and config.model.compute != "float32" else 0,
    }
    if adapted:  # its reference policy is the base, too
        held["frozen weights"] = (compute if ranks == 1 else BYTES[config.model.serve]) * shape.parameters // shards
    elif Need.REFERENCE in config.objective.resolve().needs:
        held["reference policy"] = (compute if ranks == 1 else 4) * shape.parameters // shards
    sharded = ranks > 1
    # Beside what the base keeps, every adapted layer keeps A x.
    kept = _layer_bytes(shape, compute) + compute * config.adapter.rank * len(config.adapter.names)
    inputs = compute * shape.hidden
    recomputed = config.trainer.checkpoint_activations
    activations = tokens * shape.layers * (inputs if recomputed else kept)
    final = tokens * (4 + 2 * compute) * shape.hidden + completion * 2 * compute * shape.hidden
    # Weights that are frozen get no gradient.
    head = 0 if adapted else shape.vocabulary * shape.hidden
    trained_root, trained_layer = (0, trained // shape.layers) if adapted else (root, layer)
    moments = {
        "head": {
            "activations": activations + final,
            "gathered layers": compute * root if sharded else 0,
            "gradient of the head": compute * head + completion * 4 * shape.hidden,
            "logits of a chunk": LOGIT_COPIES * 4 * min(config.trainer.chunk_tokens, completion) * shape.vocabulary,
        },
        "layer": {
            "activations": activations + (tokens * kept if recomputed else 0),
            "gathered layers": compute * (root + 2 * layer) if sharded else 0,
            "backward of a layer": tokens * _temporary_bytes(shape, compute) + (compute + 4 * sharded) * trained_layer,
            "gradient of the head": compute * head,
        },
        "reduce": {
            "gathered layers": compute * root if sharded else 0,
            "gradient of the head": (compute + 4 * sharded) * trained_root,
        },
    }
    return RankMemory(held, moments)


def trained_parameters(config: Config, shape: ModelShape) -> int:
    """Return the number of parameters that the run trains and publishes: those of its adapter, or all."""
    adapter = config.adapter
    return shape.adapter_parameters(adapter.rank, adapter.names) if adapter.rank else shape.parameters


def _completion_tokens(config: Config) -> int:
    return config.group_size * config.prompts_per_step * config.sampling.max_tokens


def _layer_bytes(shape: ModelShape, compute: int) -> int:
    """Return the bytes that a layer keeps for its backward pass, for each token.

    Two norms keep their input in float32, the normalized input and their output. Attention keeps queries, keys and
    values, its output twice (as computed and in the order of the next product) and one float32 number a head. The MLP
    keeps four vectors of its inner width.
    """
    norms = 2 * (4 + 2 * compute) * shape.hidden
    attention = compute * (3 * shape.query_width + 2 * shape.key_width) + 4 * shape.heads
    head_norms = (4 + compute) * (shape.query_width + shape.key_width) if shape.qk_norm else 0
    return norms + attention + head_norms + 4 * compute * shape.inner


def _temporary_bytes(shape: ModelShape, compute: int) -> int:
    """Return the bytes for each token that the backward pass of a layer needs on top: gradients in the MLP."""
    return 3 * compute * shape.inner + 2 * (4 + compute) * shape.hidden


@dataclass(frozen=True)
class EngineMemory:
    """The bytes of an engine on each of its GPUs."""

    weights: int
    workspace: int
    """CUDA graphs, logits and what else vLLM allocates."""
    per_sequence: int
    """Keys and values of one prompt and completion of the greatest length."""
    sequences: int
    """The most completions that run at once."""

    @property
    def least(self) -> int:
        """The least that the engine starts with: one sequence of the greatest length."""
        return self.weights + self.workspace + self.per_sequence

    @property
    def wanted(self) -> int:
        """Bytes with room for all sequences at their greatest length."""
        return self.weights + self.workspace + self.per_sequence * self.sequences


def engine_memory(config: Config, shape: ModelShape) -> EngineMemory:
    """Estimate one GPU of an engine."""
    serve, split = BYTES[config.model.serve], config.engine.tensor_parallel
    length = min(config.engine.max_prompt_tokens + config.sampling.max_tokens, shape.context)
    kv_heads = -(-shape.kv_heads // split)  # a head that cannot be split is repeated
    sequences = config.workers.groups_at_once * config.group_size
    logits = LOGIT_COPIES * 4 * min(sequences, 1024) * shape.vocabulary // split
    adapters = config.adapter_slots * serve * trained_parameters(config, shape) if config.adapter.rank else 0
    return EngineMemory(
        weights=serve * shape.parameters // split,
        workspace=ENGINE_BYTES + logits + adapters,
        per_sequence=2 * shape.layers * kv_heads * shape.head_size * serve * length,
        sequences=sequences,
    )


def cpu_engine_bytes(config: Config, shape: ModelShape) -> int:
    """Return the bytes of an engine on CPU."""
    engine, adapted = engine_memory(config, shape), bool(config.adapter.rank)
    if EngineKind.of(config.engine.kind).batches:
        wider = BYTES[cpu_products(config.model.serve)] // BYTES[config.model.serve]
        copies = 1 if adapted else 2  # it loads whole weights beside those that generate
        return copies * wider * engine.weights + config.engine.kv_cache_gib * GIB
    # It merges an adapter into a copy of the base.
    return (2 if adapted else 1) * engine.weights + engine.per_sequence * engine.sequences


def host_copies(config: Config, published: int, rank: RankMemory) -> dict[str, int]:
    """Return what the first rank holds in host memory: a checkpoint while it is written, and published weights.

    `published` is their number of parameters.
    """
    saved = sum(rank.terms.get(name, 0) for name in ("master weights", "AdamW", "reference policy"))
    if config.run.mode == "offline":
        return {"checkpoint": saved}
    state = BYTES[config.model.serve] * published
    workers = config.workers.count if config.run.place == "local" else 0  # on Ray they have processes of their own
    return {"checkpoint": saved, "published weights": state} | (
        {"weights of workers": workers * state} if workers else {}
    )
