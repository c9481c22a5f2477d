"""Shrunk advantages: against a reference in plain Python, after SIGKILL, and in runs with two completions a prompt.

python -m lab.parity.shrunk            a quarter of an hour; writes rows promises.5.*
python -m lab.parity.shrunk --short    small forms of all three; records nothing
"""

import hashlib
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
import torch

from lab.figures import ROOT, Figure, command_parser, report
from lab.house.digests import CONFIG, offbeat
from lab.learning.cells import Arm, Cell, run
from lab.learning.statistics import Interval
from offbeat.experience.modes import Replay
from offbeat.experience.priors import PromptPriors
from offbeat.experience.sampler import Draw, Sampler, SamplerLimits
from offbeat.objective.spec import Advantage, Objective
from offbeat.run.journal import read
from offbeat.trainer.batch import assemble_batch
from offbeat.types import UNKNOWN, Completion, Group, Prompt, Score, StepContext, VersionSpan
from tests.fixtures.simulation.memory_log import MemoryLog
from tests.fixtures.tiny_model import save_model

HALFLIFE = 7.0
SEEDS = (1, 2, 3, 4, 5)
KILLS = 20


@dataclass(frozen=True)
class Drawn:
    """A group as the reference sees it: when it was drawn first, its prompt, version and rewards."""

    prompt: str
    version: int | None
    rewards: tuple[float, ...]


def reference(k: int, group: Drawn, earlier: Sequence[Drawn]) -> list[float]:
    """Return the advantages of a group from the formulas alone. `earlier` are the other groups drawn before step k."""

    def counts(groups: Sequence[Drawn]) -> tuple[float, float]:
        right = wrong = 0.0
        for one in groups:
            if one.version is not None:
                weight = 0.5 ** ((k - one.version) / HALFLIFE)
                right += weight * sum(one.rewards)
                wrong += weight * sum(1 - r for r in one.rewards)
        return right, wrong

    all_right, all_wrong = counts(earlier)
    mean = (all_right + 1) / (all_right + all_wrong + 2)
    right, wrong = counts([one for one in earlier if one.prompt == group.prompt])
    right, wrong = right + 2 * mean, wrong + 2 * (1 - mean)
    found = []
    for i, reward in enumerate(group.rewards):
        others = group.rewards[:i] + group.rewards[i + 1 :]
        a, b = right + sum(others), wrong + sum(1 - r for r in others)
        scale = math.sqrt(a * b / ((a + b) * (a + b + 1)) + 1e-4)
        found.append((reward - a / (a + b)) / scale)
    return found


def compare(steps: int, size: int, seed: int) -> tuple[float, int]:
    """Return the largest difference between a run's sampler and batch and the reference, and how many advantages."""
    rng, log = random.Random(seed), MemoryLog()
    sampler = Sampler(Replay(reuse_budget=3), SamplerLimits(8, max_lag=4), seed, PromptPriors(HALFLIFE))
    cursor, drawn, worst, count = None, dict[str, Drawn](), 0.0, 0
    for k in range(steps):
        log.append(_group(f"g{k}-{i}", rng, k, size) for i in range(8))
        rows, cursor = log.index_since(cursor)
        sampler.feed(rows)
        draw = sampler.draw(k)
        assert isinstance(draw, Draw)
        groups = log.read(draw.ordinals)
        context = StepContext(priors={g.id: prior for g, prior in zip(groups, draw.priors, strict=True)})
        batch = assemble_batch(groups, Objective(Advantage.SHRUNK), step=k, context=context)
        for group, row in zip(groups, batch.credit.advantages_BG.tolist(), strict=True):
            seen = _seen(group)
            expected = reference(k, seen, [one for name, one in drawn.items() if name != group.id])
            worst = max(worst, *(abs(a - b) for a, b in zip(row, expected, strict=True)))
            count += len(expected)
        drawn |= {group.id: _seen(group) for group in groups}
    return worst, count


def _group(name: str, rng: random.Random, k: int, size: int) -> Group:
    version = None if rng.random() < 0.1 else max(0, k - rng.randint(0, 3))
    spans = () if version is None else (VersionSpan(version, 0, 1),)
    source = "policy" if spans else "theirs"
    answers = (
        Completion(
            f"{name}/{i}",
            np.array([3]),
            np.array([-1.0], np.float32) if spans else UNKNOWN,
            spans,
            source=source,
            score=Score(float(rng.random() < 0.4)),
        )
        for i in range(size)
    )
    return Group(name, Prompt(f"p{rng.randint(0, 9)}", np.array([1]), "t"), tuple(answers))


def _seen(group: Group) -> Drawn:
    rewards = tuple(one.score.reward for one in group.completions if isinstance(one.score, Score))
    return Drawn(group.prompt.id, group.oldest_version, rewards)


def exactness(steps: int) -> Figure:
    """Row promises.5.reference."""
    found = [compare(steps, size, seed) for size in (2, 4, 8) for seed in range(5)]
    worst = max(error for error, _ in found)
    return Figure(
        "promises.5.reference",
        "largest difference of a shrunk advantage, from the log's index to the batch, from plain Python",
        "≤ 1e-9",
        float(f"{worst:.2g}"),
        "",
        worst <= 1e-9,
        sum(count for _, count in found),
        "groups of 2, 4 and 8; replayed, lagging and imported groups among them; half-life 7 steps",
    )


SHRUNK = CONFIG.replace("group_size = 4", "group_size = 2").replace(
    "zero_variance_mask = false", 'advantage = "shrunk", prior_halflife = 6'
)


def resumes(kills: int) -> Figure:
    """Row promises.5.resume."""
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        (place / "model").mkdir()
        save_model(place / "model")
        task, file = ROOT / "tests" / "run" / "digits_task.py", place / "run.toml"
        file.write_text(
            SHRUNK.format(updates=1, model=place / "model", every=2, task=task) + '[sampler]\nmode = "replay"\n'
        )
        offbeat(ROOT, "train", str(file), "--out", str(place / "whole"))
        expected, same, points = _digest(place / "whole"), 0, []
        for number in range(kills):
            run_place = place / f"run-{number}"
            points.append(_kill_after(file, run_place, step=1 + (7 * number) % 18))
            offbeat(ROOT, "resume", str(run_place))
            same += _digest(run_place) == expected
    return Figure(
        "promises.5.resume",
        "runs with shrunk advantages that end with the same policy, bit for bit, after SIGKILL and resume",
        f"{kills} of {kills}",
        f"{same} of {kills}",
        "runs",
        same == kills,
        kills,
        f"20 steps, v = 2, two completions a prompt, half of a batch replayed; killed after steps {sorted(points)}",
    )


def _digest(place: Path) -> str:
    """Hash the policy, and the rewards of every step. A step that was repeated after the kill counts once."""
    offbeat(ROOT, "export", str(place), str(place / "exported"), "--dtype", "float32")
    found = hashlib.sha256((place / "exported" / "model.safetensors").read_bytes())
    rewards = {event["step"]: event["rewards"] for event in read(place / "events.jsonl") if event["kind"] == "step"}
    found.update(json.dumps(sorted(rewards.items())).encode())
    return found.hexdigest()


def _kill_after(file: Path, place: Path, step: int) -> int:
    """Start a run, kill it once it has written this step, and return the step."""
    command = [
        sys.executable,
        "-c",
        "from offbeat.cli.main import main; main()",
        "train",
        str(file),
        "--out",
        str(place),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    running = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    events = place / "events.jsonl"
    while running.poll() is None:
        if events.exists() and f'"step": {step}, "kind": "step"' in events.read_text(encoding="utf-8"):
            running.send_signal(signal.SIGKILL)
            break
        time.sleep(0.005)
    running.wait()
    return step


def learns(steps: int, seeds: Sequence[int]) -> Figure:
    """Row promises.5.two."""

    def finals(advantage: str) -> list[dict[str, float]]:
        arm = Arm(
            advantage, {"objective": {"preset": "rec-oneside-nois", "advantage": advantage}, "sync": {"every": 2}}
        )
        return [run(Cell(arm, 2.5e-4, seed, steps, prompts=64, size=2))["curve"] for seed in seeds]

    shrunk, loo = finals("shrunk"), finals("leave-one-out")
    ends = [list(curve.values())[-1] for curve in shrunk]
    starts = [next(iter(curve.values())) for curve in shrunk]
    gains = [end - start for end, start in zip(ends, starts, strict=True)]
    others = fmean(list(curve.values())[-1] for curve in loo)
    spread = str(Interval.of(gains)) if len(gains) > 1 else f"{gains[0]:.3f}"
    low = Interval.of(gains).low if len(gains) > 1 else gains[0]
    return Figure(
        "promises.5.two",
        "runs with two completions a prompt and shrunk advantages: pass rate gained",
        "interval above 0",
        spread,
        "",
        low > 0,
        len(seeds),
        f"{steps} steps of 64 × 2, v = 2, lr 2.5e-4: from {fmean(starts):.3f} to {fmean(ends):.3f}; with "
        f"leave-one-out advantages to {others:.3f}",
    )


def main(short: bool, part: str) -> bool:
    torch.set_num_threads(1)
    found = []
    if part in ("reference", "all"):
        found.append(exactness(20 if short else 60))
    if part in ("resume", "all"):
        found.append(resumes(2 if short else KILLS))
    if part in ("two", "all"):
        found.append(learns(10 if short else 60, SEEDS[:1] if short else SEEDS))
    return report(short, *found)


if __name__ == "__main__":
    parser = command_parser(__doc__, short="small forms of all three; record nothing")
    parser.add_argument("part", nargs="?", default="all", choices=["all", "reference", "resume", "two"])
    options = parser.parse_args()
    sys.exit(not main(options.short, options.part))
