"""`offbeat train` and `offbeat resume` from the command line."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.config import parse
from offbeat.events import EventKind
from offbeat.reports.live import LiveView
from offbeat.run.journal import read
from tests.fixtures.tiny_model import save_model

pytestmark = pytest.mark.engine
run = CliRunner(env={"COLUMNS": "200"}).invoke
TOML = """
steps = {steps}
prompts_per_step = 4
group_size = 4
[model]
path = "{model}"
compute = "float32"
serve = "float32"
[engine]
kind = "hf"
[sampling]
max_tokens = 5
[sync]
every = 2
[objective]
zero_variance_mask = false
[evaluation]
every = 2
prompts = 8
[task]
name = "{task}"
scorers = 1
"""


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    save_model(tmp_path / "model")
    file = tmp_path / "run.toml"
    task = Path(__file__).parent / "digits_task.py"
    file.write_text(TOML.format(steps=4, model=tmp_path / "model", task=task))
    return file


def test_a_run_prints_its_plan_trains_and_ends_with_a_balanced_ledger(toml: Path, tmp_path: Path) -> None:
    result = run(app, ["train", str(toml), "--out", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert "4 prompts × 4 = 16 completions a step → 1 update; sync every 2 steps: lag 0 to 1" in result.output
    assert "step 4/4  reward" in result.output and "published version 2 (period" in result.output
    assert "step 2  pass@1 " in result.output
    assert "16 generated = " in result.output
    again = run(app, ["train", str(toml), "--out", str(tmp_path / "run")])
    assert again.exit_code == 2 and "offbeat resume" in again.output
    longer = run(app, ["resume", str(tmp_path / "run"), "--steps", "6"])
    assert longer.exit_code == 0 and "step 6/6  reward" in longer.output and "24 generated" in longer.output


def test_an_interrupt_saves_a_checkpoint_and_prints_how_to_continue(toml: Path, tmp_path: Path) -> None:
    toml.write_text(toml.read_text().replace("steps = 4", "steps = 100000"))
    place = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", "from offbeat.cli.main import main; main()", "train", str(toml), "--out", str(place)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        until = time.monotonic() + 120
        events = place / "events.jsonl"
        while (
            not (events.exists() and any(e["kind"] == EventKind.STEP for e in read(events)))
            and time.monotonic() < until
        ):
            time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    assert "stopping after this step" in output and f"offbeat resume {place}" in output
    assert [event["kind"] for event in read(events)][-2:] == [EventKind.SAVED, EventKind.ENDED]


def test_a_wrong_file_gets_a_message_for_every_problem(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('[objective]\npreset = "grp"\n[sync]\nevry = 3\n')
    result = run(app, ["train", str(file)])
    assert result.exit_code == 2 and "sync.evry is not a setting; did you mean sync.every" in result.output.replace(
        "'", ""
    )


@pytest.mark.parametrize(("width", "height"), [(80, 24), (200, 60)])
def test_the_live_view_fits_its_terminal(width: int, height: int) -> None:
    view = LiveView(parse({"sync": {"every": 10, "drift_budget": 0.1}}), Console(width=width, height=height))
    for step in range(1, 120):
        metrics = {"reward_mean": step / 120, "lag": step % 10, "drift_tv_token": 0.02}
        view(
            {
                "step": step,
                "kind": EventKind.STEP,
                "metrics": metrics,
                "seconds": {"training": 3.0, "waiting for groups": 9.0},
            }
        )
    view({"step": 119, "kind": EventKind.ALARM, "says": "ess below 0.1 for 3 steps, now 0.01: sync sooner"})
    with view.console.capture() as shown:
        view.console.print(view.render())
    lines = shown.get().splitlines()
    assert len(lines) <= height and max(map(len, lines)) <= width
    assert any("generation-bound" in line for line in lines) and any("▁" in line for line in lines)


def test_the_live_view_shows_unknown_values_as_unknown() -> None:
    view = LiveView(parse({}), Console(width=100))
    step = {"step": 1, "kind": EventKind.STEP, "metrics": {"loss": 0.5, "lag": None}}
    view.step = step
    assert "reward unknown  lag unknown  drift unknown" in view.line(step)
    with view.console.capture() as shown:
        view.console.print(view.render())
    assert "lag" in shown.get() and "0.0" not in shown.get() and not view.rewards
