"""Train SmolLM2-135M on vLLM at v = 1, at v = 10 and with replay, five seeds each: one-digit sums in words.

    python -m lab.learning.evidence.smollm2 --minutes 60    train missing runs, a quarter of an hour each; the same
                                                            command continues; rows evidence.smollm2.* at the end
    python -m lab.learning.evidence.smollm2 --again v10 1   the first half of a finished run again, to compare: ten
                                                            minutes, nothing kept
    python -m lab.learning.evidence.smollm2 --short         one run of two steps, nothing kept

A finished run is one line of `lab/learning/evidence/smollm2.jsonl`, with its seconds by phase.
"""

import json
import os
import subprocess
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final, NotRequired, TypedDict, cast

from lab.figures import Figure, command_parser, commit, record
from lab.fixtures import smollm2
from lab.learning.evidence.claims import Claim, Paired, Verdict, judge
from lab.learning.evidence.rows import KEPT
from lab.learning.smollm2_run import TRAINED
from lab.learning.statistics import Interval, difference
from offbeat.run.journal import read
from offbeat.types import Json
from tests.fixtures.processes import OFFBEAT
from tests.fixtures.runs import scratch

Settings = tuple[str, ...]
"""What an arm changes, as in `offbeat train --set`."""
ARMS: Final[dict[str, Settings]] = {
    "v1": ("sync.every=1",),
    "v10": ("sync.every=10",),
    "replay": ("sync.every=1", "sampler.mode=replay", "sampler.share=0.5", "sampler.reuse_budget=4"),
}
BASE: Final = "v1"
SEEDS: Final = (1, 2, 3, 4, 5)
STEPS: Final = 40
EVERY: Final = 10
"""Steps between two evaluations."""
LOSS: Final = -0.08
"""The margin: five seeds are asked only whether a loss is above it."""
FILE: Final = KEPT / "smollm2.jsonl"
BY_STEP: Final = (
    "gate_stopped_gradient",
    "gate_stopped_up",
    "gate_stopped_down",
    "ess",
    "drift_tv_token",
    "drift_tv_sequence",
    "grad_norm",
)
"""The metrics that a run keeps for every step."""
CONFIG: Final = (
    "seed = {seed}\nsteps = {steps}"
    + TRAINED
    + f"""
[sampler]
refill_limit = 20
[trainer]
save_every = 1000
token_budget = 1024
[evaluation]
every = {EVERY}
prompts = 48
samples = 4
"""
)
"""A policy that solves almost every prompt may generate twenty batches for one that has a wrong answer."""


class SmolRow(TypedDict):
    """One run."""

    arm: str
    seed: int
    curve: list[float]
    """pass@1 after every ten steps, from step 0; 20 prompts that are not trained on x 10 samples."""
    groups: int
    """Groups generated for training."""
    publishes: int
    drift: NotRequired[float]
    """Mean drift of what was trained on. The first runs did not keep it."""
    by_step: NotRequired[dict[str, list[float | None]]]
    """`BY_STEP`, step by step; None where a step has no such number. The first runs did not keep it."""
    seconds: dict[str, float]
    cores: NotRequired[int]
    """Cores that the run could use. The first runs had two and did not keep it."""
    commit: str


Runs = dict[tuple[str, int], SmolRow]
"""By arm and seed."""
Train = Callable[..., SmolRow]
"""Trains the run of an arm, its settings and a seed, like `run`."""


def rows(file: Path = FILE) -> Runs:
    """Return the finished runs."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return {(row["arm"], row["seed"]): row for row in map(json.loads, lines)}


def train_missing(arms: Mapping[str, Settings], file: Path, minutes: float, train: Train) -> Runs:
    """Train the runs that the file lacks, seed by seed, and start none after so many minutes. Return those it has."""
    until, done = time.monotonic() + 60 * minutes, rows(file)
    for seed in SEEDS:
        for arm, settings in arms.items():
            if (arm, seed) not in done and time.monotonic() < until:
                done[arm, seed] = train(arm, settings, seed)
                with file.open("a", encoding="utf-8") as kept:
                    kept.write(json.dumps(done[arm, seed]) + "\n")
                print(f"{arm}, seed {seed}: {done[arm, seed]['curve']}", flush=True)
    if missing := sum((arm, seed) not in done for arm in arms for seed in SEEDS):
        print(f"{missing} runs are missing; the same command continues")
    return done


def run(arm: str, settings: Settings, seed: int, steps: int = STEPS) -> SmolRow:
    """Run `offbeat train` and read its journal."""
    with scratch() as place:
        text = CONFIG.format(seed=seed, steps=steps, model=smollm2.directory())
        (place / "run.toml").write_text(text, encoding="utf-8")
        words = [OFFBEAT, "train", str(place / "run.toml"), "--out", str(place / "run")]
        words += [word for setting in settings for word in ("--set", setting)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{arm}, seed {seed} ended with {done.returncode}:\n{done.stderr[-3000:]}")
        events = list(read(place / "run" / "events.jsonl"))
    trained = [event for event in events if event["kind"] == "step"]
    metrics = [cast("dict[str, float]", event["metrics"]) for event in trained]
    return {
        "arm": arm,
        "seed": seed,
        "curve": [cast("list[float]", event["pass@1"])[0] for event in events if event["kind"] == "evaluated"],
        "groups": sum(map(generated, trained)),
        "publishes": sum(event["kind"] == "published" for event in events) - 1,
        "drift": round(fmean(one["drift_tv_token"] for one in metrics if "drift_tv_token" in one), 5),
        "by_step": {name: [_rounded(one.get(name)) for one in metrics] for name in BY_STEP},
        "seconds": cast("dict[str, float]", events[-1]["seconds"]),
        "cores": len(os.sched_getaffinity(0)),
        "commit": commit(),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def generated(event: Mapping[str, Json]) -> int:
    """Return the number of groups generated for a step, those without contrast included."""
    return sum(groups for _, groups in cast("dict[str, tuple[float, int]]", event["rewards"]).values())


def final(row: SmolRow) -> float:
    """Return the mean of the last two evaluations."""
    return fmean(row["curve"][-2:])


def figures(done: Runs) -> list[Figure]:
    """Return the final pass rates, and the verdicts on their differences from v = 1."""
    by_arm = {arm: [done[arm, seed] for seed in SEEDS] for arm in ARMS}
    finals = {arm: [final(row) for row in arm_rows] for arm, arm_rows in by_arm.items()}
    found = [
        Figure(
            f"evidence.smollm2.{arm}",
            f"SmolLM2-135M on vLLM, {arm}, learning rate 5e-6: final pass@1",
            "stated",
            str(Interval.of(finals[arm])),
            "",
            True,
            len(SEEDS),
            describe(by_arm[arm]),
        )
        for arm in ARMS
    ]
    return [*found, *(verdict.figure() for verdict in losses(done)), _at_equal_groups(by_arm)]


def losses(done: Runs) -> list[Verdict]:
    """Return the verdicts on the differences from v = 1."""
    finals = {arm: [final(done[arm, seed]) for seed in SEEDS] for arm in ARMS}
    return judge([_loss(arm, finals) for arm in ARMS if arm != BASE])


def _at_equal_groups(by_arm: Mapping[str, Sequence[SmolRow]]) -> Figure:
    """Compare replay at its end with v = 1 at half time, when it has generated about as many groups."""
    half = STEPS // EVERY // 2
    replay = [row["curve"][-1] for row in by_arm["replay"]]
    fresh = [row["curve"][half] for row in by_arm[BASE]]
    apart = difference(replay, fresh)
    generated_by = fmean(row["groups"] for row in by_arm["replay"]), fmean(row["groups"] for row in by_arm[BASE]) / 2
    return Figure(
        "evidence.smollm2.replay-groups",
        "SmolLM2-135M on vLLM: pass@1 of replay minus that of v = 1 after about as many generated groups",
        "stated",
        f"{apart.mean:.3f} [{apart.low:.3f}, {apart.high:.3f}]",
        "",
        True,
        len(SEEDS),
        f"replay after {STEPS} steps and {generated_by[0]:.0f} groups {Interval.of(replay)}, v = 1 after {STEPS // 2} "
        f"steps and {generated_by[1]:.0f} groups {Interval.of(fresh)}; paired by seed",
    )


def _loss(arm: str, finals: Mapping[str, Sequence[float]]) -> Claim:
    apart = [one - other for one, other in zip(finals[arm], finals[BASE], strict=True)]
    return Claim(
        f"evidence.smollm2.{arm}-loss",
        f"SmolLM2-135M on vLLM, learning rate 5e-6: final pass@1 of {arm} minus that of v = 1",
        f"interval above {LOSS}",
        Paired((arm, BASE), apart),
        (LOSS,),
        f"no loss above {-LOSS}",
        f"loses more than {-LOSS}",
        f"{Interval.of(finals[arm])} against {Interval.of(finals[BASE])}, paired by seed",
    )


def describe(arm_rows: Sequence[SmolRow]) -> str:
    """Return where the runs of an arm began, and what they took."""
    starts = fmean(row["curve"][0] for row in arm_rows)
    phases = sorted({phase for row in arm_rows for phase in row["seconds"]})
    seconds = {phase: fmean(row["seconds"].get(phase, 0.0) for row in arm_rows) for phase in phases}
    spent = ", ".join(f"{phase} {value:.0f} s" for phase, value in seconds.items() if value >= 0.5)
    drifts = [row["drift"] for row in arm_rows if "drift" in row]
    drift = f", drift {fmean(drifts):.3f} (kept for {len(drifts)} runs)" if drifts else ""
    return (
        f"from {starts:.3f}; {fmean(row['groups'] for row in arm_rows):.0f} generated groups, "
        f"{fmean(row['publishes'] for row in arm_rows):.0f} publishes{drift}; {sum(seconds.values()):.0f} s: {spent}"
    )


def sweep_parser(doc: str | None) -> ArgumentParser:
    """Return the parser of a command that trains runs until its time is up."""
    parser = command_parser(doc, short="one run of two steps; keep nothing")
    parser.add_argument("--minutes", type=float, default=60.0, help="start no new run after this many minutes")
    parser.add_argument("--again", nargs=2, metavar=("ARM", "SEED"), help="train half of a finished run; keep nothing")
    return parser


def command(
    options: Namespace,
    arms: Mapping[str, Settings],
    file: Path,
    figures: Callable[[Runs], list[Figure]],
    train: Train = run,
) -> None:
    """Train the runs of these arms that the file lacks, and record their figures when all are there."""
    if options.short:
        last = list(arms)[-1]
        print(train(last, arms[last], 101, steps=2))
        return
    if options.again:
        _repeat(options.again[0], int(options.again[1]), arms, rows(file), train)
        return
    done = train_missing(arms, file, options.minutes, train)
    if len(done) == len(arms) * len(SEEDS):
        record(*figures(done))


def _repeat(arm: str, seed: int, arms: Mapping[str, Settings], kept: Runs, train: Train) -> None:
    """Train the first half of a run again, and print its evaluations beside the kept ones."""
    if (arm, seed) not in kept:
        raise SystemExit(
            f"no run of {arm}, seed {seed}, is kept; choose an arm of {', '.join(arms)} and a seed {SEEDS}"
        )
    curve = kept[arm, seed]["curve"]
    now = train(arm, arms[arm], seed, steps=EVERY * (len(curve) // 2))["curve"]
    print(f"now   {[round(value, 3) for value in now]}")
    print(f"kept  {[round(value, 3) for value in curve[: len(now)]]}")


if __name__ == "__main__":
    command(sweep_parser(__doc__).parse_args(), ARMS, FILE, figures)
