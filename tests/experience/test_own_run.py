"""In a log that several runs share, each run counts its own versions only."""

from dataclasses import replace
from pathlib import Path

import lance
import numpy as np
import pytest

from offbeat.experience.importing.rows_out import export_rows, exported_group
from offbeat.experience.index import NO_VERSION
from offbeat.experience.ledger import LedgerEvent, LedgerEventKind, OwnRun
from offbeat.experience.log import ExperienceLog
from offbeat.experience.modes import Fresh
from offbeat.experience.reader import LogReader
from offbeat.experience.sampler import Draw, Sampler, SamplerLimits
from offbeat.experience.validation import RefusalReason
from offbeat.types import Completion, Group, Prompt, Score, VersionSpan

ONE, TWO = OwnRun("aaaa1111", shared=True), OwnRun("bbbb2222", shared=True)


def group(name: str, version: int, run: str | None = None) -> Group:
    answers = tuple(
        Completion(
            f"{name}/{i}", [4, 2], [-0.1, -0.2], (VersionSpan(version, 0, 2, run),), score=Score(float(i))
        )
        for i in range(2)
    )  # fmt: skip
    return Group(name, Prompt("p", [1], "arithmetic"), answers)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """Return a log to which two runs and a worker of the first have written."""
    with ExperienceLog.open(tmp_path, own_run=ONE) as log:
        log.append([group("g aaaa1111-0", 3), group("host-77-0", 2)])
        log.record([LedgerEvent("g aaaa1111-0", LedgerEventKind.TRAINED, 4, by=ONE.trainer)])
    with ExperienceLog.open(tmp_path, own_run=TWO) as log:
        log.append([group("g bbbb2222-0", 900)])
    with ExperienceLog.open(tmp_path) as log:  # as an earlier release writes
        log.append([group("g aaaa1111-1", 5), group("g cccc3333-0", 6)])
    return tmp_path


def test_a_version_of_another_run_has_no_lag_here(shared: Path) -> None:
    rows = {run.id: LogReader.open(shared, own_run=run).index_since(None)[0] for run in (ONE, TWO)}
    assert rows[ONE.id].oldest_version.tolist() == [3, 2, NO_VERSION, 5, NO_VERSION]
    assert rows[TWO.id].oldest_version.tolist() == [NO_VERSION, NO_VERSION, 900, NO_VERSION, NO_VERSION]
    assert rows[ONE.id].guest.tolist() == [False, True, False, False, False]
    assert LogReader.open(shared).index_since(None)[0].oldest_version.tolist() == [3, 2, 900, 5, 6]


def test_the_groups_of_another_run_are_read_without_versions(shared: Path) -> None:
    versions = [one.oldest_version for one in LogReader.open(shared, own_run=ONE).groups()]
    assert versions == [3, 2, None, 5, None]
    runs = [one.completions[1].versions[0].run for one in LogReader.open(shared).groups()]
    assert runs == [ONE.id, ONE.id, TWO.id, None, None]
    assert LogReader.open(shared).damaged() == [], "the digest does not depend on the run"


def test_events_carry_the_run(shared: Path) -> None:
    events = LogReader.open(shared).tables.events
    assert events.scan(0, events.rows(), ["run"])["run"].to_pylist() == [ONE.id]


def test_a_run_in_a_log_of_its_own_owns_what_earlier_releases_wrote(tmp_path: Path) -> None:
    with ExperienceLog.open(tmp_path) as log:
        log.append([group("g-0", 3), group("host-77-0", 4), group("other", 8, run="bbbb2222")])
    rows = LogReader.open(tmp_path, own_run=OwnRun("aaaa1111")).index_since(None)[0]
    assert rows.oldest_version.tolist() == [3, 4, NO_VERSION] and rows.guest.tolist() == [False, True, False]


def test_a_log_without_the_column_gets_it_when_it_is_opened(tmp_path: Path) -> None:
    with ExperienceLog.open(tmp_path) as log:
        log.append([group("g-0", 3)])
    for table in ("groups", "events"):
        lance.dataset(str(tmp_path / f"{table}.lance")).drop_columns(["run", "seal"])
    own = OwnRun("aaaa1111")
    with ExperienceLog.open(tmp_path, own_run=own) as log:
        log.append([group("g-1", 4)])
        assert [one.completions[0].versions[0].run for one in log.groups()] == [None, own.id]
        assert log.index_since(None)[0].oldest_version.tolist() == [3, 4]


def test_runs_survive_an_export(shared: Path) -> None:
    for found in LogReader.open(shared).groups():
        assert exported_group(list(export_rows(found))) == found


def test_a_group_of_two_runs_is_refused(tmp_path: Path) -> None:
    first, second = group("g", 3, run="aaaa1111").completions[0], group("g", 3, run="bbbb2222").completions[1]
    with ExperienceLog.open(tmp_path) as log:
        [entry] = log.append([Group("g", Prompt("p", [1], "arithmetic"), (first, second))]).refused
    assert entry.refusal.reason is RefusalReason.VERSIONS and "several runs" in entry.refusal.detail


def test_groups_that_the_run_admitted_are_drawn_before_those_of_outside_workers(tmp_path: Path) -> None:
    """Three steps, two groups each, lag at most 2: what was admitted is trained, and only surplus expires."""
    with ExperienceLog.open(tmp_path, own_run=ONE) as log:
        log.append([group(f"host-77-{i}", 0) for i in range(6)])
        log.append([group(f"g aaaa1111-{i}", 0) for i in range(4)])
        sampler = Sampler(Fresh(), SamplerLimits(batch=2, max_lag=2), seed=0)
        sampler.feed(log.index_since(None)[0])
        assert sampler.waiting(0) == {0: 4}, "what admission must be able to train in time"
        assert sampler.waiting_count(0) == 10, "what admission counts before it admits more"
        draws = [sampler.draw(k) for k in range(3)]
        assert all(isinstance(draw, Draw) and draw.lags == (k, k) for k, draw in enumerate(draws))
        names = [one.id for draw in draws for one in log.read(draw.ordinals)]
        late = sampler.draw(3, at_least=0)
        expired = [one.id for one in log.read([drop.ordinal for drop in late.dropped])]
    assert names == [*(f"g aaaa1111-{i}" for i in range(4)), "host-77-0", "host-77-1"]
    assert expired == [f"host-77-{i}" for i in range(2, 6)]


def test_another_runs_groups_fill_what_is_left_of_a_batch_and_never_expire() -> None:
    from offbeat.experience.index import Columns

    rows = Columns([0, 1, 2], [NO_VERSION, 1, 1], *([value] * 3 for value in (0, 1, True, 2, 2, 0.5, 0.5, 9)))
    sampler = Sampler(Fresh(), SamplerLimits(batch=3, max_lag=1), seed=0)
    sampler.feed(rows)
    draw = sampler.draw(2)
    assert isinstance(draw, Draw) and draw.ordinals == (1, 2, 0) and draw.lags == (1, 1, None)
    sampler = Sampler(Fresh(), SamplerLimits(batch=3, max_lag=1), seed=0)
    sampler.feed(replace(rows, ordinal=np.arange(3)))
    assert [drop.ordinal for drop in sampler.draw(100).dropped] == [1, 2]
