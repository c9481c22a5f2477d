"""Measure the sampler and its index.

    python -m lab.bench.sampler sample    draw and read from 1,000,000 completions, reopen after SIGKILL, memory: rows
                                          experience.2.*; minutes
    python -m lab.bench.sampler resume    kill each sampler with SIGKILL at 50 random points and compare the sequence
                                          it draws: row experience.6; minutes
    python -m lab.bench.sampler machine   a rule-based state machine over log, sampler and ledger: row
                                          experience.5.machine; 8 minutes

`--short` runs a small part and records nothing.
"""

import json
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
from lab.figures import ROOT, Figure, command_parser, machine, report
from offbeat.experience.index import Columns
from offbeat.experience.log import ExperienceLog

REASONS = {
    "replay": "; drawing by weight over the whole past adds to the reading",
    "offline": "; the groups of a batch lie anywhere in the log",
}
"""By mode, what its batches cost more than fresh ones."""


def start_process(*arguments: str) -> "subprocess.Popen[str]":
    """Start one of the processes of `sampler_processes.py`."""
    command = [sys.executable, "-m", "lab.bench.sampler_processes", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def answer(*arguments: str) -> dict[str, float]:
    """Run such a process and return what it prints last."""
    process = start_process(*arguments)
    printed, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{' '.join(arguments)} ended with {process.returncode}")
    return cast(dict[str, float], json.loads(printed.splitlines()[-1]))


def sample(short: bool) -> bool:
    """Rows experience.2.*."""
    count, batch, draws, kills = (2_000, 16, 20, 1) if short else (125_000, 64, 1_000, 5)
    with tempfile.TemporaryDirectory(prefix="bench-sampler-") as name:
        place = Path(name)
        build(place, count, batch)
        took = {mode: answer("draw-and-read", name, mode, str(batch), str(draws)) for mode in MODES}
        with ExperienceLog.open(place) as log:
            rows, _ = log.index_since(None)
        np.savez(place / "columns.npz", **{f.name: getattr(rows, f.name) for f in fields(Columns)})
        memory = _worst([answer("index-memory", name, mode, str(batch)) for mode in MODES])
        reopened = [_killed_and_reopened(name, batch) for _ in range(kills)]
    scale = f"{count * G:,} completions of 256 tokens"

    figures = [
        Figure(
            f"experience.2.{mode}",
            f"a batch of {batch} groups of {G} drawn by '{mode}' and read, out of {scale}: p99",
            "≤ 50 ms",
            round(found["p99"], 1),
            "ms",
            found["p99"] <= 50,
            draws,
            f"wall time, median {found['p50']:.1f} ms; p99 of the draw alone {found['draw']:.1f} ms; processor time of "
            f"all threads {found['processor p50']:.1f} ms median, {found['processor p99']:.1f} ms p99; "
            f"file cache warm, local disk, after gc.freeze(), {machine()}" + REASONS.get(mode, ""),
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
            "imports, opening, index, sampler state, one batch drawn and read; killed while appending and drawing",
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
    return report(short, *figures) or short


def _worst(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: max(one[name] for one in found) for name in found[0]}


def _killed_and_reopened(place: str, batch: int) -> float:
    process = start_process("write-and-draw", place, str(batch))
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
    """Return the recorded outcome of each step. Raise if a step that was drawn again after a kill differs."""
    found: dict[int, str] = {}
    for line in path.read_text().splitlines():
        try:
            k, outcome = json.loads(line)
        except json.JSONDecodeError:  # torn by a kill, and followed by the first line of the next process
            continue
        if found.setdefault(k, outcome) != outcome:
            raise AssertionError(f"step {k} was drawn as {found[k]} and again as {outcome}")
    return found


def resume(short: bool) -> bool:
    """Row experience.6."""
    kills, steps = (2, 20) if short else (50, 300)
    rng = random.Random(0)
    same = again = draws = 0
    with tempfile.TemporaryDirectory(prefix="bench-sampler-") as name:
        place = Path(name)
        schedule(place, steps)
        for mode in MODES:
            start_process("consume", name, mode, f"{mode}-whole").communicate()
            for _ in range(kills):
                again += _consumed_until_killed(name, mode, rng)
            start_process("consume", name, mode, f"{mode}-killed").communicate()
            whole, killed = (outcomes(place / f"{mode}-{run}.drawn") for run in ("whole", "killed"))
            assert sorted(whole) == list(range(steps))
            draws += sum(outcome.startswith("Draw") for outcome in whole.values())
            same += whole == killed
    figure = Figure(
        "experience.6",
        f"samplers whose sequence of groups is identical after {kills} kills by SIGKILL each",
        f"{len(MODES)} of {len(MODES)}",
        f"{same} of {len(MODES)}",
        "samplers",
        same == len(MODES),
        kills * len(MODES),
        f"{steps} steps each, {draws} batches in all, with late feedback and expiry; every step drawn again after a "
        f"kill gave the same batch and the same drops; {again} kills hit a run before its end",
    )
    return report(short, figure) or short


def _consumed_until_killed(place: str, mode: str, rng: random.Random) -> bool:
    """Let a process draw a few steps and kill it at a random moment. Return True if it was still working."""
    process = start_process("consume", place, mode, f"{mode}-killed")
    assert process.stdout is not None
    for _ in range(rng.randint(1, 12)):
        process.stdout.readline()
    time.sleep(rng.random() * 0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


def state_machine(short: bool) -> bool:
    """Row experience.5.machine."""
    from hypothesis import HealthCheck, Phase, settings
    from hypothesis.stateful import run_state_machine_as_test

    from tests.fixtures.experience_machine import ExperienceMachine

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
    figure = Figure(
        "experience.5.machine",
        "steps of a rule-based state machine over log, sampler and ledger without a failure",
        "≥ 10,000; conservation true after every one",
        ExperienceMachine.steps,
        "steps",
        ExperienceMachine.steps >= 10_000,
        ExperienceMachine.steps,
        f"{ExperienceMachine.draws} batches drawn in {time.perf_counter() - start:.0f} s; after every step the fate of "
        "each group in the ledger equals the machine's own record; lag, budget and cooldown held at every draw",
    )
    return report(short, figure) or short


if __name__ == "__main__":
    commands = {"sample": sample, "resume": resume, "machine": state_machine}
    parser = command_parser(__doc__, short="run a small part and record nothing")
    parser.add_argument("what", choices=commands)
    arguments = parser.parse_args()
    sys.exit(not commands[arguments.what](arguments.short))
