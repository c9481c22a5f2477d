"""A table that a log has lost is an error that names it. Only a log that never held anything is created."""

import itertools
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from offbeat.errors import LogReadError
from offbeat.experience import schema
from offbeat.experience.lance_table import Table, written_versions
from offbeat.experience.ledger import LedgerEvent, LedgerEventKind
from offbeat.experience.log import ExperienceLog
from offbeat.experience.reader import LogReader
from offbeat.experience.schema import SCHEMAS, lost_tables
from tests.fixtures.groups import make_group


def _fill(place: Path) -> None:
    with ExperienceLog.open(place) as log:
        log.append([make_group(0)])
        log.record([LedgerEvent("g0", LedgerEventKind.TRAINED, 1)])


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_lost_table_is_named_and_not_created_again(tmp_path: Path, name: str) -> None:
    _fill(tmp_path)
    shutil.rmtree(tmp_path / f"{name}.lance")
    for open_log in (ExperienceLog.open, LogReader.open):
        with pytest.raises(LogReadError, match=rf"has lost {name}\.lance.*[Rr]estore"):
            open_log(tmp_path)
    assert not (tmp_path / f"{name}.lance").exists()


@pytest.mark.parametrize("lost", ["_versions", "its manifests"])
def test_a_table_without_a_readable_version_is_damaged_and_not_created_again(tmp_path: Path, lost: str) -> None:
    _fill(tmp_path)
    versions = tmp_path / "groups.lance" / "_versions"
    if lost == "_versions":
        shutil.rmtree(versions)
    else:
        for manifest in versions.glob("*.manifest"):
            manifest.write_bytes(b"")
    with pytest.raises(LogReadError, match=r"groups\.lance is damaged"):
        ExperienceLog.open(tmp_path)


@pytest.mark.parametrize("created", range(4))
def test_a_first_start_that_was_killed_is_completed(tmp_path: Path, created: int) -> None:
    ExperienceLog.open(tmp_path).close()
    for name in list(SCHEMAS)[created:]:
        shutil.rmtree(tmp_path / f"{name}.lance")
    if created < 3:
        (tmp_path / f"{list(SCHEMAS)[created]}.lance" / "_versions").mkdir(parents=True)
    _fill(tmp_path)
    assert LogReader.open(tmp_path).read(["g0"]) == [make_group(0)]


def test_tables_without_the_first_one_are_a_lost_log_even_if_they_are_empty(tmp_path: Path) -> None:
    ExperienceLog.open(tmp_path).close()
    shutil.rmtree(tmp_path / "groups.lance")
    with pytest.raises(LogReadError, match=r"has lost groups\.lance"):
        ExperienceLog.open(tmp_path)


def test_a_log_that_another_process_creates_at_this_moment_has_lost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    created: list[str] = []
    turns: Iterator[int] = iter(())

    def other_process() -> None:
        """Create some more tables; the first append follows the last table."""
        created.extend(list(SCHEMAS)[len(created) :][: next(turns, 0)])

    def exists(uri: str, options: object = None) -> bool:
        other_process()
        return Path(uri).stem in created

    def written_versions(uri: str, options: object = None) -> int:
        other_process()
        return 2 if len(created) == len(SCHEMAS) else 1

    monkeypatch.setattr(schema, "exists", exists)
    monkeypatch.setattr(schema, "written_versions", written_versions)
    for pace in itertools.product(range(5), repeat=6):
        created, turns = [], iter(pace)
        assert lost_tables("log") == [], f"tables that appear before each look: {pace}"


def test_writers_that_create_a_log_at_the_same_time_keep_what_each_of_them_appends(tmp_path: Path) -> None:
    """`lance.write_dataset` overwrote the table of a faster writer in 9 of 60 such starts."""
    writers, rounds = 4, 30
    together = threading.Barrier(writers)

    def start(writer: int) -> None:
        for one in range(rounds):
            together.wait(timeout=30)
            table = Table(str(tmp_path / f"{one}.lance"), pa.schema([("writer", pa.int64())]))
            table.append(pa.table({"writer": [writer]}))

    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(start, range(writers)))
    logs = [Table(str(tmp_path / f"{one}.lance"), pa.schema([("writer", pa.int64())])) for one in range(rounds)]
    assert [log.rows() for log in logs] == [writers] * rounds
    assert {written_versions(log.uri) for log in logs} == {1 + writers}
