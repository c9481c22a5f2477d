"""The whole configuration of a run, and what follows from it: lag, batches, and the plan in words. No torch."""

from math import inf
from statistics import fmean
from typing import Annotated, Final

from pydantic import Field

from offbeat.config.axes import OWN
from offbeat.config.objective import ObjectiveConfig
from offbeat.config.sections import (
    AdapterConfig,
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
from offbeat.imports import is_reference
from offbeat.types import Json

RETIRE_DRIFT: Final = 0.2
"""Drift at which a replayed group is retired by default: a fifth of the probability has moved elsewhere."""


class Config(Section):
    """The configuration of a run.

    >>> from offbeat.config import parse
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
    accept: bool = False
    """Train with a lag that is known to lose, which `offbeat check` shows with its figure. For experiments."""
    objective: ObjectiveConfig = ObjectiveConfig()
    sampling: SamplingConfig = SamplingConfig()
    sync: SyncConfig = SyncConfig()
    reference: ReferenceConfig = ReferenceConfig()
    model: ModelConfig = ModelConfig()
    adapter: AdapterConfig = AdapterConfig()
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
    def settings(self) -> dict[str, Json]:
        """Every setting by its full name, such as `sync.every`."""
        found: dict[str, Json] = {}
        for name, value in self.model_dump(mode="json").items():
            if isinstance(value, dict):
                found |= {f"{name}.{key}": inner for key, inner in value.items()}
            else:
                found[name] = value
        return found

    @property
    def asks(self) -> bool:
        """False for an offline run that does not evaluate: it has no prompts to ask, so it needs no task."""
        return self.run.mode != "offline" or self.evaluation.every > 0 or self.evaluation.holds_out

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
    def open_versions(self) -> int:
        """How many versions the groups that wait to be trained may be of: always the newest ones."""
        between = self.sync.at_least if self.sync.adaptive else self.longest
        return self.fresh_lag // between + 1

    @property
    def adapter_slots(self) -> int:
        """How many adapters an engine holds: those that fresh groups may be generated with, and one to be checked.

        At most 8: with more versions in use, a load waits until the oldest completions end.
        """
        return min(8, self.open_versions + 1)

    @property
    def retire_drift(self) -> float | None:
        """The drift at which a group is not reused; None for no limit, as offline."""
        if self.sampler.retire_drift is not None:
            return self.sampler.retire_drift
        return None if self.run.mode == "offline" else RETIRE_DRIFT

    @property
    def retire_age(self) -> int:
        """The number of steps after which a group is not reused."""
        if self.sampler.retire_age is not None:
            return self.sampler.retire_age
        return max(1, min(200, self.steps_within_limit()))

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
        limit = self.objective.known.reported_lag
        return 1000 if limit == inf else max(0, int(limit + 1) // self.updates_per_batch - 1)

    @property
    def own_parts(self) -> list[tuple[str, str]]:
        """The parts of your own: the setting that names each, and its reference."""
        objective = self.objective
        named = {f"objective.{axis}": getattr(objective, axis) for axis in ("preset", *OWN)}
        named |= {"sync.cadence": self.sync.cadence, "engine.kind": self.engine.kind}
        every = [*named.items(), *(("run.sinks", sink) for sink in self.run.sinks)]
        return [(setting, name) for setting, name in every if is_reference(name)]

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
    def evaluation_plan(self) -> str:
        """How often the run evaluates and what that costs, in words; empty if it never does."""
        times, answers = self._evaluations
        if not times:
            return ""
        return (
            f"evaluation before training and every {self.evaluation.every} steps: {times} × {answers} answers, "
            f"{100 * self.evaluation_share:.2g} % of the answers that are trained on"
        )

    @property
    def evaluation_share(self) -> float:
        """Answers that are evaluated for each answer that is trained on."""
        times, answers = self._evaluations
        return times * answers / (self.steps * self.prompts_per_step * self.group_size)

    @property
    def _evaluations(self) -> tuple[int, int]:
        """How often the run evaluates, and how many answers it asks for each time."""
        one = self.evaluation
        times = 1 + -(-self.steps // one.every) if one.every else 0
        return times, one.prompts * (one.samples + one.greedy)

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
        if self.sync.cadence:
            return f"when {self.sync.cadence} says so, at the latest after {self.longest} steps"
        if self.sync.by_cost:
            return f"when it costs less than lag, at the latest after {self.longest} steps"
        if self.sync.drift_budget is not None:
            return f"at drift {self.sync.drift_budget:g}, at the latest after {self.longest} steps"
        late = f", so never within the {self.steps} of this run" if self.longest > self.steps else ""
        return "every step" if self.longest == 1 else f"every {self.longest} steps{late}"

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


def possible_replays(
    steps: int, *, batch: int, wanted: int, uses: int, cooldown: int, age: int, every: int
) -> list[int]:
    """Return how many past groups each step of a run can draw at most.

    The groups of a step share a version. They may be drawn again after `cooldown` steps, until the version is `age`
    steps old or they were used `uses` times. What retires first is drawn first, which no other order can beat. A step
    that lacks past groups generates fresh ones instead. Measured drift may retire groups earlier.

    >>> possible_replays(5, batch=8, wanted=4, uses=4, cooldown=0, age=200, every=1)
    [0, 4, 4, 4, 4]
    >>> possible_replays(5, batch=8, wanted=4, uses=4, cooldown=5, age=3, every=4)   # retired before they may be drawn
    [0, 0, 0, 0, 0]
    """
    # Groups that are interchangeable, as [version, step of the last draw, uses left, number of groups].
    pool: list[list[int]] = []
    drawn = []
    for k in range(steps):
        version = k - k % every
        pool = [one for one in pool if one[2] > 0 and k - one[0] <= age]
        missing, used = wanted, []
        for one in sorted(pool):
            if one[1] < k - cooldown and missing:
                taken = min(missing, one[3])
                one[3] -= taken
                missing -= taken
                used.append([one[0], k, one[2] - 1, taken])
        drawn.append(wanted - missing)
        pool = [one for one in pool if one[3]] + used + [[version, k, uses - 1, batch - drawn[-1]]]
    return drawn
