"""Every knob, with its meaning under it. No torch: a configuration is checked in milliseconds.

`parse` reports all that is wrong at once, each with the nearest thing that would be right.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from offbeat.nearest import nearest
from offbeat.objective.presets import PRESETS, Preset
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


class ConfigError(ValueError):
    """All problems of one configuration."""

    def __init__(self, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n".join(f"- {problem}" for problem in problems))


class Section(BaseModel):
    """A table of the TOML file: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ObjectiveConfig(Section):
    """[objective]: a preset, and what to change in it. What is left out stays as published."""

    preset: str = "rec-oneside-nois"
    """A name from docs/objectives.md."""
    advantage: Advantage | None = None
    """How rewards of a group become advantages."""
    clip: tuple[float, float] | None = None
    """(ε_lo, ε_hi) of the preset's gate; a centred band takes two equal numbers."""
    weight_cap: Annotated[float, Field(gt=0)] | None = None
    """Upper limit of the importance weight."""
    zero_variance_mask: bool | None = None
    """Leave groups without contrast out of loss, KL and counts."""
    aggregate: Aggregate | None = None
    """How token terms become one number."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """β of the KL term to the reference policy; 0 needs no reference policy."""
    kl_estimator: KLEstimator = KLEstimator.K3
    """k1, k2 or k3; see docs/objectives.md for what each is biased in."""
    untested_lag: bool = False
    """Allow more lag than anybody has reported for this preset."""

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
        if self.preset not in PRESETS:
            return [f"objective.preset = {self.preset!r} is not a preset; {nearest(self.preset, PRESETS)}"]
        found = []
        preset = PRESETS[self.preset].objective
        if self.clip is not None:
            if isinstance(preset.gate, NoGate):
                found.append(f"objective.clip: {self.preset!r} has no gate to clip with; remove it")
            if isinstance(preset.gate, CentredBand) and self.clip[0] != self.clip[1]:
                found.append(f"objective.clip = {self.clip}: {self.preset!r} has one width; give it twice")
            if min(self.clip) < 0 or self.clip[0] > 1:
                found.append(f"objective.clip = {self.clip}: need 0 ≤ ε_lo ≤ 1 and ε_hi ≥ 0, for instance (0.2, 0.2)")
        if self.weight_cap is not None and not isinstance(preset.weight, Importance):
            found.append(f"objective.weight_cap: {self.preset!r} has no importance weight to cap; remove it")
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
    """v: publish every v steps; lag is then 0 to v - 1."""


class ReferenceConfig(Section):
    """[reference]: the policy the KL term pulls towards."""

    refresh_every: Annotated[int, Field(ge=0)] = 0
    """Steps between copies of the policy into the reference; 0 keeps the first."""


class Config(Section):
    """A run.

    >>> config = parse({"prompts_per_step": 32, "group_size": 8, "sync": {"every": 10}})
    >>> config.plan
    '32 prompts × 8 = 256 completions a step → 1 update; sync every 10 steps: lag 0 to 9'
    """

    seed: int = 0
    """Root of the seed tree: every random stream is derived from it by name."""
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

    @property
    def largest_lag(self) -> int:
        """Of a lockstep run: v - 1."""
        return self.sync.every - 1

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
