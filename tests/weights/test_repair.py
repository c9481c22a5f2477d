"""A publisher finds what is wrong with its log, removes what cannot be loaded, and goes on with an anchor."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from offbeat.errors import WeightLogError
from offbeat.weights.probe import Probe
from offbeat.weights.publisher import WeightLog
from offbeat.weights.subscriber import Subscription
from tests.fixtures.damage import anchors, cut, empty, flip, manifests, patches, replace_by_directory, replace_by_file
from tests.fixtures.weights import is_state, make_state

PROBE = Probe(((5, 9, 2),), ([-1.5, -0.25],))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a directory with the weight log of versions 0 to 4: an anchor and four patches."""
    with WeightLog.open(tmp_path / "weights") as log:
        for version in range(5):
            log.publish(version, make_state(version).items(), PROBE)
    return tmp_path


def _copy(run: Path, version: int, to: int) -> None:
    shutil.copy(manifests(run)[version], manifests(run)[to])


DAMAGES: dict[str, tuple[Callable[[Path], object], int | None]] = {
    "newest manifest lost": (lambda run: manifests(run)[-1].unlink(), 3),
    "newest manifest cut": (lambda run: cut(manifests(run)[-1]), 3),
    "newest manifest empty": (lambda run: empty(manifests(run)[-1]), 3),
    "newest manifest unreadable": (lambda run: flip(manifests(run)[-1]), 3),
    "manifest of another version": (lambda run: _copy(run, 2, 4), 3),
    "patch cut": (lambda run: cut(patches(run)[-1]), 3),
    "patch flipped": (lambda run: flip(patches(run)[1]), 1),
    "patch lost": (lambda run: patches(run)[0].unlink(), 0),
    "anchor flipped": (lambda run: flip(anchors(run)[0]), None),
    "anchor lost": (lambda run: anchors(run)[0].unlink(), None),
    "versions lost": (lambda run: shutil.rmtree(run / "weights" / "versions"), None),
    "everything lost": (lambda run: shutil.rmtree(run / "weights"), None),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_cannot_be_loaded_is_found_and_removed_and_the_rest_stays(run: Path, damage: str) -> None:
    do, newest_whole = DAMAGES[damage]
    do(run)
    with WeightLog.open(run / "weights") as log:
        assert log.find_problem(4) is not None
        log.remove_damaged()
        assert max(log.versions(), default=None) == newest_whole
        assert all(log.find_problem(version) is None for version in log.versions())
        assert log.publish(4, make_state(4).items(), PROBE).kind == "anchor"
        assert log.find_problem(4) is None
    with Subscription.open(run / "weights", name="reader") as reader:
        for version in reader.versions():
            assert is_state(dict(reader.fetch(version, from_anchor=True)), version)


def test_a_whole_log_has_no_problem_and_loses_nothing(run: Path) -> None:
    with WeightLog.open(run / "weights") as log:
        assert log.find_problem(4) is None and log.remove_damaged() == []
        assert log.versions() == (0, 1, 2, 3, 4)


def test_versions_that_are_lost_while_the_publisher_works_are_followed_by_an_anchor(tmp_path: Path) -> None:
    with WeightLog.open(tmp_path / "weights") as log:
        log.publish(0, make_state(0).items(), PROBE)
        shutil.rmtree(tmp_path / "weights")
        assert log.publish(1, make_state(1).items(), PROBE).kind == "anchor"
        assert log.publish(2, make_state(2).items(), PROBE).kind == "patch"
    with Subscription.open(tmp_path / "weights", name="reader") as reader:
        assert is_state(dict(reader.fetch(2)), 2)


def test_the_probe_of_version_0_can_be_written_again(run: Path) -> None:
    manifests(run)[0].unlink()
    empty(run / "weights" / "calibration.json")
    with WeightLog.open(run / "weights") as log, Subscription.open(run / "weights", name="reader") as reader:
        assert log.calibration is None
        log.calibrate(make_state(0).items(), PROBE)
        found = reader.probe(0)
        assert found is not None and found.sequences == PROBE.sequences


@pytest.mark.parametrize("place", ["weights", "weights/versions", "weights/publisher.lock"])
def test_a_place_that_cannot_be_used_is_an_error_that_names_it(run: Path, place: str) -> None:
    path = run / place
    replace_by_directory(path) if path.is_file() else replace_by_file(path)
    with pytest.raises(WeightLogError, match=r"weights.*[Mm]ove"):
        WeightLog.open(run / "weights")
