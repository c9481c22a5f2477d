"""Fates and conservation, from the log alone."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lab.fixtures.groups import made
from offbeat.errors import ConservationError
from offbeat.experience.ledger import Fate, LedgerEvent, LedgerEventKind, settle
from offbeat.experience.log import ExperienceLog

H = LedgerEventKind


def fates(
    stored: list[str], events: list[LedgerEvent], refused: list[tuple[str, str]] | None = None
) -> dict[str, Fate]:
    return {name: entry.fate for name, entry in settle(stored, events, refused or []).fates.items()}


def test_each_fate_by_hand() -> None:
    events = [
        *(LedgerEvent(name, H.STARTED) for name in "abcdefgh"),
        LedgerEvent("b", H.LOST, cause="worker 3 is gone"),
        LedgerEvent("c", H.TRAINED, step=1),
        LedgerEvent("c", H.TRAINED, step=4),
        LedgerEvent("d", H.EXPIRED, step=9, cause="lag"),
        LedgerEvent("e", H.ZERO_VARIANCE, step=2),
        LedgerEvent("f", H.TOO_SMALL, step=2),
        LedgerEvent("g", H.SUPERSEDED, step=2),
    ]
    ledger = settle(list("cdefgh"), events, [("x", "reward")])
    assert {name: entry.fate.value for name, entry in ledger.fates.items()} == {
        "a": "in flight",
        "b": "lost",
        "c": "trained",
        "d": "expired",
        "e": "zero-variance",
        "f": "too-small",
        "g": "superseded",
        "h": "waiting",
        "x": "quarantined",
    }
    assert ledger.fates["c"].steps == (1, 4)
    assert ledger.uses == 2
    assert (ledger.fates["b"].cause, ledger.fates["x"].cause) == ("worker 3 is gone", "reward")
    ledger.check()
    assert str(ledger).startswith("9 generated = 1 trained + 1 waiting + 6 dropped (")


def test_a_lost_group_that_is_started_again_is_in_flight() -> None:
    assert fates([], [LedgerEvent("a", H.STARTED), LedgerEvent("a", H.LOST), LedgerEvent("a", H.STARTED)]) == {
        "a": Fate.IN_FLIGHT
    }
    assert fates(["a"], [LedgerEvent("a", H.STARTED), LedgerEvent("a", H.LOST)]) == {"a": Fate.WAITING}


def test_a_group_mended_after_quarantine_counts_as_appended() -> None:
    assert fates(["a"], [], [("a", "reward")]) == {"a": Fate.WAITING}


def test_trained_once_is_trained_for_good() -> None:
    assert fates(["a"], [LedgerEvent("a", H.TRAINED, step=1), LedgerEvent("a", H.EXPIRED, step=7)]) == {
        "a": Fate.TRAINED
    }


def test_the_same_event_twice_counts_once() -> None:
    ledger = settle(["a"], [LedgerEvent("a", H.TRAINED, step=3), LedgerEvent("a", H.TRAINED, step=3)])
    assert ledger.uses == 1


def test_a_resumed_trainer_takes_back_the_steps_after_its_checkpoint() -> None:
    events = [
        LedgerEvent("a", H.TRAINED, step=10),
        LedgerEvent("b", H.TRAINED, step=11),
        LedgerEvent("c", H.EXPIRED, step=11),
        LedgerEvent("d", H.TRAINED, step=11, by="another trainer"),
        LedgerEvent("", H.REWOUND, step=10),
        LedgerEvent("c", H.TRAINED, step=11),
    ]
    assert fates(list("abcd"), events) == {
        "a": Fate.TRAINED,
        "b": Fate.WAITING,
        "c": Fate.TRAINED,
        "d": Fate.TRAINED,
    }


def test_a_trained_group_that_was_never_appended_is_an_error() -> None:
    ledger = settle(["a"], [LedgerEvent("b", H.TRAINED, step=1)])
    with pytest.raises(ConservationError, match="1 groups have a fate but were never appended"):
        ledger.check()


def test_a_step_is_demanded_where_one_belongs() -> None:
    with pytest.raises(ValueError, match="needs its step"):
        LedgerEvent("a", H.TRAINED)


@given(
    st.sets(st.sampled_from("abcdef")),
    st.lists(st.builds(LedgerEvent, st.sampled_from("abcdefgh"), st.sampled_from(LedgerEventKind), st.integers(0, 9))),
    st.lists(st.tuples(st.sampled_from("abcdefgh"), st.just("reward"))),
)
def test_every_group_has_exactly_one_fate(
    stored: set[str], events: list[LedgerEvent], refused: list[tuple[str, str]]
) -> None:
    ledger = settle(stored, events, refused)
    assert sum(ledger.counts.values()) == ledger.generated
    assert stored <= set(ledger.fates)
    assert all(ledger.fates[name].fate not in (Fate.IN_FLIGHT, Fate.LOST) for name in stored)
    named = {event.group_id for event in events if event.event is H.QUARANTINED}
    assert {name for name in stored if ledger.fates[name].fate is Fate.QUARANTINED} <= named


def test_the_log_computes_the_ledger_of_a_snapshot(tmp_path: Path) -> None:
    with ExperienceLog.open(tmp_path) as log:
        log.record(LedgerEvent(f"g{i}", H.STARTED) for i in range(4))
        log.append([made(0), made(1), made(2)])
        before = log.snapshot()
        log.record([LedgerEvent("g0", H.TRAINED, step=1), LedgerEvent("g1", H.ZERO_VARIANCE, step=1)])
        assert str(log.ledger(before)) == "4 generated = 0 trained + 3 waiting + 0 dropped (none) + 1 in flight"
        now = log.ledger()
        now.check()
    assert str(now) == "4 generated = 1 trained + 1 waiting + 1 dropped (1 zero-variance) + 1 in flight"
