"""A run whose checkpoint is whole resumes, whatever happened to its weight log."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from offbeat.config import Config
from offbeat.events import EventKind
from offbeat.run.directory import RunDirectory
from offbeat.run.journal import read
from offbeat.run.local import train
from tests.fixtures.damage import anchors, cut, flip, patches
from tests.fixtures.tiny_model import save_model
from tests.run.test_local import config, parameters

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    save_model(place / "model")
    return place


def _train(asked: Config, place: Path) -> RunDirectory:
    directory = RunDirectory(place)
    directory.create(asked).release()
    train(asked, directory)
    return directory


@pytest.fixture(scope="module")
def asked(place: Path) -> Config:
    return config(place / "model", steps=4, trainer={"save_every": 50})


@pytest.fixture(scope="module")
def stopped(place: Path, asked: Config) -> Path:
    """Return a run of four steps that published after each."""
    return _train(asked, place / "stopped").path


@pytest.fixture(scope="module")
def foreign(place: Path, asked: Config) -> Path:
    return _train(asked.model_copy(update={"seed": 1}), place / "foreign").path / "weights"


def _resume(run: Path, asked: Config, steps: int) -> list[dict]:
    directory = RunDirectory(run)
    before = len(list(read(directory.events)))
    train(asked.model_copy(update={"steps": steps}), directory)
    return list(read(directory.events))[before:]


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "lost": lambda run, _: shutil.rmtree(run / "weights"),
    "patch cut": lambda run, _: cut(patches(run)[-1]),
    "anchor flipped": lambda run, _: flip(anchors(run)[0]),
    "of another run": lambda run, foreign: (shutil.rmtree(run / "weights"), shutil.copytree(foreign, run / "weights")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_resume_publishes_what_the_weight_log_lost_and_trains_as_if_nothing_happened(
    stopped: Path, foreign: Path, asked: Config, tmp_path: Path, damage: str
) -> None:
    whole, damaged = (shutil.copytree(stopped, tmp_path / name) for name in ("whole", "damaged"))
    DAMAGES[damage](damaged, foreign)
    expected = [event["metrics"]["reward_mean"] for event in _resume(whole, asked, 6) if event["kind"] == "step"]
    events = _resume(damaged, asked, 6)
    [repaired] = [event for event in events if event["kind"] == EventKind.WEIGHTS_REPAIRED]
    assert repaired["version"] == 4 and repaired["how"] == "anchor" and "version" in repaired["why"]
    assert [event["metrics"]["reward_mean"] for event in events if event["kind"] == "step"] == expected
    longer = asked.model_copy(update={"steps": 6})
    one, other = parameters(RunDirectory(whole), longer), parameters(RunDirectory(damaged), longer)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_version_behind_the_checkpoint_is_replaced_by_the_checkpoint_itself(place: Path, tmp_path: Path) -> None:
    """Version 3 is lost and the policy of step 4 is all there is, so the workers serve that."""
    asked = config(place / "model", steps=4, sync={"every": 3}, run={"mode": "concurrent", "max_lag": 6})
    directory = _train(asked, tmp_path / "run")
    shutil.rmtree(directory.weights)
    events = _resume(directory.path, asked, 6)
    [repaired] = [event for event in events if event["kind"] == EventKind.WEIGHTS_REPAIRED]
    assert repaired["version"] == 4
    assert [event["step"] for event in events if event["kind"] == EventKind.STEP] == [5, 6]
    assert events[-1]["kind"] == EventKind.ENDED


def test_a_whole_weight_log_is_left_as_it_is(stopped: Path, asked: Config, tmp_path: Path) -> None:
    run = shutil.copytree(stopped, tmp_path / "run")
    events = _resume(run, asked, 5)
    assert not [event for event in events if event["kind"] == EventKind.WEIGHTS_REPAIRED]
