"""The journal survives crashes, and seconds by phase sum to the wall time."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.events import EventKind
from offbeat.run.health import Action, Health, Rule
from offbeat.run.journal import FileJournal, Phase, Stopwatch, read


def test_a_crash_that_cuts_a_line_short_loses_only_that_line(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with FileJournal(path) as journal:
        journal.write(EventKind.STEP, 1, metrics={"loss": float("nan")})
    with path.open("ab") as file:
        file.write(b'{"at": 3, "step": 2, "ki')
    with FileJournal(path) as journal:
        journal.write(EventKind.STEP, 3)
    assert [(event["step"], event["kind"]) for event in read(path)] == [(1, EventKind.STEP), (3, EventKind.STEP)]
    assert next(read(path))["metrics"] == {"loss": None}


def test_a_line_that_is_json_and_no_event_is_skipped(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"step": 1, "kind": "step"}\n5\n[]\n{"step": 2, "kind": "step"}\n')
    assert [event["step"] for event in read(path)] == [1, 2]


@given(st.lists(st.tuples(st.sampled_from(Phase), st.floats(0, 10), st.floats(0, 10))))
def test_phases_sum_to_wall_time(spans: list[tuple[Phase, float, float]]) -> None:
    now = [0.0]
    watch = Stopwatch(lambda: now[0])
    for phase, inside, between in spans:
        with watch.phase(phase):
            now[0] += inside
        now[0] += between
    assert sum(watch.seconds().values()) == pytest.approx(now[0])


@given(st.lists(st.floats(allow_nan=True), max_size=30), st.integers(1, 4))
def test_a_rule_fires_once_each_time_it_stays_broken(values: list[float], patience: int) -> None:
    health = Health([Rule("ess", below=0.5, patience=patience, action=Action.STOP)])
    alarms = sum(len(health.check({"ess": value}, [], {})) for value in values)
    lengths = [len(list(run)) for broken, run in itertools.groupby(values, lambda v: not v >= 0.5) if broken]
    assert alarms == sum(length >= patience for length in lengths)
