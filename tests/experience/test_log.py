"""Appending, reading, snapshots, filters, compaction, and repeated groups."""

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from offbeat.errors import LogReadError, LogWriteError
from offbeat.experience.background import CROWDED, Committer, Maintenance, tidy, wait
from offbeat.experience.feedback import LateScore
from offbeat.experience.lance_table import set_aside_torn_manifests
from offbeat.experience.log import ExperienceLog
from offbeat.experience.reader import LogReader
from offbeat.experience.schema import Snapshot
from offbeat.experience.validation import RefusalReason
from offbeat.types import UNKNOWN, Group, Score
from tests.fixtures.groups import make_group, without_scores


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ExperienceLog]:
    with ExperienceLog.open(tmp_path / "log") as opened:
        yield opened


@pytest.mark.parametrize("scheme", ["", "file://", "file-object-store://"])
def test_every_kind_of_storage_uses_the_same_code(tmp_path: Path, scheme: str) -> None:
    groups = [make_group(i) for i in range(5)]
    with ExperienceLog.open(f"{scheme}{tmp_path}/log") as log:
        log.append(groups[:3])
        log.append(groups[3:])
        log.score([LateScore("g1", "g1/0", Score(0.5))])
        assert log.read(["g4", "g0"]) == [groups[4], groups[0]]
        assert log.read(["g1"])[0].completions[0].score == Score(0.5)
        tidy(log.tables.groups)
        assert log.size() == 5
    with ExperienceLog.open(f"{scheme}{tmp_path}/log") as again:
        assert [group.id for group in again.groups()] == [f"g{i}" for i in range(5)]


def test_groups_are_returned_in_the_requested_order(log: ExperienceLog) -> None:
    groups = [make_group(i) for i in range(20)]
    log.append(groups)
    assert log.read([7, 3, 3, 19]) == [groups[7], groups[3], groups[3], groups[19]]
    assert log.read([]) == []


def test_a_missing_group_is_named_in_the_error(log: ExperienceLog) -> None:
    log.append([make_group(0)])
    with pytest.raises(LogReadError, match="no group 'g9'"):
        log.read(["g0", "g9"])
    with pytest.raises(LogReadError, match=r"the snapshot has 1 groups"):
        log.read([1])
    assert log.find(["g9", "g0"]).tolist() == [-1, 0]


def test_a_repeated_group_is_stored_once(log: ExperienceLog, tmp_path: Path) -> None:
    log.append([make_group(0), make_group(1)])
    assert log.append([make_group(1), make_group(2), make_group(2)]).repeated == ("g1", "g2")
    with ExperienceLog.open(tmp_path / "log") as other:  # a writer that does not remember what the first one wrote
        assert other.append([make_group(2), make_group(3)]).accepted == ("g2", "g3")
        assert [group.id for group in other.groups()] == ["g0", "g1", "g2", "g3"]
        assert other.read([3, 2]) == [make_group(3), make_group(2)]
        assert other.find(["g3", "g2"]).tolist() == [3, 2]
        assert (other.size(), other.ledger().repeated, other.ledger().conflicts) == (4, 1, 0)


def test_the_first_content_of_an_id_counts_and_the_conflict_is_reported(log: ExperienceLog, tmp_path: Path) -> None:
    changed = replace(make_group(0), completions=make_group(0).completions[:4])
    log.append([make_group(0)])
    refused = log.append([changed]).refused
    assert [entry.refusal.reason for entry in refused] == [RefusalReason.CONFLICT]
    with ExperienceLog.open(tmp_path / "log") as other:
        other.append([changed])
        assert other.read(["g0"]) == [make_group(0)]
        assert other.ledger().conflicts == 1


def test_a_snapshot_shows_the_log_at_that_moment(log: ExperienceLog) -> None:
    log.append([without_scores(make_group(0)), make_group(1)])
    before = Snapshot.from_json(log.snapshot().to_json())
    log.append([make_group(i) for i in range(2, 40)])
    log.score([LateScore("g0", "g0/0", Score(1.0))])
    tidy(log.tables.groups, keep=timedelta(0))
    assert list(log.groups(before)) == [without_scores(make_group(0)), make_group(1)]
    assert log.read([0], before) == [without_scores(make_group(0))]
    with pytest.raises(LogReadError):
        log.read([2], before)
    assert log.find(["g5"], before).tolist() == [-1]


def test_filters_find_versions_sources_and_tasks(log: ExperienceLog) -> None:
    quoted = replace(make_group(900), prompt=replace(make_group(900).prompt, task="it's"))
    person = replace(make_group(901).completions[0], versions=(), behavior_logprobs=UNKNOWN, source="human")
    mixed = replace(make_group(901), completions=(*make_group(901).completions[1:], person))
    foreign = replace(make_group(902), completions=(person,))
    log.append([*(make_group(i) for i in range(0, 640, 64)), quoted, mixed, foreign])
    assert log.filter(versions=(3, 5)).tolist() == [3, 4, 5]
    assert log.filter(task="it's").tolist() == [10]
    assert log.filter(source="human").tolist() == [11, 12]
    assert log.filter(source="human", versions=(0, 99)).tolist() == [11]
    assert len(log.filter()) == 13


def test_the_index_can_be_fed_in_pieces(log: ExperienceLog, tmp_path: Path) -> None:
    log.append([make_group(i) for i in range(3)])
    rows, cursor = log.index_since(None)
    assert rows.ordinal.tolist() == [0, 1, 2]
    assert len(log.index_since(cursor)[0]) == 0
    with ExperienceLog.open(tmp_path / "log") as other:
        other.append([make_group(1), without_scores(make_group(64))])
    rows, cursor = log.index_since(cursor)
    assert (rows.ordinal.tolist(), rows.ripe.tolist(), rows.oldest_version.tolist()) == ([3], [False], [1])
    log.score(LateScore("g64", f"g64/{i}", Score(float(i % 2))) for i in range(8))
    log.append([make_group(5)])
    rows, _ = log.index_since(cursor)
    assert rows.ordinal.tolist() == [3, 4]
    assert rows.ripe.tolist() == [True, True]
    assert (rows.scored[0], rows.reward_mean[0], rows.reward_std[0]) == (8, 0.5, 0.5)
    assert rows.tokens[0] == 16 + 8 * 16


def test_the_index_depends_only_on_the_two_snapshots(log: ExperienceLog, tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    cursors = [Snapshot()]
    for turn in range(6):
        log.append(
            [
                without_scores(make_group(turn * 10 + i)) if rng.random() < 0.5 else make_group(turn * 10 + i)
                for i in range(10)
            ]
        )
        known = [f"g{n}" for n in rng.integers(0, turn * 10 + 10, 5)]
        log.score(LateScore(name, f"{name}/{rng.integers(8)}", Score(rng.random())) for name in known)
        cursors.append(log.snapshot())
    with ExperienceLog.open(tmp_path / "log") as fresh:
        for since in range(6):
            for until in range(since, 7):
                one, _ = log.index_since(cursors[since], cursors[until])
                other, _ = fresh.index_since(cursors[since], cursors[until])
                for name in vars(one):
                    np.testing.assert_array_equal(getattr(one, name), getattr(other, name))


def test_compaction_beside_appends_keeps_the_order(log: ExperienceLog) -> None:
    with Maintenance(log.tables, every=0.01, keep=timedelta(seconds=1)) as maintenance:
        for i in range(3 * CROWDED):
            log.append([make_group(i, size=2, tokens=4)])
        time.sleep(0.1)
    assert len(log.tables.groups.fragment_sizes()) < 3 * CROWDED
    assert maintenance.failures == 0
    assert [group.id for group in log.groups()] == [f"g{i}" for i in range(3 * CROWDED)]
    assert log.read([5, 40]) == [make_group(5, size=2, tokens=4), make_group(40, size=2, tokens=4)]
    assert log.damaged() == []


def test_appends_from_many_threads_become_few_commits(log: ExperienceLog) -> None:
    before = log.tables.groups.refresh().version
    threads = [threading.Thread(target=lambda i=i: log.append([make_group(i)])) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.size() == 40
    assert log.tables.groups.refresh().version - before < 40


def test_everyone_who_waits_for_a_failed_commit_gets_the_error() -> None:
    def fail(batch: object) -> None:
        raise LogWriteError("no room")

    with Committer(fail, "test") as committer:
        futures = [committer.submit(i) for i in range(3)]
        for future in futures:
            with pytest.raises(LogWriteError, match="no room"):
                wait(future)


def test_a_group_that_was_not_acknowledged_can_be_appended_again(
    log: ExperienceLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(rows: object) -> None:
        raise LogWriteError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(log.tables.groups, "append", full)
        with pytest.raises(LogWriteError):
            log.append([make_group(0)])
    assert log.append([make_group(0)]).accepted == ("g0",)
    assert log.size() == 1


def test_a_reader_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(LogReadError, match="there is no experience log here"):
        LogReader.open(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
    with ExperienceLog.open(tmp_path / "log") as log:
        log.append([make_group(0)])
    assert LogReader.open(tmp_path / "log").read([0]) == [make_group(0)]


def test_a_reader_catches_up_with_a_snapshot_of_another_process(log: ExperienceLog, tmp_path: Path) -> None:
    log.append([make_group(0)])
    reader = LogReader.open(tmp_path / "log")
    assert reader.size() == 1
    log.append([make_group(1), make_group(2)])
    rows, _ = reader.index_since(None, log.snapshot())
    assert rows.ordinal.tolist() == [0, 1, 2]


def test_a_snapshot_of_another_log_is_refused(log: ExperienceLog) -> None:
    log.append([make_group(0)])
    with pytest.raises(LogReadError, match="another log's"):
        log.size(Snapshot(groups=5))


def test_an_iterator_of_groups_that_raises_leaves_nothing_behind(log: ExperienceLog) -> None:
    def breaking() -> Iterator[Group]:
        yield make_group(0)
        raise RuntimeError("the worker died")

    with pytest.raises(RuntimeError, match="the worker died"):
        log.append(breaking())
    assert log.append([make_group(0)]).accepted == ("g0",)


def test_appending_to_a_closed_log_is_an_error(tmp_path: Path) -> None:
    with ExperienceLog.open(tmp_path) as log:
        log.append([make_group(0)])
    with pytest.raises(LogWriteError, match="closed"):
        log.append([make_group(1)])


@pytest.mark.parametrize("kept", [0, 10, -5])
def test_a_manifest_left_incomplete_by_a_power_cut_is_set_aside(tmp_path: Path, kept: int) -> None:
    with ExperienceLog.open(tmp_path) as log:
        log.append([make_group(0)])
        log.append([make_group(1)])
    newest = min((tmp_path / "groups.lance" / "_versions").glob("*.manifest"))
    whole = newest.read_bytes()
    newest.write_bytes(whole[:kept] if kept else b"\0" * len(whole))
    with ExperienceLog.open(tmp_path) as log:
        assert [group.id for group in log.groups()] == ["g0"]
        log.append([make_group(1)])
        assert log.size() == 2
    assert set_aside_torn_manifests(tmp_path / "groups.lance") == []


def test_a_log_with_other_columns_is_refused(tmp_path: Path) -> None:
    import lance
    import pyarrow as pa

    lance.write_dataset(pa.table({"x": [1]}), str(tmp_path / "groups.lance"))
    with pytest.raises(LogReadError, match="does not have the columns"):
        ExperienceLog.open(tmp_path)


def test_storage_that_changes_a_token_is_detected(log: ExperienceLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log.append([make_group(i) for i in range(4)])
    assert log.damaged() == []
    import offbeat.experience.reader as reader

    honest = reader.groups_from
    monkeypatch.setattr(
        reader,
        "groups_from",
        lambda rows, **how: [
            replace(g, prompt=make_group(9).prompt) if g.id == "g2" else g for g in honest(rows, **how)
        ],
    )
    assert log.damaged() == ["g2"]
