"""What a person sees of a group in a terminal, and which groups are found."""

import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from lab.fixtures.hostile_text import TEXTS
from offbeat.report.browse import Place, laid_out, plainly_told, status, wrapped
from offbeat.report.groups import Answer, RunGroups, Shown, Wanted
from offbeat.report.words import visible
from tests.report.made_run import make_run


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> RunGroups:
    directory = make_run(tmp_path_factory.mktemp("runs") / "one")
    found = RunGroups.of(directory, directory.config())
    assert found is not None
    return found


def shown(*texts: str) -> Shown:
    answers = tuple(Answer(text, 1.0, "1", 0.5, 3, "stop", "v3") for text in texts)
    return Shown("g7", "sums", "17+25=", {"answer": "42"}, "trained at step 4", 3, (0,), answers)


@given(st.text(max_size=300), st.integers(4, 200))
def test_no_text_leaves_its_width_or_acts_on_the_terminal(text: str, width: int) -> None:
    lines = wrapped(text, width)
    assert all(cell_len(line) <= width and line.isprintable() for line in lines)


@given(st.text(st.sampled_from("ab\u0301\u0489\n")), st.integers(0, 30))
def test_marks_are_not_piled_up(text: str, extra: int) -> None:
    told = visible(text + "z" + "\u0301" * extra)
    assert not re.search("[\u0301\u0489]{5}", told)
    assert visible("e\u0301 क्षि") == "e\u0301 क्षि"


@given(st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=300), st.integers(4, 80))
def test_wrapping_loses_nothing_but_spaces(text: str, width: int) -> None:
    assert "".join(wrapped(text, width)).replace(" ", "") == text.replace(" ", "")


@pytest.mark.parametrize("width", [80, 200])
def test_hostile_groups_fit_the_screen(width: int) -> None:
    lines = laid_out(shown(*TEXTS), width)
    assert all(cell_len(line.plain) <= width and line.plain.isprintable() for line in lines)
    assert any("… 980,000 more" in line.plain for line in lines)
    told = plainly_told(shown(*TEXTS))
    assert all(c.isprintable() or c == "\n" for c in told)


def test_a_long_prompt_leaves_room_for_its_completions() -> None:
    lines = laid_out(replace(shown("42"), prompt="\n".join(f"line {n}" for n in range(500))), 80)
    told = [line.plain.rstrip() for line in lines]
    assert len(lines) < 24 and "line 0" in told and "line 499" in told and "42" in told
    assert "… 490 lines left out; --plain has them" in told


def test_completions_stand_side_by_side_as_evenly_as_can_be() -> None:
    def beside(width: int, count: int) -> int:
        [first] = [line for line in laid_out(shown(*["answer"] * count), width) if "advantage" in line.plain][:1]
        return first.plain.count("advantage")

    assert [beside(80, 8), beside(200, 8), beside(80, 2), beside(40, 8)] == [3, 4, 2, 1]


def test_a_group_shows_what_it_earned_and_what_became_of_it(groups: RunGroups) -> None:
    [first, last] = groups.show([0, len(groups) - 1])
    assert (first.id, first.prompt, first.version, first.lags) == ("g-2", "17+25=", 0, (0,))
    assert first.fate == "trained at step 1" and last.fate == "zero-variance" and last.lags == ()
    assert [answer.advantage for answer in first.answers] == [0.75, -0.25, -0.25, -0.25]
    assert [answer.text for answer in first.answers] == ["42", "41", "7", "abc"]


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        (Wanted(), 16),
        (Wanted(fate="zero-variance"), 4),
        (Wanted(reward=(1.0, 1.0)), 4),
        (Wanted(lag=(1.0, 5.0)), 6),
        (Wanted(length=(3.0, 3.0)), 16),
        (Wanted(length=(4.0, 9.0)), 0),
        (Wanted(fate="trained", reward=(0.4, 0.6), lag=(0.0, 0.0)), 3),
    ],
)
def test_groups_are_found_by_what_is_known_of_them(groups: RunGroups, wanted: Wanted, count: int) -> None:
    assert len(groups.choose(wanted)) == count


def test_keys_lead_where_they_say() -> None:
    sizes = {"groups": 3, "lines": 50, "room": 20}
    place: Place | None = Place()
    for key, expected in [("j", (0, 1)), (" ", (0, 20)), (" ", (0, 30)), ("k", (0, 29)), ("n", (1, 0)), ("p", (0, 0)),
                          ("p", (0, 0)), ("?", (0, 0)), ("\x1b[B", (0, 1))]:  # fmt: skip
        assert place is not None
        place = place.after(key, **sizes)
        assert place == Place(*expected)
    assert Place(2).after("n", **sizes) == Place(2) and Place().after("q", **sizes) is None


@pytest.mark.parametrize("width", [20, 80, 200])
def test_the_last_line_fits(width: int) -> None:
    line = status(Place(2), groups=3, lines=9, room=20, width=width)
    assert line.startswith("group 3 of 3") and len(line) <= width and ("q quit" in line) == (width >= 80)
