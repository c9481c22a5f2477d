"""One cell of the learning figures: a real run of an arm with a learning rate and a seed.

Every run goes through `offbeat.run.local.train`. An arm is defined by its configuration. `offline-online` is two runs:
the second one starts with the policy of the first one and uses the same foreign log.
"""

import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Final, TypedDict, cast

import torch

from lab.learning import model
from lab.learning.rows import LEARNING, ByLag, Row
from lab.learning.watched_learner import ExactPassRate, WatchedLearner
from offbeat.config import Config, parse
from offbeat.errors import RunStopped
from offbeat.experience.log import ExperienceLog
from offbeat.run.build import load_tokenizer
from offbeat.run.cadence import PublishEvidence, StepEvidence
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import Phase, read
from offbeat.run.local import train
from offbeat.run.loop import Loop
from offbeat.trainer.export import export
from offbeat.types import Group, Json, PublishedDrift
from tests.fixtures.own_learner import own_learner

STEPS: Final = 100
LAST: Final = 5
"""Points at the end of the curve whose mean is the final pass rate."""
EVERY: Final = 5
"""Steps between two points of the curve."""
LONGEST: Final = 40
"""Steps without a publish that a drift cadence allows."""
FOREIGN_SEED: Final = 900
"""Foreign logs come from runs with seeds from here on, which no cell uses."""

Sections = Mapping[str, Mapping[str, Json]]


@dataclass(frozen=True)
class Arm:
    """One of the ways to train that are compared."""

    name: str
    sections: Sections = field(default_factory=dict)
    measured: Callable[[int], bool] = lambda step: False
    """True for the steps whose publish is measured: see `WatchedLearner`."""
    cost: float | None = None
    """For `sync.by_cost`: what a publish costs in steps, in simulated seconds."""


def fixed(v: int, name: str = "", **sections: Mapping[str, Json]) -> Arm:
    """Publish every v steps."""
    return Arm(name or f"v{v}", {"sync": {"every": v}, **sections}, lambda step: step % max(v, EVERY) == 0)


def drift(budget: float) -> Arm:
    """Publish when the mean per-token TV exceeds the budget."""
    return Arm(f"drift-{budget:g}", {"sync": {"every": LONGEST, "drift_budget": budget}}, lambda step: True)


def by_cost(cost: float) -> Arm:
    """Publish by cost, if a publish costs as much as so many steps. Nothing else is set."""
    return Arm(f"cost-{cost:g}", {"sync": {"by_cost": True}}, lambda step: True, cost)


@dataclass
class SimulatedSeconds(PublishEvidence):
    """Evidence in which a step takes one second and a publish takes `cost` seconds."""

    cost: float = 0.0

    def add_step(self, drift: PublishedDrift, seconds: Mapping[Phase, float]) -> float:
        self.since.append(StepEvidence(drift, 1.0))
        self.costs = [self.cost]
        return 1.0


def preset(name: str, v: int) -> Arm:
    """Train with another objective."""
    return fixed(v, f"v{v}-{name}", objective={"preset": name})


CONCURRENT: Final = Arm("concurrent", {"sync": {"every": 1}, "run": {"mode": "concurrent", "max_lag": 8}})
OFFLINE_ONLINE: Final = Arm("offline-online", {"sync": {"every": 10}})


@dataclass(frozen=True)
class Cell:
    """One run."""

    arm: Arm
    rate: float
    seed: int
    steps: int = STEPS
    prompts: int = 16
    size: int = 8

    @property
    def key(self) -> tuple[str, float, int]:
        return self.arm.name, self.rate, self.seed

    def config(self, sections: Sections) -> Config:
        """Return the configuration: `sections` override the settings that all arms share."""
        shared: dict[str, dict[str, Json]] = {
            "model": {"path": str(model.directory()), "compute": "float32", "serve": "float32"},
            "task": {"name": str(LEARNING / "task.py"), "scorers": 1},
            "engine": {"kind": "hf"},
            "sampling": {"max_tokens": 4},
            "objective": {"preset": "rec-oneside-nois"},
            "optimizer": {"learning_rate": self.rate, "warmup_steps": 5},
            "trainer": {"token_budget": 2048, "save_every": 10_000},
        }
        merged = {name: {**shared.get(name, {}), **sections.get(name, {})} for name in [*shared, *sections]}
        batch = {"prompts_per_step": self.prompts, "group_size": self.size}
        return parse({"seed": self.seed, "steps": self.steps, **batch, **merged})


class Step(TypedDict):
    """The fields of a `step` event that are used here."""

    metrics: dict[str, float]
    by_lag: dict[str, dict[str, float]]
    lags: list[int]
    groups: int
    replayed: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class Ran:
    """The result of a run."""

    watched: WatchedLearner
    steps: list[Step]
    alarms: int
    stopped: str = ""
    """Why it ended before its last step."""


def run(cell: Cell) -> Row:
    """Train a cell and return its row."""
    with tempfile.TemporaryDirectory(prefix="offbeat-learning-") as scratch:
        if cell.arm is OFFLINE_ONLINE:
            ran = _offline_then_online(cell, Path(scratch))
        else:
            ran = _trained(cell.config(cell.arm.sections), Path(scratch, "run"), cell.arm)
    curve = {step: rate for step, rate in ran.watched.curve.items() if step % EVERY == 0}
    return {
        "arm": cell.arm.name,
        "rate": cell.rate,
        "seed": cell.seed,
        "steps": cell.steps,
        "final": fmean(list(curve.values())[-1 if ran.stopped else -LAST :]),
        "curve": {str(step): round(rate, 5) for step, rate in curve.items()},
        "publishes": len(ran.watched.published) - 1,
        "published": ran.watched.published,
        "drift": [step["metrics"].get("drift_published") for step in ran.steps],
        "by_lag": _by_lag(ran.steps),
        "groups": sum(min(len(step["lags"]), step["groups"] - step["replayed"]) for step in ran.steps),
        "alarms": ran.alarms,
        "seconds": ran.steps[-1]["seconds"],
        "stopped": ran.stopped,
    }


def _trained(config: Config, place: Path, arm: Arm | None = None) -> Ran:
    """Train a whole run and watch its trainer."""
    directory, watched = RunDirectory(place), list[WatchedLearner]()

    def watch(loop: Loop) -> None:
        own = own_learner(loop)
        measured = arm.measured if arm else lambda step: False
        watched.append(WatchedLearner(own.rank, ExactPassRate.of(load_tokenizer(config)), EVERY, measured))
        loop.learner = watched[0]
        if arm and arm.cost is not None:
            loop.evidence = SimulatedSeconds(cost=arm.cost)

    directory.create(config)
    stopped = ""
    try:
        train(config, directory, started=watch)
    except RunStopped as collapsed:  # a policy that gets nothing right cannot learn any more: that is a result, too
        stopped = str(collapsed)
    events = list(read(directory.events))
    return Ran(
        watched[0],
        [cast(Step, event) for event in events if event["kind"] == "step"],
        sum(event["kind"] == "alarm" for event in events),
        stopped,
    )


def _offline_then_online(cell: Cell, place: Path) -> Ran:
    """Train half of the steps on the log of another run, and half on as many fresh groups as past ones."""
    log, half = place / "log", replace(cell, steps=cell.steps // 2)
    foreign = replace(half, arm=fixed(10), seed=FOREIGN_SEED + cell.seed)
    _trained(foreign.config(foreign.arm.sections), place / "foreign")
    hand_over(RunDirectory(place / "foreign"), log)
    experience: dict[str, Json] = {"experience": str(log)}
    offline = half.config({"run": {"mode": "offline", **experience}, "sampler": {"mode": "offline"}})
    first = _trained(offline, place / "offline")
    export(place / "offline", place / "model", dtype=torch.float32)
    exported: dict[str, Json] = {"path": str(place / "model")}
    sections = {**cell.arm.sections, "run": experience, "sampler": {"mode": "replay"}, "model": exported}
    second = _trained(half.config(sections), place / "online")
    shifted = {half.steps + step: rate for step, rate in second.watched.curve.items()}
    second.watched.curve = first.watched.curve | shifted
    return replace(second, steps=first.steps + second.steps, alarms=first.alarms + second.alarms)


def hand_over(source: RunDirectory, to: Path) -> None:
    """Copy the groups of a run to another log, with scores and log-probs but without versions."""
    with ExperienceLog.open(source.experience) as theirs, ExperienceLog.open(to, writer="hand over") as ours:
        receipt = ours.append(_foreign(group) for group in theirs.groups())
    if receipt.refused:
        raise ValueError(f"{len(receipt.refused)} groups were refused: {receipt.refused[0]}")


def _foreign(group: Group) -> Group:
    completions = (replace(one, id=f"theirs-{one.id}", versions=(), source="theirs") for one in group.completions)
    return replace(group, id=f"theirs-{group.id}", completions=tuple(completions))


def _by_lag(steps: list[Step]) -> dict[str, ByLag]:
    """Return the means over the steps that had tokens of a lag, by the bucket of the lag."""
    found: dict[str, list[dict[str, float]]] = {}
    for step in steps:
        for bucket, values in step["by_lag"].items():
            found.setdefault(bucket, []).append(values)
    return {bucket: _means(values) for bucket, values in found.items()}


def _means(values: list[dict[str, float]]) -> ByLag:
    known = {name: [one[name] for one in values if name in one] for name in ByLag.__annotations__}
    means = {name: round(fmean(ones), 5) for name, ones in known.items() if ones}
    return cast(ByLag, means | {"steps": len(values)})
