"""Fates and conservation, computed from the log alone."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offbeat.errors import ConservationError
from offbeat.experience.ledger import Fate, LedgerEvent, LedgerEventKind, event_kind, settle
from offbeat.experience.log import ExperienceLog
from tests.fixtures.groups import make_group

Kind = LedgerEventKind


def fates(
    stored: list[str], events: list[LedgerEvent], refused: list[tuple[str, str]] | None = None
) -> dict[str, Fate]:
    return {name: entry.fate for name, entry in settle(stored, events, refused or []).fates.items()}


def test_each_fate_against_hand_computed_values() -> None:
    events = [
        *(LedgerEvent(name, Kind.STARTED) for name in "abcdefgh"),
        LedgerEvent("b", Kind.UNFINISHED, cause="given back"),
        LedgerEvent("c", Kind.TRAINED, step=1),
        LedgerEvent("c", Kind.TRAINED, step=4),
        LedgerEvent("d", Kind.EXPIRED, step=9, cause="lag"),
        LedgerEvent("e", Kind.ZERO_VARIANCE, step=2),
        LedgerEvent("f", Kind.TOO_SMALL, step=2),
        LedgerEvent("g", Kind.SUPERSEDED, step=2),
    ]
    ledger = settle(list("cdefgh"), events, [("x", "reward")])
    assert {name: entry.fate.value for name, entry in ledger.fates.items()} == {
        "a": "in flight",
        "b": "unfinished",
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
    assert (ledger.fates["b"].cause, ledger.fates["x"].cause) == ("given back", "reward")
    ledger.check()
    assert str(ledger).startswith("9 generated = 1 trained + 1 waiting + 5 dropped (")


def test_an_unfinished_group_that_is_started_again_is_in_flight() -> None:
    assert fates(
        [], [LedgerEvent("a", Kind.STARTED), LedgerEvent("a", Kind.UNFINISHED), LedgerEvent("a", Kind.STARTED)]
    ) == {"a": Fate.IN_FLIGHT}
    assert fates(["a"], [LedgerEvent("a", Kind.STARTED), LedgerEvent("a", Kind.UNFINISHED)]) == {"a": Fate.WAITING}


def test_unfinished_groups_are_not_dropped_and_are_read_as_earlier_versions_recorded_them() -> None:
    ledger = settle([], [LedgerEvent("a", Kind.STARTED), LedgerEvent("a", event_kind("lost"))])
    assert ledger.dropped == {}
    assert str(ledger) == "1 generated = 0 trained + 0 waiting + 0 dropped (none) + 0 in flight + 1 unfinished"
    ledger.check()


def test_a_group_that_is_fixed_after_quarantine_counts_as_appended() -> None:
    assert fates(["a"], [], [("a", "reward")]) == {"a": Fate.WAITING}


def test_a_trained_group_stays_trained() -> None:
    assert fates(["a"], [LedgerEvent("a", Kind.TRAINED, step=1), LedgerEvent("a", Kind.EXPIRED, step=7)]) == {
        "a": Fate.TRAINED
    }


def test_the_same_event_twice_counts_once() -> None:
    ledger = settle(["a"], [LedgerEvent("a", Kind.TRAINED, step=3), LedgerEvent("a", Kind.TRAINED, step=3)])
    assert ledger.uses == 1


def test_a_resumed_trainer_cancels_the_steps_after_its_checkpoint() -> None:
    events = [
        LedgerEvent("a", Kind.TRAINED, step=10),
        LedgerEvent("b", Kind.TRAINED, step=11),
        LedgerEvent("c", Kind.EXPIRED, step=11),
        LedgerEvent("d", Kind.TRAINED, step=11, by="another trainer"),
        LedgerEvent("", Kind.REWOUND, step=10),
        LedgerEvent("c", Kind.TRAINED, step=11),
    ]
    assert fates(list("abcd"), events) == {
        "a": Fate.TRAINED,
        "b": Fate.WAITING,
        "c": Fate.TRAINED,
        "d": Fate.TRAINED,
    }


def test_a_trained_group_that_was_never_appended_is_an_error() -> None:
    ledger = settle(["a"], [LedgerEvent("b", Kind.TRAINED, step=1)])
    with pytest.raises(ConservationError, match="1 groups have a fate but were never appended"):
        ledger.check()


def trained(*rows: tuple[str, int, int | None], by: str = "trainer") -> list[LedgerEvent]:
    return [LedgerEvent(one, Kind.TRAINED, step, by=by, updates=updates) for one, step, updates in rows]


def test_the_books_hold_as_many_updates_as_the_optimizer_made() -> None:
    events = trained(("a", 1, 4), ("b", 1, 4), ("a", 2, 1)) + trained(("b", 1, 9), by="trainer two")
    ledger = settle("ab", events)
    ledger.check({"trainer": 5, "trainer two": 9})
    assert ledger.fates["a"].updates == (4, 1)
    with pytest.raises(ConservationError, match=r"made 6 updates, but .* recorded for 5"):
        ledger.check({"trainer": 6})


def test_groups_of_one_step_have_one_number_of_updates() -> None:
    with pytest.raises(ConservationError, match=r"different numbers of updates for one step: step 3: \['2', '4'\]"):
        settle("ab", trained(("a", 3, 4), ("b", 3, 2))).check()


def test_steps_that_an_earlier_version_recorded_are_not_compared() -> None:
    settle("ab", trained(("a", 1, None), ("b", 2, 4))).check({"trainer": 7})


def test_an_event_of_a_step_needs_its_step() -> None:
    with pytest.raises(ValueError, match="needs a step"):
        LedgerEvent("a", Kind.TRAINED)


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
    assert all(ledger.fates[name].fate not in (Fate.IN_FLIGHT, Fate.UNFINISHED) for name in stored)
    named = {event.group_id for event in events if event.event is Kind.QUARANTINED}
    assert {name for name in stored if ledger.fates[name].fate is Fate.QUARANTINED} <= named


def test_the_log_computes_the_ledger_of_a_snapshot(tmp_path: Path) -> None:
    with ExperienceLog.open(tmp_path) as log:
        log.record(LedgerEvent(f"g{i}", Kind.STARTED) for i in range(4))
        log.append([make_group(0), make_group(1), make_group(2)])
        before = log.snapshot()
        log.record([LedgerEvent("g0", Kind.TRAINED, step=1), LedgerEvent("g1", Kind.ZERO_VARIANCE, step=1)])
        assert str(log.ledger(before)) == "4 generated = 0 trained + 3 waiting + 0 dropped (none) + 1 in flight"
        now = log.ledger()
        now.check()
    assert str(now) == "4 generated = 1 trained + 1 waiting + 1 dropped (1 zero-variance) + 1 in flight"
