"""A copy of a run directory continues as a run of its own, beside its original and in the same experience log."""

import shutil
import tarfile
from pathlib import Path

import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.experience.reader import LogReader
from offbeat.run.directory import RunDirectory, RunLock

ARCHIVE = Path(__file__).parent.parent / "upgrade" / "a4ce5e6.tar.xz"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def offbeat(*words: str) -> str:
    result = CliRunner().invoke(app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.engine
@pytest.mark.parametrize("log", ["", "shared"])
@pytest.mark.parametrize("step", [6, 0])
def test_original_and_copy_continue_beside_each_other(place: Path, log: str, step: int) -> None:
    offbeat("train", "run.toml", "--out", "one", "--set", f"run.experience={log}")
    shutil.copytree("one", "two")
    offbeat("resume", "two", "--steps", "9", *([] if step else ["--from-step", "0"]))
    offbeat("resume", "one", "--steps", "9")
    names = [RunDirectory(Path(run)).name for run in ("one", "two")]
    assert len({*names}) == 2 and dict(RunDirectory(Path("two")).past) == {names[0]: step}
    for run in ("one", "two"):
        assert "damaged" not in offbeat("fsck", run)
        offbeat("report", run, "--out", "report.html")
        directory = RunDirectory(Path(run))
        own = directory.own_run(directory.config())
        reader = LogReader.open(log or directory.experience, own_run=own)
        steps = {step for one in reader.ledger(scope=own.scope if log else None).fates.values() for step in one.steps}
        assert steps == set(range(1, 10))


def test_a_run_that_is_moved_or_restored_keeps_its_id(place: Path) -> None:
    run = RunDirectory(place / "new")
    run.create(RunDirectory(place / "runs" / "ended").config()).release()
    name = run.name
    moved = RunDirectory(run.path.rename(place / "moved"))
    RunLock(moved).release()
    assert moved.name == name
    shutil.copytree(moved.path, place / "backup")
    shutil.rmtree(moved.path)
    shutil.copytree(place / "backup", moved.path)  # another inode at the same place
    RunLock(moved).release()
    assert moved.name == name
    shutil.rmtree(moved.path)
    backup = RunDirectory(place / "backup")
    RunLock(backup).release()  # the original is gone
    assert backup.name == name and backup.past == ()


def test_a_run_of_an_earlier_version_keeps_its_id(place: Path) -> None:
    name = RunDirectory(place / "runs" / "ended").name
    copy = RunDirectory(shutil.copytree(place / "runs" / "ended", place / "copy"))
    RunLock(copy).release()
    assert copy.name == name, "nothing says where it was"


def test_an_id_that_was_changed_is_not_used(place: Path) -> None:
    run = RunDirectory(place / "new")
    run.create(RunDirectory(place / "runs" / "ended").config()).release()
    path = run.path / "environment.json"
    path.write_text(path.read_text().replace(run.name, "0" * 8))
    assert not run.is_named
