"""One cell of the evidence: a real run of an arm with a learning rate and a seed, kept as one line of a file."""

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Final, TypedDict, cast

from lab.figures import commit
from lab.fixtures.own_learner import own_learner
from lab.learning import model
from lab.learning.rows import LEARNING
from lab.learning.watched_learner import ExactPassRate, WatchedLearner
from offbeat.config import Config, parse
from offbeat.errors import RunStopped
from offbeat.run.build import load_tokenizer
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import read
from offbeat.run.local import train
from offbeat.run.loop import Loop
from offbeat.types import Json

KEPT: Final = LEARNING / "evidence"
STEPS: Final = 100
EVERY: Final = 5
"""Steps between two evaluations."""
LAST: Final = 5
"""Evaluations whose mean is the final pass rate."""


class EvidenceRow(TypedDict):
    """One run."""

    arm: str
    rate: float
    seed: int
    curve: list[float]
    """Exact pass rate every five steps, from step 0. After a collapse the last one is repeated."""
    groups: list[int]
    """Groups generated until each of these steps."""
    publishes: int
    drift: float | None
    """Mean drift of the groups that were trained on; None if their log-probs are unknown."""
    lag: float
    """Mean lag of the groups that were trained on."""
    seconds: float
    commit: str
    stopped: str
    """Why the run ended early, or empty."""


def final(row: EvidenceRow) -> float:
    """Return the mean of the last evaluations."""
    return fmean(row["curve"][-LAST:])


def area(row: EvidenceRow) -> float:
    """Return the mean of all evaluations."""
    return fmean(row["curve"])


def rows(block: str) -> dict[tuple[str, float, int], EvidenceRow]:
    """Return the finished cells of a block."""
    file = KEPT / f"{block}.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {(row["arm"], row["rate"], row["seed"]): row for row in map(json.loads, lines)}


def keep(block: str, row: EvidenceRow) -> None:
    """Append a finished cell."""
    with (KEPT / f"{block}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def make_config(settings: Mapping[str, object], rate: float, seed: int, steps: int = STEPS) -> Config:
    """Return the configuration of a cell: what all arms share, with the arm's own settings over it."""
    shared: dict[str, object] = {
        "seed": seed,
        "steps": steps,
        "prompts_per_step": 16,
        "group_size": 8,
        "model": {"path": str(model.directory()), "compute": "float32", "serve": "float32"},
        "task": {"name": str(LEARNING / "task.py"), "scorers": 1},
        "engine": {"kind": "hf"},
        "sampling": {"max_tokens": 4},
        "sync": {"every": 1},
        "objective": {"preset": "rec-oneside-nois"},
        "optimizer": {"learning_rate": rate, "warmup_steps": 5},
        "trainer": {"token_budget": 2048, "save_every": 10_000},
    }
    merged = dict(shared)
    for name, value in settings.items():
        before = shared.get(name)
        merged[name] = {**before, **value} if isinstance(before, dict) and isinstance(value, Mapping) else value
    return parse(merged)


def run(arm: str, settings: Mapping[str, object], rate: float, seed: int, steps: int = STEPS) -> EvidenceRow:
    """Train a cell and return its row."""
    config, began, stopped = make_config(settings, rate, seed, steps), time.monotonic(), ""
    watched: list[WatchedLearner] = []
    loops: list[Loop] = []
    admitted = {0: 0}

    def note(event: Mapping[str, Json]) -> None:
        if event["kind"] == "step":
            admitted[cast(int, event["step"])] = loops[0].desk.admitted

    def watch(loop: Loop) -> None:
        loops.append(loop)
        rates = ExactPassRate.of(load_tokenizer(config))
        watched.append(WatchedLearner(own_learner(loop).rank, rates, EVERY, lambda step: False))
        loop.learner = watched[0]

    with tempfile.TemporaryDirectory(prefix="offbeat-evidence-") as scratch:
        directory = RunDirectory(Path(scratch, "run"))
        directory.create(config)
        try:
            train(config, directory, started=watch, watching=note)
        except RunStopped as collapsed:  # a policy that gets nothing right cannot learn any more: a result, too
            stopped = str(collapsed)
        events = list(read(directory.events))
    taken = [event for event in events if event["kind"] == "step"]
    metrics = [cast("dict[str, float]", event["metrics"]) for event in taken]
    lags = [lag for event in taken for lag in cast("list[int]", event["lags"])]
    drifts = [one["drift_tv_token"] for one in metrics if "drift_tv_token" in one]
    points = range(0, steps + 1, EVERY)
    curve = watched[0].curve
    reached = [max(at for at in curve if at <= point) for point in points]
    return {
        "arm": arm,
        "rate": rate,
        "seed": seed,
        "curve": [round(curve[at], 5) for at in reached],
        "groups": [admitted[min(point, len(taken))] for point in points],
        "publishes": sum(event["kind"] == "published" for event in events) - 1,
        "drift": round(fmean(drifts), 5) if drifts else None,
        "lag": round(fmean(lags), 3) if lags else 0.0,
        "seconds": round(time.monotonic() - began, 1),
        "commit": commit(),
        "stopped": stopped,
    }
