"""Figures of the sampler and its index.

    python -m lab.bench.sampler sample    1,000,000 completions: drawing and reading, reopening after kill -9, memory
    python -m lab.bench.sampler resume    each sampler killed with SIGKILL at 50 random points: the sequence it gives
    python -m lab.bench.sampler machine   a rule-based state machine over log, sampler and ledger

`--short` runs a small form of each and records nothing.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import fields
from pathlib import Path
from typing import cast

import numpy as np

from lab.bench.sampler_processes import MODES, G, build, schedule
from lab.figures import ROOT, Figure, record
from offbeat.experience.index import Columns
from offbeat.experience.log import ExperienceLog


def child(*arguments: str) -> "subprocess.Popen[str]":
    """One of `sampler_processes.py`."""
    command = [sys.executable, "-m", "lab.bench.sampler_processes", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def answer(*arguments: str) -> dict[str, float]:
    """What such a process prints last."""
    process = child(*arguments)
    printed, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {process.returncode}")
    return cast(dict[str, float], json.loads(printed.splitlines()[-1]))


def sample(short: bool) -> bool:
    """Must show 2."""
    count, batch, draws, kills = (2_000, 16, 20, 1) if short else (125_000, 64, 1_000, 5)
    with tempfile.TemporaryDirectory(prefix="bench-sampler-") as name:
        place = Path(name)
        build(place, count, batch)
        took = {mode: answer("draw-and-read", name, mode, str(batch), str(draws)) for mode in MODES}
        with ExperienceLog.open(place) as log:
            rows, _ = log.index_since(None)
        np.savez(place / "columns.npz", **{f.name: getattr(rows, f.name) for f in fields(Columns)})
        memory = _worst([answer("index-memory", name, mode) for mode in MODES])
        reopened = [_killed_and_reopened(name, batch) for _ in range(kills)]
    scale = f"{count * G:,} completions of 256 tokens"
    load = f"load average {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores"
    figures = [
        Figure(
            f"experience.2.{mode}",
            f"a batch of {batch} groups of {G} drawn by '{mode}' and read, out of {scale}: p99",
            "≤ 50 ms",
            round(found["p99"], 1),
            "ms",
            found["p99"] <= 50,
            draws,
            f"median {found['p50']:.1f} ms; p99 of the draw alone {found['draw']:.1f} ms; "
            f"file cache warm, local disk, after gc.freeze(), {load}"
            + ("; drawing by weight over the whole past comes on top of the reading" if mode == "replay" else ""),
        )
        for mode, found in took.items()
    ]
    figures += [
        Figure(
            "experience.2.reopen",
            f"from starting a process to its first batch, after kill -9, {scale}: the slowest",
            "≤ 5 s",
            round(max(reopened), 2),
            "s",
            max(reopened) <= 5,
            kills,
            "imports, opening, index, sampler's state, one batch drawn and read; killed while appending and drawing",
        ),
        Figure(
            "experience.2.memory",
            "memory of the sampler's index and history, the most of all samplers",
            "≤ 200 bytes a group",
            round(memory["held"], 1),
            "bytes a group",
            max(memory["held"], memory["resident"]) <= 200,
            count,
            f"allocated and held; {memory['peak']:.0f} at the peak of a draw; "
            f"the process's resident memory grew by {memory['resident']:.0f}",
        ),
    ]
    return report(short, *figures)


def _worst(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(one[name] for one in found) for name in found[0]}


def _killed_and_reopened(place: str, batch: int) -> float:
    process = child("write-and-draw", place, str(batch))
    assert process.stdout is not None
    for _ in range(random.randint(1, 4)):
        process.stdout.readline()
    time.sleep(random.random() * 0.2)
    process.kill()
    process.communicate()
    start = time.perf_counter()
    answer("reopen", place, str(batch))
    return time.perf_counter() - start


def outcomes(path: Path) -> dict[int, str]:
    """Each step's outcome as written down; a step drawn again after a kill must say the same."""
    found: dict[int, str] = {}
    for line in path.read_text().splitlines():
        try:
            k, outcome = json.loads(line)
        except json.JSONDecodeError:  # torn by a kill, and followed by the next life's first line
            continue
        if found.setdefault(k, outcome) != outcome:
            raise AssertionError(f"step {k} was drawn as {found[k]} and again as {outcome}")
    return found


def resume(short: bool) -> bool:
    """Must show 6."""
    kills, steps = (2, 20) if short else (50, 300)
    rng = random.Random(0)
    same = again = draws = 0
    with tempfile.TemporaryDirectory(prefix="bench-sampler-") as name:
        place = Path(name)
        schedule(place, steps)
        for mode in MODES:
            child("consume", name, mode, f"{mode}-whole").communicate()
            for _ in range(kills):
                again += _consumed_until_killed(name, mode, rng)
            child("consume", name, mode, f"{mode}-killed").communicate()
            whole, killed = (outcomes(place / f"{mode}-{run}.drawn") for run in ("whole", "killed"))
            assert sorted(whole) == list(range(steps))
            draws += sum(outcome.startswith("Draw") for outcome in whole.values())
            same += whole == killed
    return report(
        short,
        Figure(
            "experience.6",
            f"samplers whose sequence of groups is identical after {kills} kills by SIGKILL each",
            f"{len(MODES)} of {len(MODES)}",
            f"{same} of {len(MODES)}",
            "samplers",
            same == len(MODES),
            kills * len(MODES),
            f"{steps} steps each, {draws} batches in all, late feedback and expiry among them; every step drawn again "
            f"after a kill gave the same batch and the same drops; {again} kills hit a run before its end",
        ),
    )


def _consumed_until_killed(place: str, mode: str, rng: random.Random) -> bool:
    """Let it draw a few steps, kill it at a random instant; whether it was still at work."""
    process = child("consume", place, mode, f"{mode}-killed")
    assert process.stdout is not None
    for _ in range(rng.randint(1, 12)):
        process.stdout.readline()
    time.sleep(rng.random() * 0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def machine(short: bool) -> bool:
    """Must show 5, the state machine."""
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.stateful import run_state_machine_as_test

    from lab.torture.experience_machine import ExperienceMachine

    goal = 200 if short else 10_000
    slow = [HealthCheck.too_slow, HealthCheck.data_too_large]
    start = time.perf_counter()
    while ExperienceMachine.steps < goal:
        run_state_machine_as_test(
            ExperienceMachine,
            settings=settings(
                max_examples=5 if short else 25,
                stateful_step_count=60,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=slow,
            ),
        )
    return report(
        short,
        Figure(
            "experience.5.machine",
            "steps of a rule-based state machine over log, sampler and ledger without a failure",
            "≥ 10,000; conservation true after every one",
            ExperienceMachine.steps,
            "steps",
            ExperienceMachine.steps >= 10_000,
            ExperienceMachine.steps,
            f"{ExperienceMachine.draws} batches drawn in {time.perf_counter() - start:.0f} s; after every step each "
            "group's fate in the ledger equals books kept by hand; lag, budget and cooldown held at every draw",
        ),
    )


def report(short: bool, *figures: Figure) -> bool:
    """Record the figures of a full run; of a short one, only say them."""
    if not short:
        return record(*figures)
    for figure in figures:
        print(f"{figure.id} (short form, not recorded)  {figure.what}: {figure.measured} {figure.unit}; {figure.note}")
    return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["sample", "resume", "machine"])
    parser.add_argument("--short", action="store_true", help="a small form that records nothing")
    arguments = parser.parse_args()
    run = {"sample": sample, "resume": resume, "machine": machine}[arguments.what]
    sys.exit(0 if run(arguments.short) else 1)
