"""Sinks get what the journal holds and cannot end a run; every metric is declared, and emitted."""

import inspect
import logging
import re
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from offbeat.config import Config, parse
from offbeat.errors import RunError
from offbeat.events import EventKind
from offbeat.experience.log import ExperienceLog
from offbeat.imports import install_command
from offbeat.metrics import METRICS
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import read
from offbeat.run.local import train
from offbeat.run.sinks import GuardedSink, PrometheusFile, Value, metrics_of, open_journal
from offbeat.run.sinks.samples import NewestSamples
from offbeat.run.sinks.trackers import _markdown
from offbeat.run.sinks.values import TRL_NAMES
from offbeat.types import UNKNOWN, Completion, Group, Prompt, Score
from tests.fixtures import trackers
from tests.fixtures.tiny_model import save_model
from tests.fixtures.trackers import Held
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
        evaluation={"every": 1, "prompts": 4, "samples": 2, "greedy": True},
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
    def __init__(self, run: Path) -> None:
        self.run = run

    def write(self, step: int, values: object) -> None:
        (self.run / f"written {step}").touch()
        raise ConnectionError("the server is gone")

    def show(self, step: int, samples: object) -> None:
        raise ConnectionError("the server is gone")

    def close(self) -> None:
        raise ConnectionError("the server is gone")


def test_a_sink_that_fails_is_turned_off_with_one_warning(
    directory: RunDirectory, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own.py").write_text(f"from pathlib import Path\n\n{inspect.getsource(Failing)}")
    own = f"{tmp_path / 'own.py'}:Failing"
    with caplog.at_level(logging.WARNING), open_journal(directory, [own, "prometheus"], None) as journal:
        for step in range(1, 4):
            journal.write(EventKind.STEP, step, **STEP)
    assert [path.name for path in directory.path.glob("written *")] == ["written 1"]
    assert len(list(read(directory.events))) == 3
    assert [record.getMessage() for record in caplog.records] == [
        f"sink {own} failed and is off from now on: the server is gone; events.jsonl has all metrics"
    ]
    assert 'offbeat_step{run="one"} 3' in (directory.path / "offbeat.prom").read_text()


def test_a_sink_that_is_not_installed_raises_with_the_command_that_installs_it(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RunError, match=rf"wandb needs wandb.*{re.escape(install_command('wandb'))}"):
        open_journal(directory, ["wandb"], None).__enter__()


PACKAGES = ("tensorboard", "wandb", "trackio", "mlflow")


def held(name: str, directory: RunDirectory) -> Held:
    reader = getattr(trackers, name)
    found: Held = reader(directory.path) if name in ("tensorboard", "wandb") else reader()
    return found


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)
    pytest.importorskip(request.param)  # trackio reads its variable once, here
    return str(request.param)


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
def test_a_package_gets_curves_config_and_samples_and_a_resumed_run_continues_there(
    package: str, directory: RunDirectory
) -> None:
    with ExperienceLog.open(directory.experience) as log:
        answer = Completion("g7/0", [4, 2], UNKNOWN, source="human", score=Score(0.75))
        log.append([Group("g7", Prompt(id="p", token_ids=[1], task="arithmetic"), (answer,))])
    for step in (1, 2):  # as two processes: the second one resumes
        time.sleep(1.1 * (step - 1))  # wandb names its files by the second
        with open_journal(directory, [package], None) as journal:
            journal.write(EventKind.STEP, step, **STEP)
            journal.write(EventKind.EVALUATED, step, version=step, **{"pass@1": [0.5, 0.4, 0.6]})
            journal.write(EventKind.SAVED, step)
    for _ in range(50):  # wandb writes in a process of its own
        found = held(package, directory)
        if len(found.curves.get("reward_mean", {})) == 2:
            break
        time.sleep(0.2)
    plain = package == "mlflow"
    assert found.runs == 1
    assert found.curves["reward_mean"] == {1: 0.25, 2: 0.25}
    assert found.curves["reward" if plain else "train/reward"] == {1: 0.25, 2: 0.25}
    assert found.curves["ess/lag 1"] == pytest.approx({1: 0.4, 2: 0.4})
    assert found.curves["pass_at_1" if plain else "pass@1"] == {1: 0.5, 2: 0.5}
    assert found.config["group_size"] == 8
    assert "tokens 4 2" in found.samples and "0.75" in found.samples


def test_names_of_trl_are_of_metrics_that_we_have_and_that_trl_writes() -> None:
    assert TRL_NAMES.keys() <= METRICS.keys()
    if (found := find_spec("trl")) is None or found.origin is None:
        pytest.skip("TRL is a requirement of the lab")
    source = (Path(found.origin).parent / "trainer" / "grpo_trainer.py").read_text()
    of_transformers = {"loss", "grad_norm", "learning_rate"}
    assert [name for name in TRL_NAMES.values() if f'["{name.removeprefix("eval_")}"]' not in source] == [
        name for name in TRL_NAMES.values() if name in of_transformers
    ]


def test_a_table_of_samples_shows_the_newest_groups_of_the_run(tmp_path: Path) -> None:
    place = RunDirectory(tmp_path / "one")
    place.create(parse({"run": {"experience": str(tmp_path / "shared")}}))
    assert NewestSamples(place, place.config()).read(1) == []
    with ExperienceLog.open(tmp_path / "shared") as log:
        for name in (f"g {place.name} 0", f"g {place.name} 1", "g other 0"):
            answer = Completion(f"{name}/0", [4], UNKNOWN, source="human", score=Score(1.0))
            log.append([Group(name, Prompt(id="p", token_ids=[1], task="arithmetic"), (answer,))])
    found = NewestSamples(place, place.config()).read(50)
    assert [one.group for one in found] == [f"g {place.name} 0", f"g {place.name} 1"]
    assert (found[0].step, found[0].prompt, found[0].completion, found[0].reward) == (50, "tokens 1", "tokens 4", 1.0)


def test_the_text_of_a_model_stays_in_its_cell() -> None:
    assert _markdown(("a", "b"), [("x | y", "<b>\nz")]).splitlines()[2] == "| x &#124; y | &lt;b><br>z |"


def test_a_guarded_sink_is_closed_even_after_it_failed(tmp_path: Path) -> None:
    class Once(Failing):
        closed = False

        def close(self) -> None:
            self.closed = True

    sink = Once(tmp_path)
    guarded = GuardedSink("wandb", sink)
    guarded({"kind": EventKind.STEP, "step": 1, **STEP})
    guarded.close()
    assert guarded.failed and sink.closed
