"""Groups in a terminal: layout, filters and keys."""

import re
from collections.abc import Sequence
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from offbeat.reports.browse import (
    FILTERS,
    HELP,
    BrowsePosition,
    BrowseState,
    layout,
    plain_text,
    status_line,
    wrap,
)
from offbeat.reports.groups import CompletionView, GroupFilter, GroupView, RunGroups
from offbeat.words import visible
from tests.fixtures.hostile_text import TEXTS
from tests.reports.made_run import make_run


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> RunGroups:
    directory = make_run(tmp_path_factory.mktemp("runs") / "one")
    found = RunGroups.open(directory, directory.config())
    assert found is not None
    return found


def view(*texts: str) -> GroupView:
    completions = tuple(CompletionView(text, "1", 0.5, 3, "stop", "v3") for text in texts)
    return GroupView("g7", "sums", "17+25=", {"answer": "42"}, "trained at step 4", 3, (0,), completions)


@given(st.text(max_size=300), st.integers(4, 200))
def test_wrapped_text_fits_its_width_and_is_printable(text: str, width: int) -> None:
    lines = wrap(text, width)
    assert all(cell_len(line) <= width and line.isprintable() for line in lines)


@given(st.text(st.sampled_from("ab\u0301\u0489\n")), st.integers(0, 30))
def test_stacked_combining_marks_are_escaped(text: str, extra: int) -> None:
    safe = visible(text + "z" + "\u0301" * extra)
    assert not re.search("[\u0301\u0489]{5}", safe)
    assert visible("e\u0301 क्षि") == "e\u0301 क्षि"


@given(st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=300), st.integers(4, 80))
def test_wrapping_loses_nothing_but_spaces(text: str, width: int) -> None:
    assert "".join(wrap(text, width)).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize("width", [80, 200])
def test_hostile_groups_fit_the_screen(width: int) -> None:
    lines = layout(view(*TEXTS), width)
    assert all(cell_len(line.plain) <= width and line.plain.isprintable() for line in lines)
    assert any("… 980,000 more" in line.plain for line in lines)
    plain = plain_text(view(*TEXTS))
    assert all(c.isprintable() or c == "\n" for c in plain)


def test_a_long_prompt_leaves_room_for_its_completions() -> None:
    lines = layout(replace(view("42"), prompt="\n".join(f"line {n}" for n in range(500))), 80)
    plain = [line.plain.rstrip() for line in lines]
    assert len(lines) < 24 and "line 0" in plain and "line 499" in plain and "42" in plain
    assert "… 490 lines not shown; --plain shows all" in plain


def test_completions_are_spread_evenly_over_rows() -> None:
    def beside(width: int, count: int) -> int:
        [first] = [line for line in layout(view(*["answer"] * count), width) if "advantage" in line.plain][:1]
        return first.plain.count("advantage")

    assert [beside(80, 8), beside(200, 8), beside(80, 2), beside(40, 8)] == [3, 4, 2, 1]


def test_a_group_shows_its_advantages_and_its_fate(groups: RunGroups) -> None:
    [first, last] = groups.load([0, len(groups) - 1])
    assert (first.id, first.prompt, first.version, first.lags) == ("g-2", "17+25=", 0, (0,))
    assert first.fate == "trained at step 1" and last.fate == "zero-variance" and last.lags == ()
    assert [one.advantage for one in first.completions] == [0.75, -0.25, -0.25, -0.25]
    assert [one.text for one in first.completions] == ["42", "41", "7", "abc"]


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        (GroupFilter(), 16),
        (GroupFilter(fate="zero-variance"), 4),
        (GroupFilter(reward=(1.0, 1.0)), 4),
        (GroupFilter(lag=(1.0, 5.0)), 6),
        (GroupFilter(length=(3.0, 3.0)), 16),
        (GroupFilter(length=(4.0, 9.0)), 0),
        (GroupFilter(fate="trained", reward=(0.4, 0.6), lag=(0.0, 0.0)), 3),
        (GroupFilter(task="arithmetic"), 16),
        (GroupFilter(task="gsm8k"), 0),
        (GroupFilter(version=(2.0, 4.0)), 8),
        (GroupFilter(step=(1.0, 1.0)), 2),
        (GroupFilter(text="ABC"), 16),
        (GroupFilter(text="17+25="), 16),
        (GroupFilter(text="no such words"), 0),
        (GroupFilter(ids=("g-2", "g-5", "g-99")), 2),
    ],
)
def test_groups_are_filtered(groups: RunGroups, wanted: GroupFilter, count: int) -> None:
    assert len(groups.select(wanted)) == count


def test_keys_move_the_position() -> None:
    sizes = {"groups": 3, "lines": 50, "room": 20}
    position: BrowsePosition | None = BrowsePosition()
    for key, expected in [("j", (0, 1)), (" ", (0, 20)), (" ", (0, 30)), ("k", (0, 29)), ("n", (1, 0)), ("p", (0, 0)),
                          ("p", (0, 0)), ("?", (0, 0)), ("\x1b[B", (0, 1))]:  # fmt: skip
        assert position is not None
        position = position.after(key, **sizes)
        assert position == BrowsePosition(*expected)
    assert BrowsePosition(2).after("n", **sizes) == BrowsePosition(2) and BrowsePosition().after("q", **sizes) is None


@pytest.mark.parametrize("width", [20, 80, 200])
def test_the_status_line_fits(width: int) -> None:
    state = BrowseState(GroupFilter(), BrowsePosition(2))
    line = status_line(state, groups=3, lines=9, room=20, width=width)
    assert line.startswith("group 3 of 3") and len(line) <= width and ("? help" in line) == (width >= 80)
    asked = replace(state, asking="fate", typed="trained" * 40)
    refused = replace(state, notice="\x1b[2J" * 40)
    for other in (asked, refused, replace(state, values=(("text", "日本" * 99),))):
        line = status_line(other, groups=3, lines=9, room=20, width=width)
        assert cell_len(line) <= width and line.isprintable()


def press(state: BrowseState | None, keys: Sequence[str]) -> BrowseState:
    for key in keys:
        assert state is not None
        state = state.after(key, groups=16, lines=9, room=20)
    assert state is not None
    return state


def test_a_filter_is_typed_changed_cancelled_and_removed() -> None:
    state = press(BrowseState(GroupFilter()), [*"nn", *"r0.1:x", "\x7f", *"0.9", "\n"])
    assert state.wanted == GroupFilter(reward=(0.1, 0.9)) and state.position == BrowsePosition()
    assert press(state, [*"t?q", "\x1b"]) == state, "Esc keeps the filter, and letters are text while one types"
    both = press(state, [*"/forty two", "\n"])
    assert both.wanted == GroupFilter(reward=(0.1, 0.9), text="forty two")
    assert press(both, ["r", *["\x7f"] * 7, "\n"]).wanted == GroupFilter(text="forty two")
    assert press(both, "c").wanted == GroupFilter()


@pytest.mark.parametrize(
    ("keys", "says"), [("ftraned", "did you mean 'trained'?"), ("l4:2", "is empty"), ("vnew", "is not a range")]
)
def test_a_wrong_value_says_why_and_changes_nothing(keys: str, says: str) -> None:
    state = press(BrowseState(GroupFilter()), [*keys, "\n"])
    assert says in state.notice and state.wanted == GroupFilter() and not state.asking


def test_help_lists_every_key_of_a_filter() -> None:
    state = press(BrowseState(GroupFilter()), "?")
    assert state.helping and not press(state, "q").helping
    assert all(any(line.startswith(f"{key} ") and name in line for line in HELP) for key, (name, _) in FILTERS.items())
    assert {name for name, _ in FILTERS.values()} <= {one.name for one in fields(GroupFilter)}
