"""Reports of real runs: while they run, after SIGKILL, and at their end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.events import EventKind
from offbeat.run.journal import read
from tests.fixtures.tiny_model import save_model

pytestmark = pytest.mark.engine
run = CliRunner(env={"COLUMNS": "200"}).invoke
TASK = Path(__file__).parent.parent / "run" / "digits_task.py"
TOML = """
steps = {steps}
prompts_per_step = 4
group_size = 4
model = {{ path = "{model}", compute = "float32", serve = "float32" }}
engine.kind = "hf"
sampling.max_tokens = 5
sync.every = 2
objective.zero_variance_mask = false
trainer.save_every = 2
evaluation = {{ every = 2, prompts = 8 }}
task = {{ name = "{task}", scorers = 1 }}
{more}
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("model")
    save_model(place)
    yield place


def toml(place: Path, model: Path, steps: int, more: str = "") -> str:
    place.write_text(TOML.format(steps=steps, model=model, task=TASK, more=more))
    return str(place)


def report(place: Path) -> str:
    result = run(app, ["report", str(place)])
    assert result.exit_code == 0, result.output
    return result.output


def test_a_run_is_reported_while_it_runs_after_a_kill_and_at_its_end(model: Path, tmp_path: Path) -> None:
    place = tmp_path / "run"
    file = toml(tmp_path / "run.toml", model, 100_000)
    command = [sys.executable, "-c", "from offbeat.cli.main import main; main()", "train", file, "--out", str(place)]
    with subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL) as process:
        until = time.monotonic() + 120
        events = place / "events.jsonl"
        while time.monotonic() < until and not (events.exists() and any(e["step"] == 5 for e in read(events))):
            time.sleep(0.1)
        assert "still running, at step" in report(place)
        process.send_signal(signal.SIGKILL)
    assert "crashed at step" in report(place)
    killed_at = max(event["step"] for event in read(events) if event["kind"] == EventKind.STEP)
    resumed = run(app, ["resume", str(place), "--steps", str(killed_at + 4)])
    assert resumed.exit_code == 0, resumed.output
    conclusion = report(place)
    assert f"in {killed_at + 4} steps" in conclusion and "the ledger balances" in conclusion
    assert "<b>resumed</b>" in (place / "report.html").read_text()
    viewed = run(app, ["view", str(place), "--fate", "trained"])
    assert viewed.exit_code == 0 and all(
        f"trained at step {step}\n" in viewed.output for step in range(1, killed_at + 5)
    )


def test_an_offline_run_is_reported(model: Path, tmp_path: Path) -> None:
    assert run(app, ["train", toml(tmp_path / "a.toml", model, 4), "--out", str(tmp_path / "a")]).exit_code == 0
    more = f'run = {{ mode = "offline", experience = "{tmp_path / "a" / "experience"}" }}\nsampler.mode = "offline"'
    offline = run(app, ["train", toml(tmp_path / "b.toml", model, 3, more), "--out", str(tmp_path / "b")])
    assert offline.exit_code == 0, offline.output
    assert "in 3 steps" in report(tmp_path / "b")
    assert "Offline: no workers" in (tmp_path / "b" / "report.html").read_text()
