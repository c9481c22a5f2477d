"""Runs that an earlier commit began are resumed, and their logs are read.

`python -m lab.fixtures.earlier_runs` made the archive with the code of that commit.
"""

import json
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from offbeat.cli.main import app
from offbeat.config import parse
from offbeat.config.parsing import translate
from offbeat.experience.reader import LogReader
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import read

RUNS = ("ended", "replayed", "killed")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the working directory, with the model, the task and the runs of that commit."""
    with tarfile.open(Path(__file__).parent / "upgrade" / "a4ce5e6.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)  # its paths are relative
    return tmp_path


def offbeat(*words: str) -> Result:
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result


@pytest.mark.engine
@pytest.mark.parametrize("run", RUNS)
def test_a_run_of_an_earlier_commit_resumes(place: Path, run: str) -> None:
    offbeat("resume", f"runs/{run}", "--steps", "8")
    events = list(read(place / "runs" / run / "events.jsonl"))
    [at] = [number for number, event in enumerate(events) if event["kind"] == "resumed"]
    later = [event["step"] for event in events[at:] if event["kind"] == "step"]
    assert later == list(range(events[at]["step"] + 1, 9))
    assert events[-1]["kind"] == "ended" and events[-1]["step"] == 8
    LogReader.open(place / "runs" / run / "experience").ledger().check()
    lags = [lag for event in events[at:] if event["kind"] == "step" for lag in event["lags"]]
    limit = RunDirectory(place / "runs" / run).config().fresh_lag
    assert run == "replayed" or max(map(int, lags)) <= limit


@pytest.mark.engine
def test_the_next_publish_is_due_when_it_was_due_then(place: Path) -> None:
    """The checkpoint is of step 3, version 2 is the last published, and v is 2."""
    offbeat("resume", "runs/killed", "--steps", "6")
    events = list(read(place / "runs" / "killed" / "events.jsonl"))
    [at] = [number for number, event in enumerate(events) if event["kind"] == "resumed"]
    assert [event["version"] for event in events[at:] if event["kind"] == "published"] == [4, 6]


@pytest.mark.parametrize("run", RUNS)
def test_reports_and_logs_of_an_earlier_commit_are_read(place: Path, run: str) -> None:
    offbeat("report", f"runs/{run}", "--out", "report.html")
    assert (place / "report.html").stat().st_size > 20_000
    log = f"runs/{run}/experience"
    assert "by source:" in offbeat("log", "stats", log).output
    assert " generated = " in offbeat("log", "fates", log).output
    assert "advantage" in offbeat("view", f"runs/{run}", "--plain").output
    offbeat("log", "export", log, "groups.jsonl")
    offbeat("import", "groups.jsonl", "--into", "imported")
    groups = [group.id for group in LogReader.open(place / "imported").groups()]
    assert groups == [group.id for group in LogReader.open(Path(log)).groups()] != []


def test_a_policy_of_an_earlier_commit_is_exported(place: Path) -> None:
    offbeat("export", "runs/ended", "exported")
    assert (place / "exported" / "model.safetensors").is_file()


def test_settings_of_an_earlier_commit_keep_their_meaning(place: Path) -> None:
    recorded = json.loads((place / "runs" / "killed" / "config.json").read_text(encoding="utf-8"))
    config = parse(translate(recorded))
    assert not config.accept
    assert "dither" not in recorded["optimizer"] and config.optimizer.dither, "masters were always dithered"
    assert translate(config.model_dump(mode="json")) == config.model_dump(mode="json")  # today's settings stay


def test_consent_to_untested_lag_stays_and_keeps_the_limits_that_it_had() -> None:
    recorded = parse({"objective": {"preset": "grpo"}, "sync": {"drift_budget": 0.1}}).model_dump(mode="json")
    recorded["objective"]["untested_lag"] = True
    del recorded["accept"]
    assert (config := parse(translate(recorded))).accept and config.longest == 100
    recorded["sampler"]["mode"] = "replay"
    assert parse(translate(recorded)).retire_age == 200
    recorded["objective"]["untested_lag"] = False
    assert not (config := parse(translate(recorded))).accept and config.retire_age == 20
