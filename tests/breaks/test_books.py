"""Books that cannot lie, and runs that keep to themselves: each of these was wrong once."""

import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import time
from dataclasses import replace
from pathlib import Path

import lance
import pytest
from typer.testing import CliRunner

from offbeat.cli.main import app
from offbeat.errors import RunError
from offbeat.events import EventKind
from offbeat.experience.ledger import LedgerEvent, LedgerEventKind
from offbeat.experience.log import ExperienceLog
from offbeat.experience.reader import LogReader
from offbeat.run.directory import RunDirectory, RunLock, json_digest, prepare_resume
from offbeat.run.journal import FileJournal, read
from offbeat.types import Score

ARCHIVE = Path(__file__).resolve().parent.parent / "upgrade" / "a4ce5e6.tar.xz"


def offbeat(place: Path, *words: str) -> "subprocess.Popen[str]":
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "offbeat", *words]
    return subprocess.Popen(
        command, cwd=place, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was trained to its end."""
    place = tmp_path_factory.mktemp("trained")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(place, filter="data")
    said, _ = (process := offbeat(place, "train", "run.toml", "--out", "run")).communicate(timeout=120)
    assert process.returncode == 0, said
    assert not damages(place / "run")
    return place / "run"


@pytest.fixture
def run(ended: Path) -> Path:
    """A copy beside it: paths in its settings are relative."""
    copy = ended.with_name("copy")
    shutil.rmtree(copy, ignore_errors=True)
    return shutil.copytree(ended, copy)


def damages(run: Path) -> list[str]:
    result = CliRunner(env={"COLUMNS": "300"}).invoke(app, ["fsck", str(run)])
    found = [line for line in result.output.splitlines() if line.startswith("damaged")]
    assert bool(found) == (result.exit_code != 0), result.output
    return found


def test_an_event_whose_updates_were_changed_is_named_and_not_counted(run: Path) -> None:
    place = run / "experience" / "events.lance"
    lance.dataset(str(place)).update({"updates": "7"}, where="event = 'trained' AND step = 3")
    assert damages(run)
    with pytest.raises(Exception, match="damaged"):
        LogReader.open(run / "experience").ledger().check()


def test_an_event_that_is_there_twice_is_named(run: Path) -> None:
    events = lance.dataset(str(run / "experience" / "events.lance"))
    lance.write_dataset(events.to_table().slice(4, 1), events, mode="append")
    assert damages(run)


def test_single_bits_of_the_numbers_of_events_are_seen(ended: Path, tmp_path: Path) -> None:
    events = lance.dataset(str(ended / "experience" / "events.lance")).to_table()
    numbers = [struct.pack("<d", value) for name in ("at", "drift") for value in events[name].to_pylist() if value]
    files = sorted((ended / "experience" / "events.lance" / "data").iterdir())
    places = [(path, path.read_bytes().find(number)) for path in files for number in dict.fromkeys(numbers)]
    found = [place for place in places if place[1] >= 0]
    assert len(found) > 5
    for number, (path, at) in enumerate(found[:: max(1, len(found) // 12)]):
        copy = shutil.copytree(ended, tmp_path / str(number)) / path.relative_to(ended)
        content = bytearray(path.read_bytes())
        content[at + 1] ^= 1 << number % 8
        copy.write_bytes(content)
        assert damages(tmp_path / str(number)), (path.name, at)


def test_a_number_that_was_changed_in_the_record_is_seen_and_not_shown(run: Path) -> None:
    path = run / "events.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    [at] = [number for number, line in enumerate(lines) if b'"kind": "step"' in line and b'"step": 2,' in line]
    place = lines[at].index(b'"metrics"')
    digit = next(i for i in range(place, len(lines[at])) if lines[at][i : i + 1] in b"123456789")
    lines[at] = lines[at][:digit] + bytes([lines[at][digit] ^ 1]) + lines[at][digit + 1 :]
    path.write_bytes(b"".join(lines))
    assert any("events.jsonl" in one for one in damages(run))
    assert 2 not in [event["step"] for event in read(path) if event["kind"] == "step"]


@pytest.mark.parametrize("place", [-1, -2, 3])
def test_a_line_that_was_removed_from_the_record_is_missed(run: Path, place: int) -> None:
    lines = (run / "events.jsonl").read_bytes().splitlines(keepends=True)
    del lines[place]
    (run / "events.jsonl").write_bytes(b"".join(lines))
    [said] = damages(run)
    assert "events.jsonl" in said and "lines are lost" in said


@pytest.mark.parametrize("file", ["config.json", "environment.json"])
def test_resume_refuses_settings_that_fsck_calls_changed(run: Path, file: str) -> None:
    if file == "config.json":
        text = (run / file).read_text()
        (run / file).write_text(text.replace('"steps": 6', '"steps": 7'))
    else:  # that of a run with other settings
        content = RunDirectory(run).environment | {"run": "c0ffee00", "config": json_digest("others")}
        (run / file).write_text(json.dumps(content | {"sha256": json_digest(content)}))
    [said] = damages(run)
    with pytest.raises(RunError, match="accept-changes") as refused:
        prepare_resume(RunDirectory(run), [], None, accept_changes=False)
    assert "config.json" in said and "it differs from its sha256" in said and "its sha256" in str(refused.value)
    prepare_resume(RunDirectory(run), [], None, accept_changes=True)[1].release()


def test_a_length_that_was_changed_in_the_settings_is_seen(run: Path) -> None:
    text = (run / "config.json").read_text()
    assert '"steps": 6' in text
    (run / "config.json").write_text(text.replace('"steps": 6', '"steps": 7'))
    assert any("config.json" in one for one in damages(run))


def test_a_group_that_a_resume_generated_again_is_no_conflict_and_a_forged_one_is(run: Path) -> None:
    first = next(iter(LogReader.open(run / "experience").groups()))
    own = {"run": RunDirectory(run).name} if "run" in LedgerEvent.__dataclass_fields__ else {}
    start = LedgerEvent(first.id, LedgerEventKind.STARTED, by="worker 0", **own)
    for reward, starts in ((0.25, 1), (0.75, 0)):
        other = [replace(one, score=Score(reward)) for one in first.completions]
        with ExperienceLog.open(run / "experience") as log:
            log.record([start] * starts)
            log.append([replace(first, completions=tuple(other))])
        assert [("conflict" in one or "other content" in one) for one in damages(run)] == [True] * (1 - starts)


def test_a_copied_run_gets_an_id_of_its_own_and_a_moved_one_keeps_it(ended: Path, run: Path) -> None:
    name = RunDirectory(ended).name
    RunLock(RunDirectory(run)).release()
    own = RunDirectory(run).name
    assert own != name == RunDirectory(ended).name
    moved = run.rename(run.with_name("moved"))
    RunLock(RunDirectory(moved)).release()
    kept = RunDirectory(moved).name
    shutil.rmtree(moved)
    assert kept == own


def test_a_run_directory_is_private_also_if_it_existed(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "mine"
    place.mkdir(mode=0o755)
    RunDirectory(place).create(RunDirectory(run).config()).release()
    assert place.stat().st_mode & 0o777 == 0o700


def test_a_worker_ends_with_its_run(run: Path) -> None:
    lock = RunLock(RunDirectory(run))
    process = offbeat(run.parent, "worker", run.name, "--per-version", "1")
    before = LogReader.open(run / "experience").size()
    until = time.monotonic() + 60
    while LogReader.open(run / "experience").size() == before and time.monotonic() < until:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.3)
    with FileJournal(run / "events.jsonl") as journal:
        journal.write(EventKind.ENDED, 6, why="", finished=True, ledger="", seconds={})
    lock.release()
    try:
        said, _ = process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        said, _ = process.communicate()
    assert process.returncode == 0 and "the run has ended" in said, said
