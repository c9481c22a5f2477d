"""Check training: a run of three steps in lockstep, started as a user starts it, with the engine of this machine."""

import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, cast

from offbeat.events import EventKind
from offbeat.imports import missing_modules
from offbeat.preflight.gpu import counting
from offbeat.preflight.gpu.child import LOG_BYTES, SKIP
from offbeat.preflight.gpu.finding import ATTACH, GpuFinding, broken, passed
from offbeat.preflight.gpu.models import doctor_llama, save_model
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import read
from offbeat.types import Json

STEPS: Final = 3
LIMIT: Final = 600.0
"""Seconds. On a GPU the engine and the trainer compile first."""
COMMAND: Final = "from offbeat.cli.main import main; main()"
_CONFIG: Final = """
steps = {steps}
prompts_per_step = 8
group_size = 4

[objective]
preset = "grpo"

[sync]
every = 1

[model]
path = '{model}'
compute = "{dtype}"
serve = "{dtype}"

[task]
name = '{task}'

[engine]
kind = "{engine}"
max_prompt_tokens = 40

[sampling]
max_tokens = 8

[optimizer]
learning_rate = 1e-3

[trainer]
token_budget = 2048

[run]
patience = 300.0
silence = 60.0
"""


def check_training(device: str, *, _engine: str = "", _command: str = COMMAND) -> Iterator[GpuFinding]:
    """Train, and read from the run's own record that rewards were earned and every version passed its probe."""
    engine = _engine or ("hf" if missing_modules(["vllm"]) else "vllm")
    with tempfile.TemporaryDirectory(prefix="offbeat-doctor-") as folder:
        place = Path(folder)
        save_model(place / "model", doctor_llama())
        dtype = "bfloat16" if device == "cuda" else "float32"
        settings = _CONFIG.format(
            steps=STEPS, model=place / "model", dtype=dtype, task=counting.__file__, engine=engine
        )
        (place / "run.toml").write_text(settings, encoding="utf-8")
        log, code = _run([sys.executable, "-c", _command, "train", "run.toml", "--out", "run"], place)
        events = list(read(path)) if (path := RunDirectory(place / "run").events).is_file() else []
        yield judge_training(events, code, log, engine)


def _run(command: Sequence[str], place: Path) -> tuple[str, int | None]:
    """Run a command; return the end of what it printed, and its exit code or None if it did not end in time."""
    inherited = os.pathsep.join([os.getcwd(), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, SKIP: "1", "PYTHONPATH": inherited}
    with (place / "log").open("wb") as log:
        try:
            done = subprocess.run(
                command, cwd=place, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, timeout=LIMIT
            )
            code = done.returncode
        except subprocess.TimeoutExpired:
            code = None
    return (place / "log").read_bytes()[-LOG_BYTES:].decode(errors="replace").strip(), code


def judge_training(events: Sequence[Mapping[str, Json]], code: int | None, log: str, engine: str) -> GpuFinding:
    """Judge a run by its events, exit code and output."""
    steps = [cast("dict[str, Any]", event) for event in events if event["kind"] == EventKind.STEP]
    rewards = [step["metrics"].get("reward_mean") for step in steps]
    troubles = (EventKind.WORKER_LOST, EventKind.WORKER_RECOVERED, EventKind.FAILED)
    trouble = [f"{event['kind']}: {event.get('why', '')}" for event in events if event["kind"] in troubles]
    ready = [event for event in events if event["kind"] == EventKind.WORKER_READY]
    problems = trouble[:2]
    if code is None:
        problems.append(f"it did not end within {LIMIT:.0f} s")
    elif code:
        problems.append(f"it ended with exit code {code}")
    if len(rewards) != STEPS or not all(isinstance(one, float) and math.isfinite(one) for one in rewards):
        problems.append(f"rewards of {STEPS} steps expected, found {rewards}")
    if any(lag for step in steps for lag in step["lags"]):
        problems.append("a step trained on groups of an earlier version, although every step is published")
    if not ready:
        problems.append("no worker loaded a version and passed its probe")
    if problems:
        fix = f"read the output in the report (--json); else {ATTACH}"
        found = broken("training", f"a run of {STEPS} steps with {engine}: {'; '.join(problems)}", fix)
        return replace(found, log=log)
    shown = ", ".join(f"{one:.2f}" for one in rewards if isinstance(one, float))
    detail = f"{STEPS} steps in lockstep with {engine}, rewards {shown}; every version passed its probe"
    return passed("training", detail, rewards=rewards, engine=engine)
