"""Retention removes no version that is needed, and a kill between two removals breaks no chain."""

from hypothesis import given
from hypothesis import strategies as st

from offbeat.weights.retention import chain, removable


@st.composite
def logs(draw: st.DrawFn) -> dict[int, int | None]:
    """Generate versions with growing numbers, each an anchor or based on the previous one."""
    numbers = sorted(draw(st.sets(st.integers(0, 60), min_size=1, max_size=25)))
    anchors = [True] + [draw(st.booleans()) for _ in numbers[1:]]
    before = [None, *numbers[:-1]]
    return {n: None if anchor else b for n, anchor, b in zip(numbers, anchors, before, strict=True)}


@given(logs(), st.integers(1, 30), st.sets(st.integers(0, 60), max_size=4))
def test_kept_versions_can_be_loaded_after_every_single_removal(
    bases: dict[int, int | None], keep: int, needed: set[int]
) -> None:
    left = set(bases)
    for version in removable(bases, keep, needed):
        left.remove(version)
        assert all(set(chain(listed, bases)) <= left for listed in left)
    assert max(bases) in left
    assert set(sorted(bases)[-keep:]) <= left and needed & bases.keys() <= left


@given(logs(), st.integers(1, 30), st.sets(st.integers(0, 60), max_size=4))
def test_no_version_is_kept_without_a_reason(bases: dict[int, int | None], keep: int, needed: set[int]) -> None:
    left = bases.keys() - removable(bases, keep, needed)
    wanted = {*sorted(bases)[-keep:], *(needed & bases.keys())}
    assert left == {link for version in wanted for link in chain(version, bases)}
    assert removable({version: bases[version] for version in left}, keep, needed) == []
