"""Every row carries a seal: what was changed, lost or repeated is named, and no event of it is counted."""

from pathlib import Path

import lance
import pyarrow as pa
import pytest

from offbeat.errors import ConservationError, LogReadError, LogWriteError
from offbeat.experience.lance_table import Table
from offbeat.experience.ledger import Fate, LedgerEvent, LedgerEventKind, OwnRun
from offbeat.experience.log import ExperienceLog
from offbeat.experience.reader import LogReader
from offbeat.experience.schema import EVENTS, SCHEMAS, SealCheck, Tables, seal_rows
from tests.fixtures.groups import make_group

TRAINED, STARTED = LedgerEventKind.TRAINED, LedgerEventKind.STARTED


def filled(place: Path) -> Path:
    """Return a log with two groups of which one was trained on, written by two writers in turn."""
    with ExperienceLog.open(place) as one, ExperienceLog.open(place) as other:
        one.append([make_group(0), make_group(1)])
        one.record([LedgerEvent("g0", STARTED, by="worker 1")])
        other.record([LedgerEvent("g1", STARTED, by="worker 2")])
        one.record([LedgerEvent(make_group(0).id, TRAINED, 1, updates=2, drift=0.25)])
    return place


def wrong(place: Path, name: str = "events") -> list[str]:
    return SealCheck.of(Table(f"{place}/{name}.lance", SCHEMAS[name]), name).wrong


def events(place: Path) -> lance.LanceDataset:
    return lance.dataset(f"{place}/events.lance")


def test_rows_of_two_writers_match_their_seals_in_every_table(tmp_path: Path) -> None:
    assert [wrong(filled(tmp_path), name) for name in SCHEMAS] == [[], [], [], []]


@pytest.mark.parametrize("change", ["step = 3", "updates = 5", "drift = 0.5", "event = 'expired'", "run = 'other'"])
def test_a_changed_event_is_not_counted_and_ends_the_check(tmp_path: Path, change: str) -> None:
    column, value = change.split(" = ")
    events(filled(tmp_path)).update({column: value}, where="event = 'trained'")
    assert wrong(tmp_path)
    ledger = LogReader.open(tmp_path).ledger()
    assert ledger.counts[Fate.TRAINED] == 0
    with pytest.raises(ConservationError, match="lost or damaged"):
        ledger.check()
    with pytest.raises(LogReadError, match="damaged"):
        LogReader.open(tmp_path).uses()


def test_a_lost_row_is_missed_by_the_next_number_of_its_writer(tmp_path: Path) -> None:
    rows = seal_rows(pa.table({"step": list(range(6))}), "c0ffee12", 0)
    for left, found in (([0, 1, 3, 4, 5], "number 3"), ([0, 1, 1, 2], "number 1"), ([1, 0], "number 1")):
        check = SealCheck()
        assert check.add(rows.take(left)).all() and found in check.wrong[0]


def test_rows_of_an_earlier_version_are_read_before_sealed_ones_and_not_after_them() -> None:
    rows = seal_rows(pa.table({"step": [1, 2]}), "c0ffee12", 0)
    earlier = pa.table({"step": [0], "seal": pa.nulls(1, pa.string())})
    check = SealCheck()
    assert check.add(pa.concat_tables([earlier, rows])).all() and check.unsealed == 1 and not check.wrong
    assert check.add(earlier).tolist() == [False]


def test_a_column_that_a_later_version_adds_changes_no_seal() -> None:
    rows = seal_rows(pa.table({"step": [1, 2]}), "c0ffee12", 0)
    later = rows.append_column("later", pa.nulls(2, pa.float64()))
    assert SealCheck().add(later).all()


def test_after_a_failed_commit_a_new_chain_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append = Table.append

    def commit_and_fail(table: Table, rows: pa.Table) -> None:
        append(table, rows)
        raise LogWriteError("the storage did not answer")

    with ExperienceLog.open(tmp_path) as log:
        log.record([LedgerEvent("g0", STARTED)])
        for failing in (commit_and_fail, lambda *_: (_ for _ in ()).throw(LogWriteError("full"))):
            monkeypatch.setattr(Table, "append", failing)
            with pytest.raises(LogWriteError):
                log.record([LedgerEvent("g1", STARTED)])
            monkeypatch.setattr(Table, "append", append)
            log.record([LedgerEvent("g1", STARTED)])
    assert not wrong(tmp_path) and len(events(tmp_path).to_table()) == 4


def test_a_log_without_the_column_is_read_and_continued(tmp_path: Path) -> None:
    events(filled(tmp_path)).drop_columns(["seal"])
    with ExperienceLog.open(tmp_path) as log:
        log.record([LedgerEvent("g2", STARTED)])
        log.ledger().check()
    assert not wrong(tmp_path) and set(events(tmp_path).schema.names) == {*EVENTS.names, "seal"}


def test_a_copy_owns_what_its_original_did_before_and_nothing_later() -> None:
    own = OwnRun("copy0000", shared=True, past=(("orig0000", 6),))
    assert own.owns("copy0000", "g copy0000-9", 9) and own.owns("orig0000", "g orig0000-1", 6)
    assert not own.owns("orig0000", "g orig0000-1", 7) and not own.is_guest("g orig0000-1")
    done = [LedgerEvent("a", TRAINED, step, by="trainer orig0000") for step in (6, 7)]
    assert [one.by for one in own.adopt(done)] == ["trainer copy0000", "trainer orig0000"]


def test_a_damaged_type_in_a_manifest_is_an_error_with_a_sentence(tmp_path: Path) -> None:
    Tables.open(str(tmp_path))
    newest = min((tmp_path / "groups.lance" / "_versions").glob("*.manifest"))
    content = newest.read_bytes()
    assert b"string" in content
    newest.write_bytes(content.replace(b"string", b"strinf"))
    with pytest.raises(LogReadError, match="cannot open"):  # Lance panics
        Tables.open(str(tmp_path), create=False)
