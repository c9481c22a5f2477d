"""The whole configuration of a run, and the rules between its sections. No torch.

All problems are reported at once, each with the nearest valid value. Every problem starts with its key, so that
`toml_file.py` can add the line number.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo

from offbeat.config.objective import ObjectiveConfig
from offbeat.config.sections import (
    ClusterConfig,
    EngineConfig,
    EvaluationConfig,
    ModelConfig,
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
from offbeat.errors import ConfigError, suggest_nearest
from offbeat.objective.presets import PRESETS, Preset
from offbeat.objective.spec import Need


class Config(Section):
    """The configuration of a run.

    >>> config = parse({"prompts_per_step": 32, "group_size": 8, "sync": {"every": 10}})
    >>> config.plan
    '32 prompts × 8 = 256 completions a step → 1 update; sync every 10 steps: lag 0 to 9'
    """

    seed: int = 0
    """Every random stream is derived from this seed by name. Change it to repeat a run with other randomness."""
    steps: Positive = 200
    """Number of steps, one batch each."""
    prompts_per_step: Positive = 32
    """B: groups per step, over all devices. Raise it for less noisy gradients."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """G: completions per prompt. Raise it if many groups have equal rewards."""
    updates_per_batch: Positive = 1
    """i: optimizer updates per batch. Raise it to learn more from each batch, at the cost of more drift."""
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
        """The largest lag of a trained group: run.max_lag, or sync.every - 1."""
        if self.run.max_lag is not None:
            return self.run.max_lag
        return self.sync.every - 1

    @property
    def fresh(self) -> int:
        """Number of new groups in a batch; the others are replayed."""
        if self.sampler.mode != "replay":
            return self.prompts_per_step
        return self.prompts_per_step - max(1, round(self.sampler.share * self.prompts_per_step))

    @property
    def plan(self) -> str:
        """The batch arithmetic and the lag, in words."""
        updates = "1 update" if self.updates_per_batch == 1 else f"{self.updates_per_batch} updates"
        steps = "step: lag 0" if self.sync.every == 1 else f"{self.sync.every} steps: lag 0 to {self.largest_lag}"
        completions = self.prompts_per_step * self.group_size
        return (
            f"{self.prompts_per_step} prompts × {self.group_size} = {completions} completions a step → {updates}; "
            f"sync every {steps}"
        )

    def problems(self) -> list[str]:
        """Return the conflicts between sections."""
        found = self.objective.problems() + self.sync.problems() + self._mode_problems()
        found += self._objective_problems()
        if self.optimizer.warmup_steps > self.steps:
            found.append(
                f"optimizer.warmup_steps = {self.optimizer.warmup_steps}: the run ends before the warm-up, at steps = "
                f"{self.steps}; set at most {self.steps}"
            )
        if self.run.max_lag is not None and self.run.max_lag < self.sync.every - 1:
            found.append(
                f"run.max_lag = {self.run.max_lag}: with sync.every = {self.sync.every} workers could not generate "
                f"between two publishes; set at least {self.sync.every - 1}"
            )
        if self.trainer.ranks > 1 and self.run.place == "local":
            found.append(f"trainer.ranks = {self.trainer.ranks}: a local run has one rank; set run.place = 'ray'")
        preset, objective = PRESETS[self.objective.preset], self.objective.resolve()
        if self.sampling.truncated and Need.BEHAVIOR in objective.needs:
            found.append(
                f"sampling.top_p = {self.sampling.top_p}, top_k = {self.sampling.top_k}: {preset.name!r} needs "
                "the log-probs of the whole distribution, which truncation changes; set top_p = 1.0 and top_k = 0"
            )
        if not self.objective.untested_lag and self.largest_lag > preset.lag_limit:
            found.append(self._lag_problem(preset))
        if self.reference.refresh_every and Need.REFERENCE not in objective.needs:
            found.append(
                f"reference.refresh_every = {self.reference.refresh_every}: no term uses the reference policy; "
                "set objective.kl_coefficient above 0, or remove reference.refresh_every"
            )
        return found

    def _objective_problems(self) -> list[str]:
        return self.objective.problems_with_one_update() if self.updates_per_batch == 1 else []

    def _mode_problems(self) -> list[str]:
        found = []
        if self.run.mode != "offline" and self.sampler.mode == "offline":
            found.append(
                f"run.mode = {self.run.mode!r} generates groups, but sampler.mode = 'offline' uses none of them; set "
                "run.mode = 'offline', or sampler.mode = 'fresh'"
            )
        if self.run.mode == "offline" and self.sampler.mode != "offline":
            found.append(f"sampler.mode = {self.sampler.mode!r}: run.mode = 'offline' needs sampler.mode = 'offline'")
        if self.run.mode == "offline" and not self.run.experience:
            found.append("run.experience = '': run.mode = 'offline' needs an experience log; set its path")
        if self.run.mode != "offline" and self.fresh < 1:
            found.append(
                f"sampler.share = {self.sampler.share} of prompts_per_step = {self.prompts_per_step} leaves no room "
                "for fresh groups; raise prompts_per_step, or lower sampler.share"
            )
        return found

    def _lag_problem(self, preset: Preset) -> str:
        limit, lag = preset.lag_limit, self.largest_lag
        if self.run.max_lag is None:
            setting, valid = f"sync.every = {self.sync.every}", f"sync.every = {int(limit) + 1}"
        else:
            setting, valid = f"run.max_lag = {lag}", f"run.max_lag = {int(limit)}"
        tolerant = ", ".join(p.name for p in PRESETS.values() if p.lag_limit >= lag)
        return (
            f"{setting} gives lag up to {lag}, but {preset.name!r} is reported up to lag {limit:g} "
            f"({preset.lag_evidence}); set {valid}, choose one of {tolerant}, or set objective.untested_lag = true"
        )


@dataclass(frozen=True)
class Examined:
    """A configuration and everything wrong with it.

    >>> examined = examine({"group_sise": 8, "sync": {"every": 4, "at_least": 9}})
    >>> for problem in examined.problems:
    ...     print(problem)
    group_sise is not a setting; did you mean 'group_size'?
    sync.at_least = 9 leaves no step to publish at; set at most sync.every = 4
    """

    config: Config
    """Faulty settings have their defaults."""
    problems: list[str]
    faulty: frozenset[str]
    """Keys of faulty settings. Further problems that mention them are not reported."""

    def also(self, problems: Sequence[str]) -> "Examined":
        """Add problems, except those that only the default of a faulty setting causes."""
        new = [problem for problem in problems if not any(key in problem for key in self.faulty)]
        return Examined(self.config, self.problems + new, self.faulty)


def examine(data: Mapping[str, Any]) -> Examined:
    """Find every problem: settings that are invalid by themselves, and settings that conflict."""
    remaining: dict[str, Any] = copy.deepcopy(dict(data))
    problems: dict[str, list[str]] = {}
    while True:
        try:
            config = Config.model_validate(remaining)
            break
        except ValidationError as invalid:
            for error in invalid.errors():
                key = _leave_out(remaining, error["loc"])
                problems.setdefault(key, []).append(_explain(key, data, dict(error)))
    faulty = frozenset(problems)
    return Examined(config, [message for found in problems.values() for message in found], faulty).also(
        config.problems()
    )


def parse(data: Mapping[str, Any]) -> Config:
    """Return a valid configuration, or raise a `ConfigError` that lists everything wrong with it."""
    examined = examine(data)
    if examined.problems:
        raise ConfigError(examined.problems)
    return examined.config


def _knobs() -> dict[str, FieldInfo]:
    return {key: field for key, field in _fields(Config) if _section(field) is None}


def _fields(section: type[BaseModel], prefix: str = "") -> list[tuple[str, FieldInfo]]:
    found = []
    for name, field in section.model_fields.items():
        found.append((prefix + name, field))
        if (inner := _section(field)) is not None:
            found += _fields(inner, f"{prefix}{name}.")
    return found


def _section(field: FieldInfo) -> type[Section] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Section) else None


def _leave_out(data: dict[str, Any], location: Sequence[int | str]) -> str:
    """Remove the setting that an error is about, even if the error is deep inside its value; returns its key."""
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
    """Turn a pydantic error into a message with the key, the value and what to do."""
    given: Any = data
    for part in key.split("."):
        given = given[part]
    setting, kind = f"{key} = {given!r:.80}", error["type"]
    if kind == "extra_forbidden":
        return f"{key} is not a setting; {_nearest_key(key)}"
    if kind == "model_type":
        return f"{setting} is not a table; write [{key}] and its settings under it"
    if kind == "value_error":
        return f"{setting} {error['ctx']['error']}"
    if kind in ("enum", "literal_error"):
        choices = re.findall(r"'([^']*)'", error["ctx"]["expected"])
        return f"{setting} is not a choice; {suggest_nearest(str(error['input']), choices)}"
    default = _knobs()[key].default
    way_out = "leave it out for no value" if default is None else f"the default is {default!r}"
    return f"{setting}: {error['msg'][0].lower()}{error['msg'][1:]}; {way_out}"


def _nearest_key(key: str) -> str:
    """Suggest the same name in another table, or the nearest name in this one."""
    table, _, name = key.rpartition(".")
    elsewhere = [known for known in _knobs() if known.rpartition(".")[2] == name]
    if elsewhere:
        return f"did you mean {' or '.join(map(repr, elsewhere))}?"
    inside = [known for known, _ in _fields(Config) if known.rpartition(".")[0] == table]
    return suggest_nearest(name, [known.rpartition(".")[2] for known in inside])
