"""Compaction leaves nothing behind that grows with the number of commits, and wins against writers."""

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import lance
import numpy as np
import pyarrow as pa
import pytest
from lance.optimize import Compaction

from offbeat.experience import lance_table
from offbeat.experience.background import CROWDED, tidy
from offbeat.experience.lance_table import Table, row_ranges
from offbeat.experience.ledger import LedgerEvent, LedgerEventKind
from offbeat.experience.log import ExperienceLog
from tests.fixtures.groups import make_group

NUMBERS = pa.schema([pa.field("number", pa.int64(), nullable=False)])
NOW = timedelta(0)


@pytest.fixture
def table(tmp_path: Path) -> Table:
    return Table(f"{tmp_path}/numbers.lance", NUMBERS)


def _append(table: Table, commits: int, rows: int = 4) -> None:
    for _ in range(commits):
        start = table.rows()
        table.append(pa.table({"number": range(start, start + rows)}, schema=NUMBERS))


def _check_rows(table: Table) -> None:
    numbers = list(range(table.rows()))
    found = table.scan(0, len(numbers), ["number"], where="number >= 0")
    assert found["number"].to_pylist() == found["_rowid"].to_pylist() == numbers
    some = np.arange(0, len(numbers), 7)[::-1]
    assert table.take(some)["number"].to_pylist() == some.tolist()


def _manifest_bytes(table: Table) -> int:
    """Return the size of the manifest of one more commit: a compaction's own one also lists what it merged."""
    _append(table, 1)
    newest = min((Path(table.uri) / "_versions").glob("*.manifest"))
    return newest.stat().st_size


def test_manifests_do_not_grow_with_the_number_of_commits(table: Table) -> None:
    sizes = []
    for _ in range(4):
        _append(table, 2 * CROWDED)
        table.compact(1_024)
        sizes.append(_manifest_bytes(table))
    assert max(sizes) - min(sizes) < 100, sizes
    _check_rows(table)


def test_rows_appended_during_a_compaction_end_up_in_order(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    original = lance_table.write_merged

    def with_appends(*args: object) -> object:
        written = original(*args)  # type: ignore[arg-type]
        _append(table, 3)
        return written

    monkeypatch.setattr("offbeat.experience.lance_table.write_merged", with_appends)
    for _ in range(3):
        _append(table, 5)
        table.compact(1_024)
        _check_rows(table)
    monkeypatch.undo()
    table.compact(1_024)
    _check_rows(table)
    (only,) = row_ranges(table.refresh())
    (fragment,) = only.fragments
    assert len(str(fragment.to_json()["row_id_meta"])) < 60, "one range of ids, not one for each compaction"


def test_a_table_that_an_earlier_release_compacted_gets_smaller(table: Table) -> None:
    _append(table, 60)
    dataset = lance.dataset(table.uri)
    steps = Compaction.plan(dataset, {"target_rows_per_fragment": 200})
    Compaction.commit(dataset, [step.execute(dataset) for step in steps.tasks])
    before = _manifest_bytes(table)
    files = {path.name for path in (Path(table.uri) / "data").iterdir()}
    table.compact(2)  # no fragment is this small: only metadata changes
    assert {path.name for path in (Path(table.uri) / "data").iterdir()} == files
    assert _manifest_bytes(table) < before / 2
    tidy(table, keep=NOW)
    _check_rows(table)


def test_fragments_whose_ids_interleave_are_merged_in_order(table: Table) -> None:
    _append(table, 10)
    dataset = lance.dataset(table.uri)
    steps = Compaction.plan(dataset, {"target_rows_per_fragment": 1_000})
    results = [step.execute(dataset) for step in steps.tasks]
    _append(table, 3)
    Compaction.commit(dataset, results)  # these rows are now behind those that were appended meanwhile
    table.compact(1_000)
    _check_rows(table)
    assert table.fragment_sizes() == [52]


@pytest.mark.parametrize("same_object", [True, False])
def test_compaction_wins_against_writers_that_never_pause(table: Table, same_object: bool) -> None:
    writer = table if same_object else Table(table.uri, NUMBERS)
    ended = threading.Event()

    def write() -> None:
        while not ended.is_set():
            _append(writer, 1)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(5):
            _wait_for(lambda: len(table.fragment_sizes()) >= 8)
            assert table.compact(1_024) > 0
    finally:
        ended.set()
        thread.join()
    _check_rows(table)


def _wait_for(condition: Callable[[], bool]) -> None:
    waiting = threading.Event()
    for _ in range(3_000):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("it did not happen")


def test_many_versions_are_cleaned_although_they_are_young(table: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offbeat.experience.lance_table.MOST_VERSIONS", 10)
    monkeypatch.setattr("offbeat.experience.lance_table.SHORTEST_KEEP", NOW)
    _append(table, 40)
    table.clean(timedelta(hours=1))
    assert len(list((Path(table.uri) / "_versions").glob("*.manifest"))) <= 12
    _check_rows(table)


@pytest.mark.engine
def test_each_step_of_a_run_writes_and_keeps_the_same_number_of_bytes(tmp_path: Path) -> None:
    """The byte budget of a step: four groups of eight short completions, their fates, and all metadata."""
    steps, written, kept = 240, [], []
    seen: dict[Path, int] = {}
    with ExperienceLog.open(tmp_path) as log:
        for step in range(steps):
            ids = range(4 * step, 4 * step + 4)
            log.append([make_group(number, size=8, tokens=8) for number in ids])
            log.record([LedgerEvent(f"g{number}", LedgerEventKind.TRAINED, step + 1) for number in ids])
            if step % CROWDED == CROWDED - 1:
                tidy(log.tables.groups, keep=NOW)
                tidy(log.tables.events, keep=NOW)
            sizes = {path: path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
            written.append(sum(size for path, size in sizes.items() if path not in seen))
            seen |= sizes
            kept.append(sum(sizes.values()))
    first, last = slice(3 * CROWDED, 6 * CROWDED), slice(-3 * CROWDED, None)
    assert sum(written[last]) <= 1.2 * sum(written[first]), "22 bytes of each commit would be 1.4"
    assert sum(written[last]) / len(written[last]) < 40_000, "bytes written a step"
    assert (kept[-1] - kept[steps // 2]) / (steps - steps // 2) < 4_000, "bytes kept a step"
