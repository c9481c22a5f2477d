"""The whole configuration of a run, and the rules between its sections. No torch.

All problems are reported at once, each with the nearest valid value. Every problem starts with its key, so that
`toml_file.py` can add the line number.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from typing import Annotated, Any

from pydantic import BaseModel, Field, ValidationError
from pydantic.fields import FieldInfo

from offbeat.config.conflicts import conflicts
from offbeat.config.objective import ObjectiveConfig
from offbeat.config.replays import possible_replays
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
from offbeat.objective.presets import PRESETS


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
    def longest(self) -> int:
        """v: the number of steps between two publishes, or the largest number if drift or cost decides."""
        if self.sync.every is not None:
            return self.sync.every
        if not self.sync.adaptive:
            return 1
        return max(self.sync.at_least, 1, min(100, self.steps_within_limit() + 1 - self.sync.offset))

    @property
    def fresh_lag(self) -> int:
        """The largest lag at which a fresh group is trained, in steps: run.max_lag, or v - 1 and the offset."""
        if self.run.max_lag is not None:
            return self.run.max_lag
        return self.longest - 1 + self.sync.offset

    @property
    def retire_age(self) -> int:
        """The number of steps after which a group is not reused."""
        if self.sampler.retire_age is not None:
            return self.sampler.retire_age
        return min(200, self.steps_within_limit())

    @property
    def largest_lag(self) -> float:
        """The largest lag of a trained token, counted in updates; infinite offline, where data may have any age.

        Each of the i updates of a batch moves the policy away from it, so an update counts as a step of lag: a group of
        lag n is trained at up to (n + 1)·i - 1 updates.
        """
        if self.run.mode == "offline":
            return inf
        oldest = max(self.fresh_lag, self.retire_age) if self.sampler.mode == "replay" else self.fresh_lag
        return (oldest + 1) * self.updates_per_batch - 1

    def steps_within_limit(self) -> int:
        """Return the largest lag in steps that keeps `largest_lag` within the preset's limit; at most 1000."""
        limit = inf if self.objective.untested_lag else PRESETS[self.objective.preset].lag_limit
        return 1000 if limit == inf else max(0, int(limit + 1) // self.updates_per_batch - 1)

    @property
    def fresh(self) -> int:
        """Number of new groups in a batch; the others are replayed."""
        if self.sampler.mode != "replay":
            return self.prompts_per_step
        return self.prompts_per_step - max(1, round(self.sampler.share * self.prompts_per_step))

    @property
    def plan(self) -> str:
        """The batch arithmetic, where its groups come from and the lag, in words."""
        updates = "1 update" if self.updates_per_batch == 1 else f"{self.updates_per_batch} updates"
        if self.run.mode == "offline":
            return f"{self.prompts_per_step} groups of the log a step → {updates}; data of any age"
        completions = self.prompts_per_step * self.group_size
        batch = f"{self.prompts_per_step} prompts × {self.group_size} = {completions} completions a step → {updates}"
        return "; ".join([batch, *self._past, f"sync {self._cadence}: {self._lags}"])

    @property
    def _past(self) -> list[str]:
        if self.sampler.mode != "replay":
            return []
        past = self.prompts_per_step - self.fresh
        # What another log holds is not known here.
        share = "" if self.run.experience else f" (on average {self.replayed_share:.0%} of a batch)"
        return [
            f"{past} of the {self.prompts_per_step} are groups from the past, used up to {self.sampler.reuse_budget} "
            f"times and at most {self.retire_age} steps old{share}"
        ]

    @property
    def _cadence(self) -> str:
        if self.sync.by_cost:
            return f"when it costs less than lag, at the latest after {self.longest} steps"
        if self.sync.drift_budget is not None:
            return f"at drift {self.sync.drift_budget:g}, at the latest after {self.longest} steps"
        return "every step" if self.longest == 1 else f"every {self.longest} steps"

    @property
    def _lags(self) -> str:
        lowest, highest = self.sync.offset, self.fresh_lag
        lag = f"lag {lowest}" if lowest == highest else f"lag {lowest} to {highest}"
        lag += f" after the first {lowest} steps" if lowest else ""
        if self.sampler.mode == "replay":
            lag = f"fresh groups {lag}"
        return lag if self.updates_per_batch == 1 else f"{lag}, in updates up to {self.largest_lag:g}"

    @property
    def replayed_share(self) -> float:
        """The share of all draws that can come from the past of this run, over the whole run."""
        return fmean(self.replays()) / self.prompts_per_step

    def replays(self) -> list[int]:
        """Return how many past groups each step can draw at most. Groups from another log are not counted."""
        sampler, wanted = self.sampler, self.prompts_per_step - self.fresh
        return possible_replays(
            min(self.steps, 1000),
            batch=self.prompts_per_step,
            wanted=wanted,
            uses=sampler.reuse_budget,
            cooldown=sampler.cooldown,
            age=self.retire_age,
            every=self.longest,
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
        conflicts(config)
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
