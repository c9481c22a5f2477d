"""Damage the weight log of a run in many ways and resume it: `python -m lab.torture.weight_log_damage`. Ten minutes.

A tiny run trains four steps and publishes after each. Every damage is done to a copy of it, and `offbeat resume` trains
one more step. The checkpoint is whole, so the run must go on, or end with a sentence that names the repair.
"""

import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from lab.figures import Figure, command_parser, machine, report
from offbeat.events import EventKind
from offbeat.run.journal import read
from tests.fixtures.damage import Damage, weight_damages
from tests.fixtures.processes import OFFBEAT
from tests.fixtures.runs import DIGITS_TASK, scratch
from tests.fixtures.tiny_model import save_model

STEPS: Final = 4
DEADLINE: Final = 60.0
"""Seconds from the start of `offbeat resume` to its end."""
CONFIG: Final = """
steps = {steps}
prompts_per_step = 4
group_size = 4
model = {{ path = "{model}", compute = "float32", serve = "float32" }}
task = {{ name = "{task}", scorers = 1 }}
engine = {{ kind = "hf", max_prompt_tokens = 24 }}
sampling.max_tokens = 5
optimizer.learning_rate = 1e-3
objective = {{ preset = "rec-oneside-nois", zero_variance_mask = false }}
trainer.save_every = 2
"""


def make_run(place: Path, *settings: str) -> Path:
    """Train a tiny run and return its directory."""
    if not (place / "model").exists():
        save_model(place / "model")
    (place / "run.toml").write_text(CONFIG.format(steps=STEPS, model=place / "model", task=DIGITS_TASK))
    run = place / ("run" + "".join(settings))
    words = [word for setting in settings for word in ("--set", setting)]
    subprocess.run(
        [OFFBEAT, "train", str(place / "run.toml"), "--out", str(run), *words], check=True, stdout=subprocess.DEVNULL
    )
    return run


def resume(run: Path) -> tuple[int | None, float, str]:
    """Resume for one more step; return the exit code (None at ten times the deadline), the seconds and the output."""
    began = time.monotonic()
    command = [OFFBEAT, "resume", str(run), "--steps", str(STEPS + 1)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10 * DEADLINE)
    except subprocess.TimeoutExpired:
        return None, time.monotonic() - began, "it did not end"
    return done.returncode, time.monotonic() - began, done.stdout + done.stderr


def judge(run: Path, code: int | None, output: str) -> str:
    """Return "goes on", "names the repair", or what went wrong."""
    if code == 0:
        steps = {event["step"] for event in read(run / "events.jsonl") if event["kind"] == EventKind.STEP}
        return "goes on" if STEPS + 1 in steps else "it ended without the step"
    if "Traceback" not in output and "Move" in output:
        return "names the repair"
    return f"ended with {code}: {output[-500:]}"


def main() -> bool:
    short = command_parser(__doc__, short="three damages").parse_args().short
    with scratch() as place:
        run, foreign = make_run(place), make_run(place, "seed=1")
        damages: Mapping[str, Damage] = weight_damages(foreign / "weights")
        names = list(damages)[:3] if short else list(damages)
        good, slowest = 0, 0.0
        for number, name in enumerate(names):
            copy = shutil.copytree(run, place / f"copy{number}")
            damages[name](copy)
            code, seconds, output = resume(copy)
            verdict = judge(copy, code, output)
            good += verdict in ("goes on", "names the repair")
            slowest = max(slowest, seconds)
            print(f"{name}: {verdict}, {seconds:.1f} s", flush=True)
    rows = (
        Figure("hardening.5", "damages of the weight log after which a resume goes on or names the repair",
               f"{len(names)} of {len(names)}", f"{good} of {len(names)}", "damages", good == len(names), len(names)),
        Figure("hardening.5.seconds", "slowest of these resumes, from the command to its end", f"≤ {DEADLINE:g}",
               round(slowest, 1), "s", slowest <= DEADLINE, len(names), machine()),
    )  # fmt: skip
    return report(short, *rows)


if __name__ == "__main__":
    sys.exit(not main())
