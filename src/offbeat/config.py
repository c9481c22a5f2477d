"""A run's configuration. No torch: it is checked in milliseconds.

`parse` reports all that is wrong at once, each with the nearest thing that would be right. The knobs are in
`sections.py`.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError

from offbeat.nearest import nearest
from offbeat.objective.presets import PRESETS, Preset
from offbeat.objective.spec import Need
from offbeat.sections import (
    EngineConfig,
    EvaluationConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    Positive,
    ReferenceConfig,
    RunConfig,
    SamplerConfig,
    SamplingConfig,
    Section,
    SyncConfig,
    TaskConfig,
    TrainerConfig,
    WorkersConfig,
)


class ConfigError(ValueError):
    """All problems of one configuration."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(f"- {problem}" for problem in problems))


class Config(Section):
    """A run.

    >>> config = parse({"prompts_per_step": 32, "group_size": 8, "sync": {"every": 10}})
    >>> config.plan
    '32 prompts × 8 = 256 completions a step → 1 update; sync every 10 steps: lag 0 to 9'
    """

    seed: int = 0
    """Root of the seed tree: every random stream is derived from it by name."""
    steps: Positive = 200
    """Batches to train on."""
    prompts_per_step: Positive = 32
    """B: groups consumed by one step, over all devices."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """G: completions of one prompt."""
    updates_per_batch: Positive = 1
    """i: optimiser updates on each batch."""
    objective: ObjectiveConfig = ObjectiveConfig()
    sampling: SamplingConfig = SamplingConfig()
    sync: SyncConfig = SyncConfig()
    reference: ReferenceConfig = ReferenceConfig()
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    engine: EngineConfig = EngineConfig()
    workers: WorkersConfig = WorkersConfig()
    sampler: SamplerConfig = SamplerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    trainer: TrainerConfig = TrainerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()

    @property
    def largest_lag(self) -> int:
        """What the run allows: in lockstep v - 1."""
        if self.run.max_lag is not None:
            return self.run.max_lag
        return self.sync.every - 1

    @property
    def fresh(self) -> int:
        """New groups in a batch; the others are replayed."""
        if self.sampler.mode != "replay":
            return self.prompts_per_step
        return self.prompts_per_step - max(1, round(self.sampler.share * self.prompts_per_step))

    @property
    def plan(self) -> str:
        """The batch arithmetic in words."""
        updates = "1 update" if self.updates_per_batch == 1 else f"{self.updates_per_batch} updates"
        steps = "step: lag 0" if self.sync.every == 1 else f"{self.sync.every} steps: lag 0 to {self.largest_lag}"
        completions = self.prompts_per_step * self.group_size
        return (
            f"{self.prompts_per_step} prompts × {self.group_size} = {completions} completions a step → {updates}; "
            f"sync every {steps}"
        )

    def problems(self) -> list[str]:
        """What does not fit together between sections."""
        if found := self.objective.problems():
            return found
        found += self.sync.problems()
        if self.run.mode != "offline" and self.sampler.mode == "offline":
            found.append(
                f"run.mode = {self.run.mode!r} generates, and sampler.mode = 'offline' does not take it; set both"
            )
        if self.run.mode == "offline" and self.sampler.mode != "offline":
            found.append(f"run.mode = 'offline' needs sampler.mode = 'offline', found {self.sampler.mode!r}")
        if self.run.max_lag is not None and self.run.max_lag < self.sync.every - 1:
            found.append(
                f"run.max_lag = {self.run.max_lag}: with sync.every = {self.sync.every} nothing could be generated "
                f"between two publishes; set at least {self.sync.every - 1}"
            )
        preset, objective = PRESETS[self.objective.preset], self.objective.resolve()
        if self.sampling.truncated and Need.BEHAVIOR in objective.needs:
            found.append(
                f"sampling.top_p = {self.sampling.top_p}, top_k = {self.sampling.top_k}: {preset.name!r} compares with "
                "the distribution sampled from, which truncation changes; set top_p = 1.0 and top_k = 0"
            )
        if not self.objective.untested_lag and self.largest_lag > preset.lag_limit:
            found.append(_too_much_lag(preset, self.sync.every))
        if self.reference.refresh_every and Need.REFERENCE not in objective.needs:
            found.append(
                f"reference.refresh_every = {self.reference.refresh_every}: no term uses a reference policy; "
                "set objective.kl_coefficient above 0, or remove it"
            )
        return found


def _too_much_lag(preset: Preset, every: int) -> str:
    patient = ", ".join(p.name for p in PRESETS.values() if p.lag_limit >= every - 1)
    return (
        f"sync.every = {every} gives lag up to {every - 1}, and {preset.name!r} is reported up to lag "
        f"{preset.lag_limit:g} ({preset.lag_evidence}); set sync.every = {int(preset.lag_limit) + 1}, "
        f"choose one of {patient}, or set objective.untested_lag = true"
    )


def parse(data: Mapping[str, Any]) -> Config:
    """A valid configuration, or a `ConfigError` that lists everything wrong with it."""
    try:
        config = Config.model_validate(data)
    except ValidationError as invalid:
        raise ConfigError([_explain(dict(error)) for error in invalid.errors()]) from None
    if problems := config.problems():
        raise ConfigError(problems)
    return config


def load(path: Path) -> Config:
    """`parse` of a TOML file."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError([f"{path} does not exist"]) from None
    except tomllib.TOMLDecodeError as broken:
        raise ConfigError([f"{path} is not TOML: {broken}"]) from None
    return parse(data)


def _explain(error: Mapping[str, Any]) -> str:
    """One pydantic error in a person's words."""
    location = [str(part) for part in error["loc"]]
    key = ".".join(location)
    if error["type"] == "extra_forbidden":
        return f"{key} is not a setting; {nearest(location[-1], _fields_at(location[:-1]))}"
    if error["type"] == "enum":
        expected = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ").split(", ")
        return f"{key} = {error['input']!r} is not a choice; {nearest(str(error['input']), expected)}"
    return f"{key} = {error['input']!r}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _fields_at(location: list[str]) -> list[str]:
    section: type[BaseModel] = Config
    for part in location:
        annotation = section.model_fields[part].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            section = annotation
    return list(section.model_fields)
