"""One cell of the evidence: a real run of an arm with a learning rate and a seed."""

import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import cast

from lab.figures import commit
from lab.learning import model
from lab.learning.cells import SimulatedSeconds
from lab.learning.evidence.aimed import Aimed
from lab.learning.evidence.arms import EvidenceArm
from lab.learning.evidence.exact_kl import ExactKL
from lab.learning.evidence.memory_run import train_in_memory
from lab.learning.evidence.others import Others, Use, supervised
from lab.learning.evidence.publishing import Scheduled
from lab.learning.evidence.rows import COSINE, CYCLE, EVERY, ByCycle, EvidenceRow
from lab.learning.evidence.tasks import TASKS, EvidenceTask
from lab.learning.watched_learner import ExactPassRate
from offbeat.config import Config, parse
from offbeat.errors import RunStopped
from offbeat.run.build import load_tokenizer
from offbeat.run.learner import LocalLearner
from offbeat.run.loop import Loop
from offbeat.trainer.trainer import RefusedBatch, Trained
from offbeat.types import Group, Json, StepContext
from tests.fixtures.own_learner import own_learner


@dataclass
class EvaluatedLearner(LocalLearner):
    """The trainer of a run, with the exact pass rate of its policy every five steps. It draws no random numbers."""

    pass_rate: ExactPassRate
    later: ExactPassRate | None = None
    """The pass rate of the second half of the run, if the task changes."""
    others: Others | None = None
    """Groups of another model that are trained on beside the policy's own."""
    aimed: Aimed | None = None
    """Compares each step's gradient with that of the exact pass rate."""
    exact_kl: ExactKL | None = None
    curve: dict[int, float] = field(default_factory=dict)
    kl: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._evaluate()

    def _evaluate(self) -> None:
        second_half = 2 * self.step > self.rank.config.steps
        rates = self.later if self.later and second_half else self.pass_rate
        self.curve[self.step] = float(rates.pass_rates(self.rank.trainer.policy_model.model).mean())
        if self.exact_kl is not None:
            self.kl[self.step] = self.exact_kl.now()

    async def train(self, groups: Sequence[Group], context: StepContext) -> Trained | RefusedBatch:
        beside = groups if self.others is None else self.others.beside(groups)
        if self.aimed is not None:
            self.aimed.aim({group.prompt.id for group in groups})
        done = await super().train(beside, context)
        if self.step % EVERY == 0:
            self._evaluate()
        if self.aimed is not None and isinstance(done, Trained):
            done = replace(done, metrics={**done.metrics, COSINE: self.aimed.cosine})
        return done if self.others is None else _of_our_groups(done, {group.id for group in groups})


def _of_our_groups(done: Trained | RefusedBatch, ours: set[str]) -> Trained | RefusedBatch:
    """Leave out what was said of another model's groups, which the run does not know."""
    if isinstance(done, RefusedBatch):
        return RefusedBatch({name: why for name, why in done.faults.items() if name in ours})
    return replace(
        done,
        groups=tuple(name for name in done.groups if name in ours),
        zero_variance=tuple(name for name in done.zero_variance if name in ours),
        too_small=tuple(name for name in done.too_small if name in ours),
        group_drift={name: drift for name, drift in done.group_drift.items() if name in ours},
        refused={name: why for name, why in done.refused.items() if name in ours},
        updates_made=None,  # the ledger cannot count an update by the other model's groups alone
    )


def make_config(task: EvidenceTask, arm: EvidenceArm, rate: float, seed: int, steps: int | None = None) -> Config:
    """Return the configuration of a cell: what all arms share, with the arm's own settings over it."""
    shared: dict[str, object] = {
        "seed": seed,
        "steps": steps or task.steps,
        "prompts_per_step": 16,
        "group_size": 8,
        "model": {"path": str(model.directory(task.lessons)), "compute": "float32", "serve": "float32"},
        "task": {"name": str(task.file), "scorers": 1},
        "engine": {"kind": "hf"},
        "sampling": {"max_tokens": task.max_tokens},
        "sync": {"every": 1},
        "objective": {"preset": "rec-oneside-nois"},
        "optimizer": {"learning_rate": rate, "warmup_steps": 5},
        "trainer": {"token_budget": 2048, "save_every": 10_000},
    }
    merged = dict(shared)
    for name, value in arm.settings.items():
        before = shared.get(name)
        merged[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, Mapping) else value
    return parse(merged)


def run(
    task: str,
    arm: EvidenceArm,
    rate: float,
    seed: int,
    *,
    followed: EvidenceRow | None = None,
    steps: int | None = None,
) -> EvidenceRow:
    """Train a cell and return its row. `followed` is the run whose number of publishes it has."""
    with tempfile.TemporaryDirectory(prefix="offbeat-evidence-") as scratch:
        config = make_config(TASKS[task], arm, rate, seed, steps)
        if arm.use is Use.SUPERVISED:
            start = supervised(seed, rate, Path(scratch, "model"))
            config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(start)})})
        others = Others.of(seed, arm.use) if arm.use and arm.use is not Use.SUPERVISED else None
        return _Cell(TASKS[task], arm, config, followed, others).run(Path(scratch, "run"))


def run_from(start: Path, task: str, arm: EvidenceArm, rate: float, seed: int) -> EvidenceRow:
    """Train a cell from another model, with fresh groups alone, and return its row."""
    with tempfile.TemporaryDirectory(prefix="offbeat-evidence-") as scratch:
        config = make_config(TASKS[task], arm, rate, seed)
        config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(start)})})
        return _Cell(TASKS[task], arm, config, None, None).run(Path(scratch, "run"))


@dataclass
class _Cell:
    task: EvidenceTask
    arm: EvidenceArm
    config: Config
    followed: EvidenceRow | None
    others: Others | None
    watched: EvaluatedLearner = field(init=False)
    loop: Loop = field(init=False)
    admitted: dict[int, int] = field(default_factory=lambda: {0: 0})
    """Groups generated until each step."""
    events: list[Mapping[str, Json]] = field(default_factory=list)

    def run(self, place: Path) -> EvidenceRow:
        began, stopped = time.monotonic(), ""
        try:
            train_in_memory(self.config, place, started=self._watch, watching=self._note)
        except RunStopped as collapsed:  # a policy that gets nothing right cannot learn any more: a result, too
            stopped = str(collapsed)
        row = self._row(self.events)
        return row | {"seconds": round(time.monotonic() - began, 1), "stopped": stopped}

    def _watch(self, loop: Loop) -> None:
        tokenizer, task, arm = load_tokenizer(self.config), self.task, self.arm
        later = ExactPassRate.of(tokenizer, task.later) if task.later else None
        rates = ExactPassRate.of(tokenizer, task.tested)
        rank = own_learner(loop).rank
        aimed = Aimed.of(rank.trainer, tokenizer, task.tested) if arm.keeps_cosine else None
        exact_kl = ExactKL.of(rank.trainer.policy_model, tokenizer, task.tested) if arm.keeps_kl else None
        self.watched = EvaluatedLearner(rank, rates, later, self.others, aimed, exact_kl)
        self.loop, loop.learner = loop, self.watched
        if arm.cost is not None:
            loop.evidence = SimulatedSeconds(cost=arm.cost)
        if arm.follow and self.followed:
            loop.cadence = Scheduled(arm.follow.gaps(self.followed["published"], self.config.steps, self.config.seed))

    def _note(self, event: Mapping[str, Json]) -> None:
        self.events.append(event)
        if event["kind"] == "step":
            self.admitted[cast(int, event["step"])] = self.loop.desk.admitted

    def _row(self, events: Sequence[Mapping[str, Json]]) -> EvidenceRow:
        taken = [event for event in events if event["kind"] == "step"]
        metrics = [cast("dict[str, float]", event["metrics"]) for event in taken]
        lags = [lag for event in taken for lag in cast("list[int]", event["lags"])]
        drifts = [one["drift_tv_token"] for one in metrics if "drift_tv_token" in one]
        published = [cast(int, event["step"]) for event in events if event["kind"] == "published" and event["step"]]
        points, curve = range(0, self.config.steps + 1, EVERY), self.watched.curve
        reached = [max(at for at in curve if at <= point) for point in points]
        row: EvidenceRow = {
            "arm": self.arm.name,
            "rate": self.config.optimizer.learning_rate,
            "seed": self.config.seed,
            "curve": [round(curve[at], 5) for at in reached],
            "groups": [self.admitted[min(point, len(taken))] for point in points],
            "publishes": len(published),
            "drift": round(fmean(drifts), 5) if drifts else None,
            "lag": round(fmean(lags), 3) if lags else 0.0,
            "seconds": 0.0,
            "by_cycle": _by_cycle(metrics, [step - 1 for step in published]),
            "commit": commit(),
            "stopped": "",
        }
        if self.arm.keeps_kl:
            row["kl"] = [_rounded(self.watched.kl[at]) for at in reached]
        if self.arm.keeps_publishes:
            row["published"] = published
        return row


def _by_cycle(metrics: Sequence[Mapping[str, float]], ends: Collection[int]) -> ByCycle:
    """Return the mean of each metric over all steps that have it, and over the steps at these places."""
    found: ByCycle = {}
    for name in CYCLE:
        known = {place: one[name] for place, one in enumerate(metrics) if name in one}
        if known:
            last = [value for place, value in known.items() if place in ends] or [*known.values()][-1:]
            found[name] = (_rounded(fmean(known.values())), _rounded(fmean(last)))
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
