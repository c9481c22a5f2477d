"""The table [objective]: a preset, or an objective of your own, and changes to it. No torch.

A setting that could have no effect is refused with a sentence, never ignored.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Annotated, Any, Final

from pydantic import Field, ValidationInfo, field_validator

from offbeat.config.axes import KINDS, part_of, table_of
from offbeat.config.parts import Named
from offbeat.config.sections import FROM_TOML, Section
from offbeat.errors import suggest_nearest
from offbeat.imports import is_reference
from offbeat.objective.presets import PRESETS, Preset
from offbeat.objective.spec import (
    KL,
    Advantage,
    Against,
    Aggregate,
    CentredBand,
    CutOff,
    ExpWeight,
    GroupESS,
    Importance,
    KLEstimator,
    Level,
    Need,
    NoGate,
    Objective,
    One,
    OneSide,
    OwnFunction,
    Reject,
    Ring,
    SecondMoment,
    SquaredLogRatio,
    Truncate,
    TwoSide,
)

CLIPPED: Final = (OneSide, TwoSide, Ring, CentredBand)
"""The gates with a clip."""


@dataclass(frozen=True)
class Constant:
    """A number, or a pair of numbers, that only some presets have: fields of the choice on one axis."""

    name: str
    axis: str
    choices: tuple[type, ...]
    fields: tuple[str, ...]
    without: str
    """What an objective without it has, in words."""
    when: Callable[[Any], bool] = lambda part: True
    """Whether a choice of these classes uses it."""

    def in_preset(self, objective: Objective) -> bool:
        return any(self._has(part) for part in self._parts(objective))

    def _parts(self, objective: Objective) -> tuple[Any, ...]:
        part = getattr(objective, self.axis)
        return part if isinstance(part, tuple) else (part,)

    def _has(self, part: object) -> bool:
        return isinstance(part, self.choices) and self.when(part)

    def change(self, objective: Objective, value: Any) -> Objective:
        """Return the objective with another value."""
        values = value if isinstance(value, tuple) else (value,)
        parts = tuple(self._changed(part, values) if self._has(part) else part for part in self._parts(objective))
        changed: Any = parts if isinstance(getattr(objective, self.axis), tuple) else parts[0]
        return replace(objective, **{self.axis: changed})

    def _changed(self, part: Any, values: tuple[float, ...]) -> Any:
        if isinstance(part, CentredBand):
            return CentredBand(values[0])
        return replace(part, **dict(zip(self.fields, values, strict=True)))

    def missing(self, objective: Objective) -> str:
        """Return what an objective without it has, in words."""
        if self.name == "clip" and not isinstance(objective.gate, NoGate):
            limit = ", whose limit is objective.m2_limit" if isinstance(objective.gate, SecondMoment) else ""
            return f"a gate without a clip{limit}"
        if self.name == "temperature" and objective.exp_weight is not None:
            return "a temperature that is chosen per batch, within objective.temperature_range"
        return self.without


CONSTANTS: Final = (
    Constant("clip", "gate", CLIPPED, ("low", "high"), "no gate"),
    Constant("outer_clip", "gate", (Ring,), ("outer_low", "outer_high"), "no ring"),
    Constant("m2_limit", "gate", (SecondMoment,), ("limit",), "no gate on the second moment of the batch"),
    Constant("weight_cap", "weight", (Importance,), ("cap",), "no importance weight"),
    Constant("correction_cap", "correction", (Truncate,), ("cap",), "no correction factor π_k/α"),
    Constant("reject_band", "reject", (Reject,), ("low", "high"), "no band of π_k/α that rejects completions"),
    Constant("min_ess", "reject", (GroupESS,), ("least",), "no gate on the effective sample size of a group"),
    Constant(
        "temperature", "exp_weight", (ExpWeight,), ("temperature",), "no exponential weight",
        when=lambda weight: not weight.adaptive,
    ),
    Constant(
        "temperature_range", "exp_weight", (ExpWeight,), ("lowest", "highest"),
        "no temperature that is chosen per batch", when=lambda weight: weight.adaptive,
    ),
    Constant("exponent_cap", "exp_weight", (ExpWeight,), ("cap",), "no exponential weight"),
    Constant("tau", "regularizers", (SquaredLogRatio,), ("tau",), "no square of the log-ratio"),
)  # fmt: skip
"""The settings that a preset may lack. They are refused there."""


Above0 = Annotated[float, Field(gt=0)]
Pair = Annotated[tuple[float, float], FROM_TOML]
UNDIVIDED = {Advantage.CENTRED, Advantage.LEAVE_ONE_OUT, Advantage.REWARD}
Axis = dict[str, Any] | str | None
"""A table {kind = …}, the kind alone, or for gate and weight the reference of your own function."""
OWN_OBJECTIVE = "own"
"""The `preset` of an `Objective` given in Python: no published one, every axis is set."""
VARIANTS = {"advantage", "epsilon", "baseline_shift", "zero_variance_mask", "aggregate"}
"""Axes that compare variants of a preset: what is known about its lag is not about them."""


class ObjectiveConfig(Section):
    """[objective]: a preset, and changes to it. Settings that are left out stay as published."""

    preset: str = "rec-oneside-nois"
    """The objective. `offbeat objectives` lists all of them with the lag each is known to tolerate. For an `Objective`
    of your own write `objective = "file.py:name"`; "own" is plain REINFORCE until you set the axes."""
    advantage: Annotated[str, Named(tuple(one.value for one in Advantage))] | None = None
    """How the rewards of a group become advantages. Change it to compare normalizations; "shrunk" also compares with
    the prompt's earlier results. Your own function takes (rewards_BG, scored_BG) and returns advantages_BG."""
    ratio: Annotated[Level | None, FROM_TOML] = None
    """The unit of the ratio that gate and weight use. `geometric` is the mean over the completion, `sequence` the
    product. Change it if single tokens have extreme ratios."""
    against: Annotated[Against | None, FROM_TOML] = None
    """The denominator of that ratio: `behavior` is α, which gates lag; `proximal` is π_k, which gates only the updates
    of this batch."""
    gate: Axis = None
    """Which tokens may push the policy, for example {kind = "one-side", low = 0.2, high = 0.28}. Kinds: none, one-side,
    two-side (or band), ring, centred-band, second-moment. Your own function takes (ratios_NT, advantages_N1) and
    returns True where a token passes."""
    weight: Axis = None
    """The importance weight: {kind = "importance", cap = 2.0}. Kinds: one, importance, tapered. Your own function takes
    (ratios_NT, advantages_N1) and returns weights."""
    correction: Axis = None
    """An extra factor π_k/α: {kind = "truncate", cap = 2.0}. Kinds: none, truncate."""
    reject: Axis = None
    """Stops data that no longer resemble the policy: {kind = "band", low = 0.5, high = 2.0}. Kinds: none, band,
    group-ess."""
    exp_weight: Axis = None
    """RED-Weight: {kind = "exponential", temperature = 1.0}. Kinds: none, exponential."""
    drop_surplus: bool | None = None
    """RED-Drop: leave out the answers below the mean that outnumber the others."""
    regularizers: list[dict[str, Any]] | None = None
    """Terms beside the policy gradient: [{kind = "squared-log-ratio", tau = 0.1}]. Kinds: kl, squared-log-ratio. For a
    KL term alone set kl_coefficient."""
    epsilon: Above0 | None = None
    """ε added to the variance or the deviation that divides advantages. Raise it if groups of nearly equal rewards
    dominate the gradient."""
    prior_halflife: Above0 | None = None
    """Steps after which a prompt's earlier results count half, for advantage = "shrunk". Lower it if the policy changes
    fast; left out: 50."""
    baseline_shift: Annotated[float, Field(ge=0)] | None = None
    """β, subtracted from the baseline, so that every answer is imitated a little more. Raise it for stored data with
    good answers; too much imitates wrong ones."""
    truncated: Annotated[CutOff, FROM_TOML] = CutOff.SCORE
    """Completions that were cut off at the length limit: `score` counts their score like any other, `mask` leaves them
    out of baseline, loss and counts. Mask them if the limit, not the answer, decides their score."""
    zero_variance_mask: bool | None = None
    """Leave groups of equal rewards out of loss, KL and counts, so that they do not dilute the other groups."""
    clip: Pair | None = None
    """(ε_lo, ε_hi) of the preset's gate. Wider stops fewer tokens and is less stable. A centered band takes two equal
    numbers. With one update a batch, a centered band and a gate on π/π_k never bind, and this setting is refused."""
    outer_clip: Pair | None = None
    """(ε'_lo, ε'_hi) of a ring: tokens further out than this pass if the update brings them back. Lower it to let more
    of them pass."""
    m2_limit: Above0 | None = None
    """τ of M2PO: the largest mean (log ρ)² of the tokens that the update pushes further out. Lower it if training is
    unstable."""
    weight_cap: Above0 | None = None
    """Upper limit of the importance weight. Set it if a few tokens with large ratios dominate the gradient."""
    correction_cap: Above0 | None = None
    """Upper limit of the factor π_k/α, which corrects for lag and engine gap. Lower it if few tokens dominate the
    gradient."""
    reject_band: Pair | None = None
    """(low, high) of π_k/α: completions outside are stopped. Widen it if too many are."""
    min_ess: Annotated[float, Field(gt=0, le=1)] | None = None
    """Groups whose sequence ratios have a smaller effective sample size, as a share of the group, are stopped. Lower it
    if too many are."""
    temperature: Above0 | None = None
    """T of RED-Weight, which counts an answer exp(A/T) times. Lower it to imitate good answers more."""
    temperature_range: Pair | None = None
    """Lowest and highest T that the adaptive RED-Weight may choose. Narrow it if T jumps between batches."""
    exponent_cap: Above0 | None = None
    """Upper limit of the exponent A/T of RED-Weight. Lower it if a few answers dominate the gradient."""
    tau: Above0 | None = None
    """τ of OPMD's square of the log-ratio. Raise it to stay closer to the behavior policy."""
    aggregate: Annotated[Aggregate | None, FROM_TOML] = None
    """How token terms become one number. It decides whether long answers weigh more."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """β of the KL term to the reference policy. Raise it to stay close to the reference; 0 needs no reference."""
    kl_estimator: Annotated[KLEstimator | None, FROM_TOML] = None
    """k1, k2 or k3, for kl_coefficient above 0; docs/how-it-works/objective.md explains the bias of each. Left out:
    k3."""

    @field_validator("preset")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in PRESETS and name != OWN_OBJECTIVE and not is_reference(name):
            raise ValueError(f"is not a preset; {suggest_nearest(name, PRESETS)}")
        return name

    @field_validator(*KINDS, mode="before")
    @classmethod
    def _complete(cls, given: Any, info: ValidationInfo) -> Any:
        """Check an axis, and fill in what its table leaves out."""
        axis = str(info.field_name)
        return None if given is None else table_of(axis, part_of(axis, given), str)

    @property
    def known(self) -> Preset:
        """The published objective that this is, with what is known about its lag. Nothing is known of any other."""
        preset, axes = PRESETS.get(self.preset), self._axes()
        if preset is not None and not axes.keys() - VARIANTS and not isinstance(axes.get("advantage"), OwnFunction):
            return preset
        objective = self._with_axes()
        same = (one for one in PRESETS.values() if one.objective == objective)
        name = f"{self.preset} with other axes" if preset else self.preset
        return next(same, Preset(name, objective, "", "", "", inf, "nobody has shown how much lag it tolerates"))

    def _axes(self) -> dict[str, Any]:
        """Return the axes that are set."""
        found = {}
        for axis in (field.name for field in fields(Objective) if field.name != "truncated"):
            if (given := getattr(self, axis)) is None:
                continue
            if axis == "advantage":
                given = OwnFunction(given) if is_reference(given) else Advantage(given)
            found[axis] = part_of(axis, given) if axis in KINDS else given
        return found

    def _with_axes(self) -> Objective:
        """Return the preset with the axes that are set; as published if they contradict each other, see `problems`."""
        published = PRESETS[self.preset].objective if self.preset in PRESETS else Objective()
        try:
            return replace(published, **self._axes())
        except ValueError:
            return published

    def resolve(self) -> Objective:
        """Return the preset with the changes applied. A function of your own is not loaded before it is called."""
        objective = replace(self._with_axes(), truncated=self.truncated)
        for constant in CONSTANTS:
            if (value := getattr(self, constant.name)) is not None and constant.in_preset(objective):
                objective = constant.change(objective, value)
        if self.kl_coefficient > 0:
            # On lagged samples the KL is biased unless it is weighted, which needs α. Weight it if α is there anyway.
            weighted = Need.BEHAVIOR in objective.needs
            penalty = KL(self.kl_coefficient, self.kl_estimator or KLEstimator.K3, weighted)
            objective = replace(objective, regularizers=(*objective.regularizers, penalty))
        return objective

    def problems(self) -> list[str]:
        """Return the conflicts between settings of this section."""
        preset, resolved = self._with_axes(), self.resolve()
        if any(getattr(preset, axis) != part for axis, part in self._axes().items()):
            return [
                "objective.against = 'proximal': a centered band is centered on π_k/α, so its ratio is π/α; set "
                "objective.against = 'behavior', or another objective.gate"
            ]
        found = [
            f"{self._setting(one.name)}: {self.preset!r} has {one.missing(preset)}; remove objective.{one.name}"
            for one in CONSTANTS
            if getattr(self, one.name) is not None and not one.in_preset(preset)
        ]
        if self.preset in PRESETS and isinstance(preset.gate, NoGate) and isinstance(preset.weight, One):
            found += [
                f"{self._setting(name)}: {self.preset!r} has neither a gate nor a weight; remove objective.{name}"
                for name in ("ratio", "against")
                if getattr(self, name) is not None
            ]
        found += [*self._clip_problems(), *self._range_problems(resolved)]
        divided = isinstance(resolved.advantage, Advantage) and resolved.advantage not in UNDIVIDED
        if self.epsilon is not None and self.preset in PRESETS and not divided:
            found.append(
                f"{self._setting('epsilon')}: {self._advantage(resolved)} advantages are not divided by a deviation; "
                "remove objective.epsilon, or set objective.clip if you mean the clip range"
            )
        if resolved.advantage is Advantage.SHRUNK and resolved.zero_variance_mask:
            found.append(
                "objective.advantage = 'shrunk' compares groups of equal rewards with the prompt's earlier results, "
                "but the zero-variance mask leaves these groups out; set objective.zero_variance_mask = false"
            )
        if self.prior_halflife is not None and resolved.advantage is not Advantage.SHRUNK:
            found.append(
                f"{self._setting('prior_halflife')}: {self._advantage(resolved)} advantages use no earlier results; "
                "set objective.advantage = 'shrunk', or remove objective.prior_halflife"
            )
        if self.kl_estimator is not None and self.kl_coefficient == 0:
            found.append(
                f"objective.kl_estimator = {self.kl_estimator.value!r}: there is no KL term; set "
                "objective.kl_coefficient above 0, or remove objective.kl_estimator"
            )
        return found

    def problems_with_one_update(self) -> list[str]:
        """Return the settings that have no effect if a batch gets one update: π is then π_k."""
        found, objective = [], self.resolve()
        never_binds = isinstance(objective.gate, CentredBand) or objective.against is Against.PROXIMAL
        if self.clip is not None and never_binds and isinstance(objective.gate, CLIPPED) and not self._clip_problems():
            found.append(
                f"{self._setting('clip')}: with one update a batch the band never binds; set updates_per_batch above 1 "
                "or remove objective.clip"
            )
        if (
            self.weight_cap is not None
            and objective.against is Against.PROXIMAL
            and isinstance(objective.weight, Importance)
        ):
            found.append(
                f"{self._setting('weight_cap')}: with one update a batch the ratio π/π_k of {self.preset!r} is 1; set "
                "objective.correction_cap, which caps π_k/α, or updates_per_batch above 1, or remove "
                "objective.weight_cap"
            )
        return found

    def _advantage(self, objective: Objective) -> str:
        return repr(self.advantage or str(objective.advantage))

    def _setting(self, name: str) -> str:
        value = getattr(self, name)
        return f"objective.{name} = {f'{value:g}' if isinstance(value, float) else value}"

    def _clip_problems(self) -> list[str]:
        if self.clip is None or not isinstance(gate := self._with_axes().gate, CLIPPED):
            return []
        found = []
        if isinstance(gate, CentredBand) and self.clip[0] != self.clip[1]:
            width = self.clip[0]
            found.append(
                f"{self._setting('clip')}: {self.preset!r} has one width; set [{width}, {width}], with "
                "updates_per_batch above 1 so that the band can bind"
            )
        if min(self.clip) < 0 or self.clip[0] > 1:
            found.append(f"{self._setting('clip')}: need 0 ≤ ε_lo ≤ 1 and ε_hi ≥ 0, for example [0.2, 0.2]")
        return found

    def _range_problems(self, resolved: Objective) -> list[str]:
        found = []
        if self.outer_clip is not None and isinstance(ring := resolved.gate, Ring):
            low, high = self.outer_clip
            if not (ring.low <= low < 1 and ring.high <= high):
                found.append(
                    f"{self._setting('outer_clip')}: need {ring.low:g} ≤ ε'_lo < 1 and ε'_hi ≥ {ring.high:g}, outside "
                    "of the clip, for example [0.6, 2.0]"
                )
        if self.reject_band is not None and not 0 <= self.reject_band[0] <= 1 <= self.reject_band[1]:
            found.append(f"{self._setting('reject_band')}: need 0 ≤ low ≤ 1 ≤ high, for example [0.5, 2.0]")
        if self.temperature_range is not None and not 0 < self.temperature_range[0] <= self.temperature_range[1]:
            found.append(f"{self._setting('temperature_range')}: need 0 < lowest ≤ highest, for example [0.8, 100.0]")
        return found
