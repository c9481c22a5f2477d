"""Train with parts of a user's own, kill, resume, change a part.

`tests/fixtures/own_parts.py` has a gate, an advantage, an objective, a rule for publishing, a sink and an engine. A run
that a script starts passes the objects, one of a TOML file names them. Each is killed with SIGKILL after some steps and
resumed. A part counts if both processes of a run used it; the objective has no code that runs, so it counts if the
recorded settings are its own. Then a line of the file changes, and `offbeat resume` must refuse.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from offbeat.run.directory import RunDirectory
from offbeat.run.journal import read
from tests import ROOT
from tests.fixtures.processes import OFFBEAT
from tests.fixtures.runs import DIGITS_TASK
from tests.fixtures.tiny_model import save_model

SOURCE: Final = ROOT / "tests" / "fixtures" / "own_parts.py"
STEPS: Final = 10
KILLED_AFTER: Final = 4
PATIENCE: Final = 600.0
SETTINGS: Final = """
steps = {steps}
prompts_per_step = 4
group_size = 4
model = {{ path = "{model}", compute = "float32", serve = "float32" }}
task = {{ name = "{task}", scorers = 1 }}
sampling.max_tokens = 5
optimizer.learning_rate = 1e-3
trainer.save_every = 2
engine.max_prompt_tokens = 24
"""
IN_TOML: Final = {
    "gate": 'objective.gate = "mine.py:gate"',
    "advantage": 'objective.advantage = "mine.py:advantage"',
    "objective": 'objective.preset = "mine.py:objective"',
    "Rule": 'sync.cadence = "mine.py:Rule"',
    "Sink": 'run.sinks = ["mine.py:Sink"]',
    "Engine": 'engine.kind = "mine.py:Engine"',
}
"""The line that names each part."""
IN_PYTHON: Final = """

if __name__ == "__main__":
    from dataclasses import replace

    import offbeat

    offbeat.train(
        "settings.toml",
        out="run",
        progress=False,
        objective=replace(objective, gate=gate, advantage=advantage),
        cadence=Rule,
        sinks=[Sink],
        engine={"kind": Engine},
    )
"""


def run_once(command: list[str], place: Path, kill_at: int | None) -> tuple[int, str]:
    """Start a command; with `kill_at`, kill it once the journal has that step. Return its exit code and output."""
    environment = {**os.environ, "OWN_PARTS": str(place / "used.txt")}
    with (place / "output.txt").open("w+") as output:
        process = subprocess.Popen(command, cwd=place, env=environment, stdout=output, stderr=output)
        deadline = time.monotonic() + PATIENCE
        while kill_at is not None and process.poll() is None and last_step(place / "run") < kill_at:
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if kill_at is not None:
            process.send_signal(signal.SIGKILL)
        code = process.wait(timeout=PATIENCE)
        output.seek(0)
        return code, output.read()


def last_step(run: Path) -> int:
    events = run / "events.jsonl"
    return max((int(str(event["step"])) for event in read(events)), default=0) if events.exists() else 0


def try_route(place: Path, from_python: bool, extra: str = "") -> dict[str, str]:
    """Train with every part, kill, resume, change a file. Return what went wrong, by part; empty if nothing did."""
    place.mkdir()
    save_model(place / "model")
    settings = SETTINGS.format(steps=STEPS, model=place / "model", task=DIGITS_TASK) + f"{extra}\n"
    mine, command = place / "mine.py", [sys.executable, "mine.py"]
    mine.write_text(SOURCE.read_text(encoding="utf-8") + (IN_PYTHON if from_python else ""), encoding="utf-8")
    if not from_python:
        settings += "\n".join(IN_TOML.values())
        command = [OFFBEAT, "train", "settings.toml", "--out", "run"]
    (place / "settings.toml").write_text(settings, encoding="utf-8")
    code, output = run_once(command, place, KILLED_AFTER)
    if code != -signal.SIGKILL:
        return dict.fromkeys(IN_TOML, f"ended with {code} before it was killed: {output[-300:]}")
    code, output = run_once([OFFBEAT, "resume", "run"], place, None)
    if code != 0 or last_step(place / "run") != STEPS:
        return dict.fromkeys(IN_TOML, f"resume ended with {code}: {output[-300:]}")
    return _judge(place, from_python) | _change(place, mine if not from_python else None)


def _judge(place: Path, from_python: bool) -> dict[str, str]:
    used = [line.split() for line in (place / "used.txt").read_text(encoding="utf-8").splitlines()]
    found = {}
    for part in IN_TOML:
        processes = {process for name, process in used if name == part}
        if part != "objective" and len(processes) != 2:
            found[part] = f"worked in {len(processes)} of 2 processes"
    config = RunDirectory(place / "run").config().objective.resolve()
    if str(config.weight) != "Tapered()" or str(config.correction) != "Truncate(cap=2.0, level=<Level.TOKEN: 'token'>)":
        found["objective"] = f"the run has {config}"
    kept = {str(one["setting"]) for one in RunDirectory(place / "run").part_sources()}
    for part, line in IN_TOML.items():
        if line.split(" = ")[0] not in kept and not (
            from_python and part == "objective"
        ):  # the table itself is recorded
            found[part] = "its source is not in the run directory"
    return found


def _change(place: Path, mine: Path | None) -> dict[str, str]:
    """Change the source of the parts; a resume must name each of them, and refuse."""
    files = [mine] if mine else sorted((place / "run" / "parts").glob("*.py"))
    for file in files:
        file.write_text(file.read_text(encoding="utf-8") + "\nCHANGED = True\n", encoding="utf-8")
    code, output = run_once([OFFBEAT, "resume", "run", "--steps", str(STEPS + 2)], place, None)
    config = json.loads((place / "run" / "config.json").read_text(encoding="utf-8"))
    named = {"gate": config["objective"]["gate"], "advantage": config["objective"]["advantage"],
             "Rule": config["sync"]["cadence"], "Sink": config["run"]["sinks"][0],
             "Engine": config["engine"]["kind"]}  # fmt: skip
    silent = {part for part, reference in named.items() if f"the source of {reference}" not in " ".join(output.split())}
    return dict.fromkeys(named if code == 0 else silent, f"a changed file was not refused: {output[-300:]}")
