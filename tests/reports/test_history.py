"""The history of a run, whatever happened to it."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.events import EventKind
from offbeat.reports.history import RunHistory, RunState, history_of, read_history, state_of
from offbeat.reports.page import progress
from offbeat.reports.record import RunRecord
from offbeat.run.directory import RunDirectory, RunLock
from offbeat.run.journal import FileJournal
from tests.reports.made_run import make_run

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
KINDS = st.sampled_from([*EventKind, "?"])
FIELDS = st.sampled_from(["at", "step", "metrics", "by_lag", "lags", "rewards", "seconds", "groups", "why", "pass@1"])


def event(kind: str, step: int, at: float, **fields: object) -> dict:
    return {"kind": kind, "step": step, "at": at, **fields}


def test_a_resume_takes_back_the_steps_after_its_checkpoint() -> None:
    events = [event(EventKind.ESTIMATED, 0, 0.0)]
    for step in range(1, 6):
        events.append(event(EventKind.STEP, step, step, metrics={"loss": step}))
        events.append(event(EventKind.PUBLISHED, step, step, version=step, bytes=1, how="patch"))
        events.append(event(EventKind.EVALUATED, step, step, **{"pass@1": [0.5, 0.4, 0.6]}))
    events += [
        event(EventKind.RESUMED, 3, 100.0),
        event(EventKind.ESTIMATED, 3, 100.5),
        event(EventKind.STEP, 4, 101.0, metrics={"loss": 9}),
    ]
    found = history_of(events)
    assert [one.step for one in found.steps] == [1, 2, 3, 4] and found.steps[-1].metrics == {"loss": 9}
    assert [one.version for one in found.publishes] == [1, 2, 3] and [e.step for e in found.evaluations] == [1, 2, 3]
    assert [one.kind for one in found.notable] == [EventKind.RESUMED]


def test_a_run_that_starts_again_without_a_checkpoint_takes_back_everything() -> None:
    events = [event(EventKind.ESTIMATED, 0, 0.0), event(EventKind.PUBLISHED, 0, 0.0, version=0, bytes=9)]
    events += [event(EventKind.STEP, step, step, metrics={"loss": step}) for step in range(1, 6)]
    events += [event(EventKind.ESTIMATED, 0, 50.0), event(EventKind.PUBLISHED, 0, 50.0, version=0, bytes=9)]
    events += [event(EventKind.STEP, step, 50.0 + step, metrics={"loss": -step}) for step in range(1, 3)]
    found = history_of(events)
    assert [(one.step, one.metrics["loss"]) for one in found.steps] == [(1, -1), (2, -2)] and found.last_step == 2
    assert [one.version for one in found.publishes] == [0]


def test_a_resumed_run_was_asked_for_the_steps_of_its_last_process(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", steps=8)
    config = directory.path / "config.json"  # `offbeat resume --steps 8` of a run that was configured for 4
    config.write_text(config.read_text().replace('"steps": 8', '"steps": 4'))
    assert RunRecord.load(directory.path).steps == 8
    with FileJournal(directory.events) as journal:
        journal.write(EventKind.RESUMED, 8)
        journal.write(EventKind.ESTIMATED, 8, memory="little", steps=20)
        journal.write(EventKind.STEP, 9, metrics={"loss": 1.0})
        journal.write(EventKind.ENDED, 9, why="interrupted")
    record = RunRecord.load(directory.path)
    assert record.state is RunState.STOPPED and progress(record) == "stopped at step 9 of 20: interrupted"


def test_time_is_summed_over_the_processes_that_drove_the_run() -> None:
    events = [
        event(EventKind.ESTIMATED, 0, 10.0),
        event(EventKind.STEP, 1, 14.0, seconds={"training": 4.0}),
        event(EventKind.RESUMED, 1, 1000.0),
        event(EventKind.ESTIMATED, 1, 1001.0),
        event(EventKind.STEP, 2, 1006.0, seconds={"training": 5.0, "saving": 1.0}),
    ]
    found = history_of(events)
    assert found.seconds == {"training": 9.0, "saving": 1.0} and found.wall == pytest.approx(10.0, abs=1.01)


def test_values_that_are_not_finite_numbers_are_skipped() -> None:
    [step] = history_of(
        [event(EventKind.STEP, 1, 0.0, metrics={"a": None, "b": 1.5, "c": float("nan"), "d": True})]
    ).steps
    assert step.metrics == {"b": 1.5}


def test_notable_events_have_a_text() -> None:
    notable = history_of(
        [
            event(EventKind.ALARM, 3, 0.0, action="pause", says="ess below 0.1", groups=["g-1"]),
            event(EventKind.WORKER_LOST, 4, 0.0, worker="worker 0", why="EngineDead()"),
            event(EventKind.REFUSED, 5, 0.0, groups={"g-2": "not finite"}),
            event(EventKind.RANK_LOST, 6, 0.0, rank=1, why="killed"),
            event(EventKind.WORKER_JOINED, 7, 0.0, worker="worker 9"),
            event(EventKind.SAVED, 7, 0.0),
        ]
    ).notable
    assert [(one.kind, one.text) for one in notable] == [
        ("alarm, pause", "ess below 0.1"),
        ("worker lost", "worker 0: EngineDead()"),
        ("refused", "g-2: not finite"),
        ("rank lost", "1: killed"),
        ("worker joined", "worker 9"),
    ]


@given(st.lists(st.builds(lambda kind, rest: rest | {"kind": kind}, KINDS, st.dictionaries(FIELDS, JSON)) | JSON))
def test_a_damaged_journal_does_not_stop_a_report(events: list) -> None:
    found = history_of(events)
    assert all(abs(value) < 1e100 for one in found.steps for value in one.metrics.values())


@pytest.mark.parametrize(("why", "state"), [("", RunState.FINISHED), ("interrupted", RunState.FINISHED)])
def test_a_run_at_its_last_step_is_finished_for_any_reason(tmp_path: Path, why: str, state: RunState) -> None:
    directory = make_run(tmp_path / "run", ended=why)
    assert state_of(directory, read_history(directory), 8) is state


def test_a_run_that_ended_early_is_stopped(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", ended="asked to")
    assert state_of(directory, read_history(directory), 9) is RunState.STOPPED


def test_a_run_without_an_ended_event_is_running_paused_or_crashed(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run", ended=None)
    history = read_history(directory)
    assert state_of(directory, history, 8) is RunState.CRASHED
    with RunLock(directory):
        assert state_of(directory, history, 8) is RunState.RUNNING
        directory.pause.touch()
        assert state_of(directory, history, 8) is RunState.PAUSED
    assert state_of(directory, history, 8) is RunState.CRASHED
    with RunLock(directory):  # `state_of` does not keep the lock
        pass


def test_a_run_that_is_resumed_after_its_end_has_not_ended(tmp_path: Path) -> None:
    directory = make_run(tmp_path / "run")
    with FileJournal(directory.events) as journal:
        journal.write(EventKind.RESUMED, 8)
    assert read_history(directory).ended is None


def test_a_directory_without_a_journal_has_no_history(tmp_path: Path) -> None:
    assert read_history(RunDirectory(tmp_path)) == RunHistory()
