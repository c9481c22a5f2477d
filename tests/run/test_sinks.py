"""Sinks get what the journal holds and cannot end a run; every metric is declared, and emitted."""

import logging
import re
import sys
from pathlib import Path

import pytest

from lab.fixtures.tiny_model import save_model
from offbeat.config import Config, parse
from offbeat.errors import RunError
from offbeat.events import EventKind
from offbeat.metrics import METRICS
from offbeat.run import sinks
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import read
from offbeat.run.local import train
from offbeat.run.sinks import GuardedSink, PrometheusFile, Value, metrics_of, open_journal
from tests.run.test_local import config

STEP = {"metrics": {"ess": 0.5, "reward_mean": 0.25}, "by_lag": {"1": {"ess": 0.4}}, "seconds": {"training": 2.0}}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    place = RunDirectory(tmp_path / "one")
    place.create(parse({}))
    return place


def test_every_metric_of_a_run_is_declared_and_every_declared_one_is_emitted(tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    asked: Config = config(
        tmp_path / "model",
        steps=3,
        updates_per_batch=2,
        sync={"every": 2},
        evaluation={"every": 1, "prompts": 4},
        objective={"preset": "rec-oneside-nois", "zero_variance_mask": False, "kl_coefficient": 0.01},
        run={"sinks": ["prometheus"]},
    )
    place = RunDirectory(tmp_path / "run")
    place.create(asked)
    train(asked, place)
    emitted = {name for event in read(place.events) for name in metrics_of(event)}
    assert emitted == METRICS.keys()
    scraped = (place.path / "offbeat.prom").read_text()
    assert all(f"offbeat_{re.sub(r'[^a-z0-9_]', '_', name)}{{" in scraped for name in METRICS)


def test_a_metric_that_is_not_declared_is_refused(directory: RunDirectory) -> None:
    with open_journal(directory, [], None) as journal, pytest.raises(ValueError, match="ess2: not declared"):
        journal.write(EventKind.STEP, 1, metrics={"ess2": 0.5})


def test_a_watcher_gets_every_event_and_sinks_get_numbers(directory: RunDirectory) -> None:
    events: list[object] = []
    with open_journal(directory, ["prometheus"], events.append) as journal:
        journal.write(EventKind.STEP, 1, **STEP)
        journal.write(EventKind.ALARM, 1, says="ess below 0.1")
        journal.write(EventKind.PUBLISHED, 1, version=1, bytes=512)
    assert len(events) == 3 and len(list(read(directory.events))) == 3
    lines = (directory.path / "offbeat.prom").read_text().splitlines()
    assert 'offbeat_ess{run="one",lag="1"} 0.4' in lines and 'offbeat_published_bytes{run="one"} 512.0' in lines
    assert 'offbeat_seconds{run="one",phase="training"} 2.0' in lines


def test_names_of_runs_are_escaped_for_prometheus(tmp_path: Path) -> None:
    sink = PrometheusFile(tmp_path / "offbeat.prom", 'a"b\\c\nd')
    sink.write(1, [Value("ess", 0.5)])
    assert r'offbeat_ess{run="a\"b\\c\nd"} 0.5' in sink.path.read_text()


class Failing:
    def __init__(self) -> None:
        self.writes = 0

    def write(self, step: int, values: object) -> None:
        self.writes += 1
        raise ConnectionError("the server is gone")

    def close(self) -> None:
        raise ConnectionError("the server is gone")


def test_a_sink_that_fails_is_turned_off_with_one_warning(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing()
    monkeypatch.setattr(sinks, "SINKS", {"wandb": lambda _: failing, "prometheus": sinks.SINKS["prometheus"]})
    with caplog.at_level(logging.WARNING), open_journal(directory, ["wandb", "prometheus"], None) as journal:
        for step in range(1, 4):
            journal.write(EventKind.STEP, step, **STEP)
    assert failing.writes == 1 and len(list(read(directory.events))) == 3
    assert [record.getMessage() for record in caplog.records] == [
        "sink wandb failed and is off from now on: the server is gone; events.jsonl has all metrics"
    ]
    assert 'offbeat_step{run="one"} 3' in (directory.path / "offbeat.prom").read_text()


def test_a_sink_that_is_not_installed_raises_with_the_command_that_installs_it(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RunError, match=r"wandb needs wandb.*pip install 'offbeat\[wandb\]'"):
        open_journal(directory, ["wandb"], None).__enter__()


def write_two_steps(name: str, directory: RunDirectory) -> None:
    with open_journal(directory, [name], None) as journal:
        for step in (1, 2):
            journal.write(EventKind.STEP, step, **STEP)


@pytest.mark.engine
def test_tensorboard_gets_the_curves(directory: RunDirectory) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write_two_steps("tensorboard", directory)
    found = EventAccumulator(str(directory.path / "tensorboard")).Reload()
    numbers = {tag: [one.tensor_proto.float_val[0] for one in found.Tensors(tag)] for tag in found.Tags()["tensors"]}
    assert numbers["ess"] == [0.5, 0.5] and numbers["ess/lag 1"] == pytest.approx([0.4, 0.4])
    assert [one.step for one in found.Tensors("reward_mean")] == [1, 2]


@pytest.mark.engine
def test_wandb_gets_the_curves_offline(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    write_two_steps("wandb", directory)
    [record] = directory.path.glob("wandb/offline-run-*/run-*.wandb")
    written = record.read_bytes()
    assert b"reward_mean" in written and b"ess/lag 1" in written


@pytest.mark.engine
def test_trackio_gets_the_curves(directory: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio")
    write_two_steps("trackio", directory)
    [store] = (tmp_path / "trackio").glob("*.db")
    assert b"reward_mean" in store.read_bytes()


def test_a_guarded_sink_is_closed_even_after_it_failed() -> None:
    class Once(Failing):
        closed = False

        def close(self) -> None:
            self.closed = True

    sink = Once()
    guarded = GuardedSink("wandb", sink)
    guarded({"kind": EventKind.STEP, "step": 1, **STEP})
    guarded.close()
    assert guarded.failed and sink.closed
