"""A run's configuration. No torch: it is checked in milliseconds.

All that is wrong is reported at once, each with the nearest thing that would be right. Every problem begins with the
key it is about, so that `toml_file.py` can say where that stands. The knobs are in `sections.py`.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo

from offbeat.config.sections import (
    ClusterConfig,
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
from offbeat.errors import ConfigError, nearest
from offbeat.objective.presets import PRESETS, Preset
from offbeat.objective.spec import Need


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
    cluster: ClusterConfig = ClusterConfig()

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
        found = self.objective.problems() + self.sync.problems() + self._problems_of_mode()
        if self.optimizer.warmup_steps > self.steps:
            found.append(
                f"optimizer.warmup_steps = {self.optimizer.warmup_steps}: the run ends at steps = {self.steps}, before "
                f"the warm-up does; set at most {self.steps}"
            )
        if self.run.max_lag is not None and self.run.max_lag < self.sync.every - 1:
            found.append(
                f"run.max_lag = {self.run.max_lag}: with sync.every = {self.sync.every} nothing could be generated "
                f"between two publishes; set at least {self.sync.every - 1}"
            )
        if self.trainer.ranks > 1 and self.run.place == "local":
            found.append(f"trainer.ranks = {self.trainer.ranks}: one process is one rank; set run.place = 'ray'")
        preset, objective = PRESETS[self.objective.preset], self.objective.resolve()
        if self.sampling.truncated and Need.BEHAVIOR in objective.needs:
            found.append(
                f"sampling.top_p = {self.sampling.top_p}, top_k = {self.sampling.top_k}: {preset.name!r} compares with "
                "the distribution sampled from, which truncation changes; set top_p = 1.0 and top_k = 0"
            )
        if not self.objective.untested_lag and self.largest_lag > preset.lag_limit:
            found.append(self._too_much_lag(preset))
        if self.reference.refresh_every and Need.REFERENCE not in objective.needs:
            found.append(
                f"reference.refresh_every = {self.reference.refresh_every}: no term uses a reference policy; "
                "set objective.kl_coefficient above 0, or remove it"
            )
        return found

    def _problems_of_mode(self) -> list[str]:
        found = []
        if self.run.mode != "offline" and self.sampler.mode == "offline":
            found.append(
                f"run.mode = {self.run.mode!r} generates, and sampler.mode = 'offline' does not take it; set both"
            )
        if self.run.mode == "offline" and self.sampler.mode != "offline":
            found.append(f"sampler.mode = {self.sampler.mode!r}: run.mode = 'offline' needs sampler.mode = 'offline'")
        if self.run.mode == "offline" and not self.run.experience:
            found.append("run.experience = '': run.mode = 'offline' learns from a log; give its path")
        if self.run.mode != "offline" and self.fresh < 1:
            found.append(
                f"sampler.share = {self.sampler.share} of prompts_per_step = {self.prompts_per_step} leaves no room "
                "for fresh groups; raise prompts_per_step, or lower the share"
            )
        return found

    def _too_much_lag(self, preset: Preset) -> str:
        limit, lag = preset.lag_limit, self.largest_lag
        if self.run.max_lag is None:
            asked, less = f"sync.every = {self.sync.every}", f"sync.every = {int(limit) + 1}"
        else:
            asked, less = f"run.max_lag = {lag}", f"run.max_lag = {int(limit)}"
        patient = ", ".join(p.name for p in PRESETS.values() if p.lag_limit >= lag)
        return (
            f"{asked} gives lag up to {lag}, and {preset.name!r} is reported up to lag {limit:g} "
            f"({preset.lag_evidence}); set {less}, choose one of {patient}, or set objective.untested_lag = true"
        )


@dataclass(frozen=True)
class Examined:
    """What could be made of a configuration.

    >>> examined = examine({"group_sise": 8, "sync": {"every": 4, "at_least": 9}})
    >>> for problem in examined.problems:
    ...     print(problem)
    group_sise is not a setting; did you mean 'group_size'?
    sync.at_least = 9 leaves no step to publish at; set at most sync.every = 4
    """

    config: Config
    """With its defaults where a setting is faulty."""
    problems: list[str]
    faulty: frozenset[str]
    """Keys that were left out; what is said about them is not to be said again."""

    def also(self, problems: Sequence[str]) -> "Examined":
        """With further problems, save those that only a faulty setting's default causes."""
        new = [problem for problem in problems if not any(key in problem for key in self.faulty)]
        return Examined(self.config, self.problems + new, self.faulty)


def examine(data: Mapping[str, Any]) -> Examined:
    """Everything wrong in a configuration, settings that are faulty by themselves and those that do not fit."""
    left: dict[str, Any] = copy.deepcopy(dict(data))
    problems: dict[str, list[str]] = {}
    while True:
        try:
            config = Config.model_validate(left)
            break
        except ValidationError as invalid:
            for error in invalid.errors():
                key = _leave_out(left, error["loc"])
                problems.setdefault(key, []).append(_explain(key, data, dict(error)))
    faulty = frozenset(problems)
    return Examined(config, [says for found in problems.values() for says in found], faulty).also(config.problems())


def parse(data: Mapping[str, Any]) -> Config:
    """A valid configuration, or a `ConfigError` that lists everything wrong with it."""
    examined = examine(data)
    if examined.problems:
        raise ConfigError(examined.problems)
    return examined.config


def _knobs() -> dict[str, FieldInfo]:
    """Every setting by its key."""
    return {key: field for key, field in _fields(Config) if _section(field) is None}


def _fields(section: type[BaseModel], before: str = "") -> list[tuple[str, FieldInfo]]:
    found = []
    for name, field in section.model_fields.items():
        found.append((before + name, field))
        if (inner := _section(field)) is not None:
            found += _fields(inner, f"{before}{name}.")
    return found


def _section(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _leave_out(data: dict[str, Any], location: Sequence[int | str]) -> str:
    """Remove the setting an error is about, however deep within its value the error lies; returns its key."""
    known = dict(_fields(Config))
    place = [str(location[0])]
    for part in location[1:]:
        if (field := known.get(".".join(place))) is None or _section(field) is None:
            break
        data = data[place[-1]]
        place.append(str(part))
    del data[place[-1]]
    return ".".join(place)


def _explain(key: str, data: Mapping[str, Any], error: Mapping[str, Any]) -> str:
    """One pydantic error in a person's words."""
    given: Any = data
    for part in key.split("."):
        given = given[part]
    says, kind = f"{key} = {given!r:.80}", error["type"]
    if kind == "extra_forbidden":
        return f"{key} is not a setting; {_nearest_key(key)}"
    if kind == "model_type":
        return f"{says} is not a table; write [{key}] and its settings under it"
    if kind == "value_error":
        return f"{says} {error['ctx']['error']}"
    if kind in ("enum", "literal_error"):
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return f"{says} is not a choice; {nearest(str(error['input']), choices)}"
    default = _knobs()[key].default
    way_out = "leave it out for none" if default is None else f"the default is {default!r}"
    return f"{says}: {error['msg'][0].lower()}{error['msg'][1:]}; {way_out}"


def _nearest_key(key: str) -> str:
    """Of the same table; or the same name in another."""
    table, _, name = key.rpartition(".")
    elsewhere = [known for known in _knobs() if known.rpartition(".")[2] == name]
    if elsewhere:
        return f"did you mean {' or '.join(map(repr, elsewhere))}?"
    inside = [known for known, _ in _fields(Config) if known.rpartition(".")[0] == table]
    return nearest(name, [known.rpartition(".")[2] for known in inside])
