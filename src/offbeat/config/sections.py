"""The tables of a run's TOML file; [objective] is in objective.py. No torch.

The docstring under a setting says what it does and when to change it.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationInfo, field_validator

from offbeat.config.parts import ENGINES, SINKS, Named
from offbeat.hub import model_directory

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
FROM_TOML = Field(strict=False)
"""For choices and pairs, which TOML writes as text and lists."""
ALL_LINEAR: Final = "all-linear"
LINEAR_LAYERS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""The linear layers of a block in models of the Llama family. The output head is not one of them."""
FULL_RATE: Final = 5e-6
"""A learning rate up to this one looks like a rate for training all weights."""
ALPHA: Final = 32.0
ENGINE_ARGUMENTS: Final = frozenset((
    "all2all_backend", "async_scheduling", "attention_backend", "attention_config", "block_size",
    "collect_detailed_traces", "compilation_config", "cpu_distributed_timeout_seconds", "cudagraph_capture_sizes",
    "cudagraph_metrics", "disable_cascade_attn", "disable_custom_all_reduce", "disable_hybrid_kv_cache_manager",
    "distributed_timeout_seconds", "enable_chunked_prefill", "enable_cumem_allocator", "enable_dbo", "enable_eplb",
    "enable_expert_parallel", "enable_flashinfer_autotune", "enable_layerwise_nvtx_tracing",
    "enable_logging_iteration_details", "enable_mfu_metrics", "enforce_eager", "eplb_config",
    "expert_placement_strategy", "gdn_prefill_backend", "ignore_patterns", "ir_op_priority", "jit_monitor_mode",
    "jit_monitor_verbose", "kda_decode_backend", "kda_prefill_backend", "kernel_config", "kv_cache_memory_bytes",
    "kv_cache_metrics", "kv_cache_metrics_sample", "kv_offloading_backend", "kv_offloading_size",
    "language_model_only", "limit_mm_per_prompt", "linear_backend", "log_config_file", "log_level",
    "logging_config", "long_prefill_token_threshold", "mamba_backend", "mamba_block_size", "mamba_cache_mode",
    "mamba_config", "max_cudagraph_capture_size", "max_num_active_seqs", "max_num_batched_tokens",
    "max_num_queued_reqs", "max_num_queued_tokens", "max_num_scheduled_tokens", "max_parallel_loading_workers",
    "moe_backend", "num_gpu_blocks_override", "numa_bind", "numa_bind_cpus", "numa_bind_nodes",
    "optimization_level", "otlp_traces_endpoint", "performance_mode", "prefill_schedule_interval",
    "prefix_cache_retention_interval", "profiler_config", "pt_load_map_location", "renderer_num_workers",
    "safetensors_load_strategy", "safetensors_prefetch_block_size", "safetensors_prefetch_num_threads",
    "scheduler_reserve_full_isl", "scheduling_policy", "served_model_name", "shutdown_timeout", "skip_mm_profiling",
    "sleep_mode_offload_cudagraph", "sparse_indexer_topk_backend", "ubatch_size", "use_tqdm_on_load", "watermark",
))  # fmt: skip
"""What `engine.extra` may set of vLLM: arguments about speed, memory and logs. Any other could change which tokens are
sampled or their log-probs, without an error, or run code and processes that offbeat does not know of."""
ARGUMENT_SETTINGS: Final = {
    "model": "model.path",
    "dtype": "model.serve",
    "max_model_len": "engine.max_prompt_tokens and sampling.max_tokens",
    "max_num_seqs": "workers.groups_at_once and group_size",
    "gpu_memory_utilization": "engine.gpu_memory_utilization",
    "tensor_parallel_size": "engine.tensor_parallel",
    "seed": "seed",
}
"""Engine arguments of vLLM that have a setting of their own."""

LOWEST_TEMPERATURE: Final = 0.01
"""Of the distributions that are trained on. vLLM silently raises lower ones, and treats 0 as greedy."""


class Section(BaseModel):
    """A table of the TOML file. Frozen, without unknown keys, and strict: true is not 1, and "8" is not 8."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class SamplingConfig(Section):
    """[sampling]: how completions are sampled. A model's own generation defaults are never used."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """At least 0.01. Raise it to explore more. Behavior log-probs are those of the distribution after temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1 samples from the whole distribution. Less than 1 works only with objectives without behavior log-probs."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 samples from the whole distribution. More than 0 works only with objectives without behavior log-probs."""
    max_tokens: Positive = 256
    """The longest completion. Raise it if many answers are cut off. Also the constant of aggregate 'constant'."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """The shortest completion: before it, tokens that end a completion are not sampled. The reported log-probs are of
    the distribution without these tokens, so it works only with objectives without behavior log-probs."""
    ignore_eos: bool = False
    """Continue after tokens that end a completion, so that every completion has `max_tokens` tokens. Set it to measure
    speed at a known length. Log-probs stay exact, but rewards and evaluations see the text after the end too."""

    @property
    def truncated(self) -> bool:
        """True if some tokens can never be sampled."""
        return self.top_p < 1 or self.top_k > 0

    def problems(self) -> list[str]:
        """Return the conflicts between settings of this section."""
        if self.temperature < LOWEST_TEMPERATURE:
            return [
                f"sampling.temperature = {self.temperature:g}: the log-prob of the sampled token would be 0, and that "
                "of every other token so low that ratios and the engine gap mean nothing; set at least "
                f"{LOWEST_TEMPERATURE}"
            ]
        if self.min_tokens > self.max_tokens:
            return [
                f"sampling.min_tokens = {self.min_tokens} is more than sampling.max_tokens = {self.max_tokens}; set at "
                f"most {self.max_tokens}, or raise sampling.max_tokens"
            ]
        if self.min_tokens and self.ignore_eos:
            return [
                f"sampling.min_tokens = {self.min_tokens} has no effect with sampling.ignore_eos, which makes every "
                "completion sampling.max_tokens long; remove one of them"
            ]
        return []


class SyncConfig(Section):
    """[sync]: when workers get new weights. `every` is the rule, unless one of the three settings after it is set."""

    every: Positive | None = None
    """v: publish every v steps. Raise it to spend less time on syncs: lag is then 0 to v - 1. Left out, it is 1. With
    `drift_budget`, `by_cost` or `cadence`, v is the longest time without a publish; left out, as long as the preset's
    lag limit allows, at most 100."""
    drift_budget: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Publish when the mean per-token TV from the version published last exceeds this. What a drift costs differs by
    objective, task and model: compare it with v = 1 before you trust it."""
    by_cost: bool = False
    """Publish when the gradient that the gate stopped since the last publish has cost more seconds than a publish. Both
    are measured in the run, so there is no number to choose."""
    cadence: Annotated[str, Named()] | None = None
    """Your own rule that decides when to publish: a class with a method `due(since, publish_seconds)`."""
    at_least: Positive = 1
    """Smallest number of steps between two publishes that are not due to `every`. Raise it if publishes are slow."""
    offset: Annotated[int, Field(ge=0)] = 0
    """Train each group this many steps later than it could be: a fixed lag, as with workers that run ahead. Only in
    lockstep mode, to study lag. `every = 1, offset = 10` is the setting of arXiv 2509.24203."""
    anchor_every: Positive = 20
    """Versions between two complete copies in the weight log. Lower it to let new workers start faster."""

    @property
    def adaptive(self) -> bool:
        """True if drift, cost or a rule of your own decides, and `every` is only the longest time."""
        return self.by_cost or self.drift_budget is not None or self.cadence is not None

    def problems(self) -> list[str]:
        """Return the conflicts between settings of this section."""
        found = []
        if self.every is not None and self.at_least > self.every:
            found.append(
                f"sync.at_least = {self.at_least} leaves no step to publish at; set at most sync.every = {self.every}"
            )
        elif self.at_least > 1 and not self.adaptive:
            found.append(
                f"sync.at_least = {self.at_least} has no effect without sync.drift_budget, sync.by_cost or "
                "sync.cadence; remove it"
            )
        if len(rules := [f"sync.{name}" for name in ("by_cost", "drift_budget", "cadence") if getattr(self, name)]) > 1:
            found.append(f"{' and '.join(rules)} are {len(rules)} rules for the same decision; keep one of them")
        return found


class ReferenceConfig(Section):
    """[reference]: the policy toward which the KL term pulls."""

    refresh_every: Annotated[int, Field(ge=0)] = 0
    """Steps between copies of the policy to the reference; 0 never copies. Set it if the KL term slows learning."""


class ModelConfig(Section):
    """[model]: the model to train."""

    path: str = ""
    """Directory of a Hugging Face model, or its name on the hub: `owner/name`. Code in it is not executed."""
    revision: str | None = None
    """Commit, branch or tag of a model of the hub. Left out, the newest commit. The run's own configuration holds the
    commit, so a resumed run and its workers use the same files."""
    compute: Literal["float32", "bfloat16"] = "bfloat16"
    """Dtype of the weights that the trainer multiplies, rounded from float32 masters after each update. A CPU that only
    emulates bfloat16 multiplies them in float32, on one rank. float32 is slower on a GPU; set `serve` to it as well."""
    serve: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Dtype of published weights and of the engines. float32 reduces the engine gap, at twice the memory, and patches
    hold almost every weight. On a CPU that only emulates bfloat16, vLLM computes in float32 with bfloat16 weights."""

    chat_template_kwargs: dict[str, JsonValue] = {}
    """Values for variables of the chat template, in training and evaluation: `{ enable_thinking = false }` switches the
    thinking of Qwen3 off. An exported model has them as defaults."""

    def directory(self) -> Path:
        """Return the directory of the model. A model of the hub is downloaded first, unless it is here already."""
        return model_directory(self.path, self.revision)


class AdapterConfig(Section):
    """[adapter]: a low-rank adapter (LoRA): two small matrices beside each linear layer. Only they are trained."""

    rank: Annotated[int, Field(ge=0)] = 0
    """The inner size of the two matrices; 0 trains all weights. Reinforcement learning needs little: 8 is a good start,
    and ranks from 1 to 32 are reported to learn like full training. Raise it if the run learns more slowly than
    without an adapter."""
    alpha: Annotated[float, Field(gt=0)] = ALPHA
    """The product of the matrices is multiplied by alpha / rank. Leave it and tune the learning rate: with this factor
    the best rate hardly depends on the rank."""
    targets: str | Annotated[tuple[str, ...], FROM_TOML] = ALL_LINEAR
    """The layers that get matrices: `all-linear` is every linear layer but the output head, or a list of names such as
    `["q_proj", "v_proj"]`. Fewer layers save little memory and learn less."""

    @field_validator("targets")
    @classmethod
    def _names(cls, targets: str | tuple[str, ...]) -> str | tuple[str, ...]:
        names = (targets,) if isinstance(targets, str) else targets
        if targets == ALL_LINEAR:
            return targets
        if odd := [name for name in names if not re.fullmatch(r"[A-Za-z0-9_]+", name)]:
            raise ValueError(
                f"holds {odd[0]!r}, which is not the name of a layer; patterns and paths are not supported, because "
                'engines read them differently: write names such as ["q_proj", "v_proj"], or "all-linear"'
            )
        if isinstance(targets, str):
            raise ValueError(f'is one name; write a list, ["{targets}"], or "all-linear"')
        if not targets or len(set(targets)) < len(targets):
            raise ValueError('is empty or names a layer twice; write names such as ["q_proj", "v_proj"]')
        return targets

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the layers."""
        return LINEAR_LAYERS if isinstance(self.targets, str) else self.targets

    def problems(self) -> list[str]:
        """Return the settings that have no effect without a rank."""
        if self.rank:
            return []
        found = [f"adapter.alpha = {self.alpha:g}"] if self.alpha != ALPHA else []
        found += [f"adapter.targets = {list(self.targets)}"] if not isinstance(self.targets, str) else []
        return [f"{one} has no effect without adapter.rank; set adapter.rank = 8, or remove it" for one in found]


class TaskConfig(Section):
    """[task]: where prompts come from and how answers are scored."""

    name: str = "arithmetic"
    """A built-in task, or the path of your own Python file. An offline run without evaluations needs none."""
    options: dict[str, Any] = {}
    """Options of the task, for example `digits` of arithmetic; `offbeat check` lists unknown ones."""
    scorers: Positive = 2
    """Number of scoring processes. Raise it if completions wait for their scores."""
    memory_mib: Positive = 2048
    """Memory limit of each scoring process. Raise it if a reward function needs more."""


class EngineConfig(Section):
    """[engine]: what generates completions."""

    kind: Annotated[str, Named(ENGINES)] = "vllm"
    """`hf` is transformers: slow, but reproducible bit by bit. `vllm` is fast. Your own is a class or function."""
    max_prompt_tokens: Positive = 1024
    """The longest prompt; longer ones are left out, and the run says how many. Lower it to save memory."""
    on_update: Literal["keep", "drain"] = "keep"
    """What happens to unfinished completions when new weights are loaded: `keep` continues them with the new version,
    `drain` finishes them first, so that each comes from one version."""
    threads: Positive | None = None
    """CPU threads of each vLLM process. Only used without a GPU. Left out, engines share all cores if the trainer waits
    for them, in lockstep mode, and otherwise half of them. On Ray it is 1; raise it if cores are idle."""
    kv_cache_gib: Positive = 1
    """Memory for keys and values of each vLLM process. Only used without a GPU; raise it for more groups at once."""
    gpu_memory_utilization: Share | None = None
    """Share of GPU memory that vLLM takes. Left out, the device plan computes it: 0.9 on a GPU of its own, what the
    trainer leaves on a shared one. Lower it if something else uses the GPU."""
    tensor_parallel: Positive = 1
    """GPUs of each vLLM engine, which split every layer between them. Raise it if the model does not fit on one GPU. It
    must divide the model's attention heads."""
    extra: dict[str, Any] = {}
    """More engine arguments of vLLM, passed on as they are: `extra = { max_num_batched_tokens = 8192 }`. Only those
    about speed, memory and logs are accepted. Your own engine may take any."""

    @field_validator("extra")
    @classmethod
    def _allowed(cls, extra: dict[str, Any], info: ValidationInfo) -> dict[str, Any]:
        if info.data.get("kind") not in ENGINES:
            return extra
        refused = [
            f"{name} has a setting of its own: {ARGUMENT_SETTINGS[name]}"
            if name in ARGUMENT_SETTINGS
            else f"{name} is not one of those about speed, memory and logs"
            for name in extra
            if name not in ENGINE_ARGUMENTS
        ]
        if refused:
            raise ValueError(f"sets arguments that it may not: {'; '.join(refused)}; remove them")
        return extra


class WorkersConfig(Section):
    """[workers]: the processes that run engines."""

    count: Annotated[int, Field(ge=0)] = 1
    """Number of workers that the run starts. More can join with `offbeat worker`."""
    groups_at_once: Positive = 16
    """Groups in flight on each worker. Raise it until the engine is busy."""
    lease_seconds: Annotated[float, Field(gt=0)] = 600.0
    """How long a silent worker keeps its prompts before they go to another. A worker whose engine answers renews them,
    so a slow answer needs no higher value. Raise it if workers lose contact for minutes."""


class SamplerConfig(Section):
    """[sampler]: which groups a step trains on."""

    mode: Literal["fresh", "replay", "offline"] = "fresh"
    """`fresh` uses each group once, `replay` adds groups from the past, `offline` makes epochs over an existing log."""
    share: Share = 0.5
    """Share of a batch that is replayed, in replay mode. Raise it if generating is the bottleneck."""
    reuse_budget: Annotated[int, Field(ge=2)] = 4
    """How often a group is used in total, in replay mode. Raise it to reuse more, at the risk of overfitting."""
    retire_drift: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Stop reusing a group when its own drift, the mean (1 - π_k/α)₊ over its tokens, exceeds this. It is measured each
    time the group is trained on. Left out, it is 0.2 in replay mode, and there is no limit offline. Lower it if `ess`
    falls."""
    retire_ess: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Stop reusing a group when the effective sample size of its sequence ratios falls below this; 0.5 suits short
    answers. For long ones sequence ratios vary so much that almost every group would be retired, so it is off."""
    retire_age: Positive | None = None
    """Stop reusing a group this many steps after the version that wrote it. A backstop: drift is the better measure.
    Left out, it is the preset's lag limit, at most 200. Without effect offline."""
    cooldown: Annotated[int, Field(ge=0)] = 0
    """Smallest number of steps between two uses of a group, in replay mode."""
    epochs: Positive | None = None
    """Passes over the log, in offline mode; left out, the run ends only after `steps`."""
    wait_for_scores: bool = False
    """In offline mode: wait for groups that have no score yet, up to run.patience, before the run ends or trains a
    smaller batch. Set it if feedback arrives while the run goes on."""
    refill: bool = False
    """Replace groups of equal rewards by generating more prompts before a batch is trained (DAPO's dynamic sampling).
    Such groups teach only objectives that learn without contrast. objective.zero_variance_mask is a separate choice."""
    refill_limit: Positive = 4
    """Generate at most this multiple of a batch to fill it, then train on a smaller one. Also how many batches in a row
    may have no gradient before the run stops. Raise it if batches stay too small."""


class OptimizerConfig(Section):
    """[optimizer]: AdamW and its learning-rate schedule."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """The peak, after the warm-up. Lower it if drift or entropy moves too fast."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the rate rises linearly. Raise it if the first steps are unstable."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls between the warm-up and the last step."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The rate at the last step, as a share of the peak."""
    betas: Annotated[tuple[Beta, Beta], FROM_TOML] = (0.9, 0.999)
    """Adam's decay rates. beta1 = 0 forgets earlier batches, which helps if the lag jumps."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """AdamW's weight decay. Applies to matrices only."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Limit of the norm over all gradients; larger gradients are scaled down. Lower it if grad_norm jumps."""
    dither: bool = True
    """Start each float32 master at a random place of the interval that rounds to its bfloat16 weight, so that updates
    smaller than the rounding have their effect on average. `false` starts masters at the weights, as usual trainers
    do."""
    max_step_drift: Annotated[float, Field(gt=0, le=1)] = 0.5
    """A step that moves the policy further ends the run before it is published or saved. 1 allows every step."""


class TrainerConfig(Section):
    """[trainer]: how a step is computed, and checkpoints."""

    ranks: Positive = 1
    """Processes that train one policy together with FSDP. More than one needs run.place = "ray"."""
    token_budget: Positive = 4096
    """Tokens of a micro-batch, padding included. Lower it if a step runs out of memory; the result stays the same."""
    chunk_tokens: Positive = 512
    """Tokens whose logits exist at one time. Lower it if a large vocabulary runs out of memory. On a CPU the logits of
    a micro-batch all stay in memory, unless checkpoint_activations is on."""
    checkpoint_activations: bool = False
    """Compute activations twice instead of storing them, on a CPU the logits too: less memory, more time."""
    save_every: Positive = 50
    """Steps between checkpoints. A crash loses at most this many steps."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Number of checkpoints to keep; at least 2, because one may be damaged."""


class EvaluationConfig(Section):
    """[evaluation]: pass rates on fixed prompts that the run does not train on."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0 turns them off. The run's engines answer, so what is evaluated is a published
    version: if none was published since the last evaluation, it waits for the next publish or the last step."""
    prompts: Positive = 64
    """Number of distinct prompts, the same ones each time. If there are fewer, each gets more answers, up to 16. Raise
    it for narrower confidence intervals."""
    samples: Positive = 1
    """Answers per prompt; with 2 or more, pass@k too. Raise it for narrower confidence intervals."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature of these answers."""
    greedy: bool = False
    """Also generate one greedy answer per prompt, and show its pass rate beside that of sampled answers."""
    hold_out: Annotated[float, Field(ge=0, lt=1)] | None = None
    """Share of the task's distinct prompts that is kept out of training for evaluation. Left out, a tenth if `every` is
    above 0: at least 20 prompts but at most a fifth, and none of fewer than 20. A `test` split or `evaluation_examples`
    of the task are used instead. Set it in a run without evaluations to evaluate later with `offbeat eval`. 0 trains on
    everything and evaluates on training prompts."""
    task: str = ""
    """Another task to evaluate on: a built-in one, or the path of your own Python file. Left out, the run's own."""
    options: dict[str, Any] = {}
    """Options of that task."""

    @property
    def holds_out(self) -> bool:
        """True if training leaves out the prompts of evaluation.

        A run that never evaluates keeps all its data, unless it is told to hold some out.
        """
        if self.hold_out is None:
            return self.every > 0 or bool(self.task)
        return self.hold_out > 0 or bool(self.task)

    def problems(self) -> list[str]:
        """Return the conflicts between settings of this section."""
        if not self.options or self.task:
            return []
        return ["evaluation.options has no effect without evaluation.task; remove it, or set the task that it is for"]


class RunConfig(Section):
    """[run]: where and how the run executes."""

    place: Literal["local", "ray"] = "local"
    """`local` runs everything in this process; `ray` runs each part as a Ray actor, on one or more machines."""
    mode: Literal["lockstep", "concurrent", "offline"] = "lockstep"
    """`lockstep`: trainer and workers take turns. `concurrent`: workers run ahead within `max_lag`, which is faster.
    `offline`: no workers."""
    max_lag: Annotated[int, Field(ge=0)] | None = None
    """Fresh groups with more lag are not trained on; replayed ones have the limits of [sampler]. Left out, it is
    sync.every - 1 + sync.offset. Raise it to let workers run ahead."""
    experience: str = ""
    """An existing experience log to start from or to share. Left out, the run directory holds a new one."""
    patience: Annotated[float, Field(gt=0)] = 3600.0
    """Seconds without a new group, or for one call to the trainer, before the run stops with an error. A group that a
    worker has not finished after half of it is cancelled and generated again. Raise it if feedback comes late, or if
    one answer takes longer than that."""
    sinks: Annotated[tuple[Annotated[str, Named(SINKS)], ...], FROM_TOML] = ()
    """Where to send metrics and samples in addition to events.jsonl. A sink that fails does not stop the run. Your
    own is a class or function."""
    silence: Annotated[float, Field(ge=5)] = 15.0
    """Seconds without a heartbeat after which an engine, worker or rank counts as lost. Raise it on a slow or busy
    machine."""


class ClusterConfig(Section):
    """[cluster]: Ray, if run.place = "ray"."""

    address: str = ""
    """Address of an existing Ray cluster with token authentication. Left out, one is started on loopback only."""
    scoring: Positive = 1
    """Number of scoring pools, each with `task.scorers` processes. Raise it if scoring needs several machines."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """How often in a row, without a new checkpoint, a run that lost a rank restarts by itself."""
