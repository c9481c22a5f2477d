"""The tables of a run's TOML file, with the meaning of every knob under it. No torch."""

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from offbeat.errors import nearest
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import (
    KL,
    Advantage,
    Aggregate,
    CentredBand,
    Gate,
    Importance,
    KLEstimator,
    Need,
    NoGate,
    Objective,
)

Positive = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
Beta = Annotated[float, Field(ge=0, lt=1)]
SinkName = Literal["tensorboard", "wandb", "trackio", "prometheus"]
FROM_TOML = Field(strict=False)
"""Of a choice or a pair: TOML has text and lists for them."""


class Section(BaseModel):
    """A table of the TOML file: frozen, closed to unknown keys, and strict: true is not 1, nor is "8" 8."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class ObjectiveConfig(Section):
    """[objective]: a preset, and what to change in it. What is left out stays as published."""

    preset: str = "rec-oneside-nois"
    """What is optimised; `offbeat objectives` lists them, and for how much lag each is known to be good."""
    advantage: Annotated[Advantage | None, FROM_TOML] = None
    """How rewards of a group become advantages."""
    clip: Annotated[tuple[float, float] | None, FROM_TOML] = None
    """(ε_lo, ε_hi) of the preset's gate; a centred band takes two equal numbers."""
    weight_cap: Annotated[float, Field(gt=0)] | None = None
    """Upper limit of the importance weight."""
    zero_variance_mask: bool | None = None
    """Leave groups without contrast out of loss, KL and counts."""
    aggregate: Annotated[Aggregate | None, FROM_TOML] = None
    """How token terms become one number."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """β of the KL term to the reference policy; 0 needs no reference policy."""
    kl_estimator: Annotated[KLEstimator, FROM_TOML] = KLEstimator.K3
    """k1, k2 or k3; see docs/objectives.md for what each is biased in."""
    untested_lag: bool = False
    """Allow more lag than anybody has reported for this preset."""

    @field_validator("preset")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in PRESETS:
            raise ValueError(f"is not a preset; {nearest(name, PRESETS)}")
        return name

    def resolve(self) -> Objective:
        """The preset with the changes applied."""
        objective = PRESETS[self.preset].objective
        if self.advantage is not None:
            objective = replace(objective, advantage=self.advantage)
        if self.clip is not None:
            objective = replace(objective, gate=_clipped(objective.gate, *self.clip))
        if self.weight_cap is not None:
            objective = replace(objective, weight=Importance(cap=self.weight_cap))
        if self.zero_variance_mask is not None:
            objective = replace(objective, zero_variance_mask=self.zero_variance_mask)
        if self.aggregate is not None:
            objective = replace(objective, aggregate=self.aggregate)
        if self.kl_coefficient > 0:
            # On lagged samples the KL is biased unless weighted, and a preset that needs α anyway can weight it.
            weighted = Need.BEHAVIOR in objective.needs
            penalty = KL(self.kl_coefficient, self.kl_estimator, weighted)
            objective = replace(objective, regularizers=(*objective.regularizers, penalty))
        return objective

    def problems(self) -> list[str]:
        """What does not fit together within the section."""
        found = []
        preset = PRESETS[self.preset].objective
        if self.clip is not None:
            if isinstance(preset.gate, NoGate):
                found.append(f"objective.clip = {self.clip}: {self.preset!r} has no gate to clip with; remove it")
            if isinstance(preset.gate, CentredBand) and self.clip[0] != self.clip[1]:
                found.append(f"objective.clip = {self.clip}: {self.preset!r} has one width; give it twice")
            if min(self.clip) < 0 or self.clip[0] > 1:
                found.append(f"objective.clip = {self.clip}: need 0 ≤ ε_lo ≤ 1 and ε_hi ≥ 0, for instance (0.2, 0.2)")
        if self.weight_cap is not None and not isinstance(preset.weight, Importance):
            cap = f"objective.weight_cap = {self.weight_cap:g}"
            found.append(f"{cap}: {self.preset!r} has no importance weight to cap; remove it")
        return found


def _clipped(gate: Gate, low: float, high: float) -> Gate:
    if isinstance(gate, CentredBand):
        return CentredBand(low)
    if isinstance(gate, NoGate):
        return gate
    return replace(gate, low=low, high=high)


class SamplingConfig(Section):
    """[sampling]: all of it is sent to the engine explicitly; nothing is filled in from a model's defaults."""

    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Behavior log-probs are of the distribution after it."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """1 samples from the whole distribution."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """0 samples from the whole distribution."""
    max_tokens: Positive = 256
    """Longest completion; also the constant of aggregate 'constant'."""

    @property
    def truncated(self) -> bool:
        """Whether some tokens can never be sampled."""
        return self.top_p < 1 or self.top_k > 0


class SyncConfig(Section):
    """[sync]: when the inference side gets new weights."""

    every: Positive = 1
    """v: publish every v steps; lag is then 0 to v - 1. With a drift budget, the longest time without a publish."""
    drift_budget: Annotated[float, Field(gt=0)] | None = None
    """Publish as soon as the mean per-token TV from the behavior policy exceeds this, at the latest after `every`."""
    at_least: Positive = 1
    """Steps between two publishes that drift asks for."""
    anchor_every: Positive = 20
    """Versions between two complete copies in the weight log."""

    def problems(self) -> list[str]:
        """What does not fit together within the section."""
        if self.at_least > self.every:
            return [
                f"sync.at_least = {self.at_least} leaves no step to publish at; set at most sync.every = {self.every}"
            ]
        return []


class ReferenceConfig(Section):
    """[reference]: the policy the KL term pulls towards."""

    refresh_every: Annotated[int, Field(ge=0)] = 0
    """Steps between copies of the policy into the reference; 0 keeps the first."""


class ModelConfig(Section):
    """[model]: what is trained."""

    path: str = ""
    """Directory of a Hugging Face model; code that comes with it is not run."""
    compute: Literal["float32", "bfloat16"] = "bfloat16"
    """What the trainer's matrix products are made in; master weights are float32 either way."""
    serve: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """What is published and what engines compute in."""


class TaskConfig(Section):
    """[task]: prompts and what scores their answers."""

    name: str = "arithmetic"
    """A task of offbeat, or the path of a Python file of your own."""
    options: dict[str, Any] = {}
    """Settings of the task."""
    scorers: Positive = 2
    """Scoring processes."""
    memory_mib: Positive = 2048
    """Cap for each scoring process."""


class EngineConfig(Section):
    """[engine]: what generates."""

    kind: Literal["hf", "vllm"] = "vllm"
    """transformers, slow and bitwise reproducible, or vLLM."""
    max_prompt_tokens: Positive = 1024
    """Room for the prompt; longer ones are refused."""
    on_update: Literal["keep", "drain"] = "keep"
    """At a load, what is being written goes on under the new version, or is finished first."""
    threads: Positive = 1
    """On CPU, of each engine."""
    kv_cache_gib: Positive = 1
    """On CPU, memory for keys and values of each engine."""
    gpu_memory_utilization: Share = 0.9
    """On GPU, the share that vLLM takes."""


class WorkersConfig(Section):
    """[workers]: who generates."""

    count: Annotated[int, Field(ge=0)] = 1
    """Workers that the run starts; others may join with `offbeat worker`."""
    groups_at_once: Positive = 16
    """Groups in flight on each."""
    lease_seconds: Annotated[float, Field(gt=0)] = 600.0
    """How long a worker may take for a group before somebody else gets the prompt."""


class SamplerConfig(Section):
    """[sampler]: which groups a step takes."""

    mode: Literal["fresh", "replay", "offline"] = "fresh"
    """Each group once; a share from the past; or epochs over a log that is there."""
    share: Share = 0.5
    """Of a replaying batch, from the past."""
    reuse_budget: Annotated[int, Field(ge=2)] = 4
    """How often a replayed group is drawn in all."""
    cooldown: Annotated[int, Field(ge=0)] = 0
    """Steps that must pass between two draws of one group."""
    epochs: Positive | None = None
    """Of offline mode; nothing goes on without end."""
    refill: Positive = 4
    """Groups without contrast are replaced by asking for more prompts, up to this multiple of the batch."""


class OptimizerConfig(Section):
    """[optimizer]: AdamW."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """After the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps of linear rise."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """What the rate does after the warm-up, until the last step."""
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The share of the peak that is left at the end."""
    betas: Annotated[tuple[Beta, Beta], FROM_TOML] = (0.9, 0.999)
    """beta1 = 0 forgets the direction of earlier batches: for jumps in lag."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """On matrices only."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Of all gradients together."""


class TrainerConfig(Section):
    """[trainer]: how a step is computed."""

    ranks: Positive = 1
    """Processes that train one policy together; more than one needs run.place = "ray"."""
    token_budget: Positive = 4096
    """Tokens of a micro-batch, padding included."""
    checkpoint_activations: bool = False
    """Compute activations twice instead of keeping them."""
    save_every: Positive = 50
    """Steps between checkpoints."""
    keep: Annotated[int, Field(ge=2)] = 2
    """Checkpoints kept."""


class EvaluationConfig(Section):
    """[evaluation]: pass rates beside the run."""

    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0 makes none."""
    prompts: Positive = 64
    """Always the same ones."""
    samples: Positive = 1
    """Answers to each prompt."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Of these answers."""


class RunConfig(Section):
    """[run]: how the parts are put together."""

    place: Literal["local", "ray"] = "local"
    """Everything in this process, or every part an actor of Ray."""
    mode: Literal["lockstep", "concurrent", "offline"] = "lockstep"
    """Wait for each other; workers run ahead within `max_lag`; or no workers at all."""
    max_lag: Annotated[int, Field(ge=0)] | None = None
    """Older groups are not trained on; by default the largest lag that the cadence makes."""
    experience: str = ""
    """An experience log to start from or to share; by default one in the run directory."""
    patience: Annotated[float, Field(gt=0)] = 1800.0
    """Seconds without a new group, or for one thing asked of the trainer, before the run gives up."""
    sinks: Annotated[tuple[SinkName, ...], FROM_TOML] = ()
    """Where metrics go beside events.jsonl; one that fails does not stop the run."""
    silence: Annotated[float, Field(ge=5)] = 15.0
    """Seconds without a sign of life after which an engine, a worker or a rank counts as lost."""


class ClusterConfig(Section):
    """[cluster]: Ray, where run.place = "ray"."""

    address: str = ""
    """Of a Ray cluster that is there, with token authentication; by default one is started, on loopback only."""
    scoring: Positive = 1
    """Scoring pools of `task.scorers` processes each; workers are spread over them."""
    restarts: Annotated[int, Field(ge=0)] = 3
    """How often in a row, without a new checkpoint, a run that lost a rank goes on by itself."""
