"""A run that resumes from an index file draws what it would draw from the log, whatever happens to the file."""

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

from offbeat.experience import index_files
from offbeat.experience.feedback import LateScore
from offbeat.experience.index import Columns, Index
from offbeat.experience.index_files import IndexFiles
from offbeat.experience.log import ExperienceLog
from offbeat.experience.schema import Snapshot
from offbeat.types import Score
from tests.fixtures.groups import RULES, make_group, without_scores


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(index_files, "TAKE_ROWS", 4)  # files are written for short logs too
    yield tmp_path


def reopened(place: Path) -> ExperienceLog:
    return ExperienceLog.open(place / "log", rules=RULES)


def columns_of(parts: list[Columns]) -> Columns:
    index = Index()
    for part in parts:
        index.feed(part)
    return index.columns


def same(one: Columns, other: Columns) -> bool:
    return all(np.array_equal(getattr(one, f.name), getattr(other, f.name)) for f in fields(Columns))


def begin(place: Path) -> Snapshot:
    """Write a log of 8 groups and its index file, then go on: more groups, a repeated one, late scores."""
    with reopened(place) as log:
        log.append([without_scores(make_group(0, size=2)), *(make_group(n) for n in range(1, 8))])
        log.score([LateScore("g0", "g0/0", Score(1.0)), LateScore("g3", "g3/1", Score(0.5))])
        rows, cursor = log.index_since(None)
        assert IndexFiles(place / "index", log).save_if_grown(rows, cursor)
        log.append([make_group(8), make_group(9, prefix="other ")])
        log.score([LateScore("g0", "g0/1", Score(0.0)), LateScore("g1", "g1/0", Score(0.25))])
    with reopened(place) as log:  # another process: it does not know that g2 is in the log
        log.append([make_group(2), make_group(10)])
        return log.snapshot()


def test_the_file_and_the_rest_of_the_log_are_the_whole_log(place: Path) -> None:
    until = begin(place)
    with reopened(place) as plain, reopened(place) as log:
        expected = columns_of([plain.index_since(None, until)[0]])
        parts = IndexFiles(place / "index", log).load(until)
        assert [len(part) for part in parts] == [8, 5], "8 groups from the file; 3 new ones and 2 with scores"
        assert same(columns_of(parts), expected) and parts[0].ripe.tolist()[:2] == [False, True]
        log.append([make_group(5), make_group(11)])
        plain_rows, rows = (one.index_since(until)[0] for one in (plain, log))
        assert same(rows, plain_rows) and rows.ordinal.tolist() == [11], "g5 is known to be a repetition"
        assert log.find(["g1", "g10", "nowhere"]).tolist() == [1, 10, -1]
        assert log.tasks == plain.tasks and log.sources == plain.sources


def test_a_file_that_cannot_be_used_costs_nothing_but_time(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    until = begin(place)
    [path] = (place / "index").glob("*.index")
    whole = path.read_bytes()
    with ExperienceLog.open(place / "another", rules=RULES) as other:
        other.append([make_group(n, prefix="h") for n in range(8)])
        IndexFiles(place / "others", other).save_if_grown(*other.index_since(None))
    foreign = next((place / "others").glob("*.index")).read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    with reopened(place) as plain:
        expected = columns_of([plain.index_since(None, until)[0]])
    for content in (b"", whole[: len(whole) // 2], bytes(flipped), foreign, b"PK\x03\x04 nonsense"):
        path.write_bytes(content)
        caplog.clear()
        with reopened(place) as log:
            parts = IndexFiles(place / "index", log).load(until)
            assert len(parts) == 1 and same(columns_of(parts), expected)
        assert "the log is read instead" in caplog.text


def test_a_file_that_is_newer_than_the_checkpoint_is_not_used(place: Path) -> None:
    until = begin(place)
    with reopened(place) as log:
        files = IndexFiles(place / "index", log)
        assert files.load(Snapshot(groups=7)) and len(files.load(Snapshot(groups=7))) == 1
        log.append([make_group(n) for n in range(20, 30)])
        assert files.save_if_grown(*log.index_since(None))
        assert len(files.load(until)) == 2, "the file before it"


def test_a_file_is_written_when_the_log_has_grown_by_a_tenth_and_two_are_kept(place: Path) -> None:
    written = []
    with reopened(place) as log:
        files = IndexFiles(place / "index", log)
        for number in range(100):
            log.append([make_group(number, size=2, tokens=2)])
            if files.save_if_grown(*log.index_since(None)):
                written.append(number + 1)
    assert written == [*range(4, 56, 4), *(57, 62, 68, 74, 81, 89, 97)]
    assert sorted(path.name for path in (place / "index").iterdir()) == ["000000000089.index", "000000000097.index"]
