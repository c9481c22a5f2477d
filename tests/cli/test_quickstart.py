"""`offbeat quickstart` on the command line."""

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.events import EventKind
from offbeat.run import quickstart
from offbeat.run.journal import read

run = CliRunner(env={"COLUMNS": "200"}).invoke


@pytest.mark.engine
def test_quickstart_trains_a_model_off_policy_and_writes_a_report(tmp_path: Path) -> None:
    code = "from offbeat.cli.main import main; main()"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code, "quickstart", "--out", "mine"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr
    rate = r"(\d\.\d\d) -> (\d\.\d\d)"
    found = re.search(f"pass rate {rate}, of the most probable answers {rate}, with 20 publishes", done.stdout)
    assert found and float(found[1]) <= 0.5 and float(found[2]) >= 0.9
    assert float(found[3]) <= 0.5 and float(found[4]) >= 0.9, "the model must not be right before it is trained"
    assert "report: mine/report.html" in done.stdout and (tmp_path / "mine" / "report.html").stat().st_size > 10_000
    steps = [event for event in read(tmp_path / "mine" / "run" / "events.jsonl") if event["kind"] == EventKind.STEP]
    assert max(lag for event in steps for lag in event["lags"]) == 4
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=600)
    assert again.returncode == 2 and "or choose another directory with --out" in again.stderr


def test_the_written_configuration_passes_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "make_model", partial(quickstart.make_model, steps=2))
    result = run(app, ["quickstart", "--out", str(tmp_path / "mine"), "--steps", "1"])
    assert result.exit_code == 0, result.output
    assert "too few steps to measure" in result.output
    file = str(tmp_path / "mine" / "quickstart.toml")
    checked = run(app, ["check", file])
    assert checked.exit_code == 0 and "sync every 5 steps: lag 0 to 4" in checked.output
