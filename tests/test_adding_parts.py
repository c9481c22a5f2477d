"""A new part is its own file and one entry in a list, not an edit all over the house."""

import pytest

from lab.house.adding import MOST, PARTS, SEEN, train_with_all


@pytest.mark.engine
def test_a_run_uses_a_gate_an_engine_a_sink_and_a_task_added_to_a_copy_of_the_source() -> None:
    printed = train_with_all()
    assert [part for part, trace in SEEN.items() if trace not in printed] == []


def test_adding_a_part_touches_few_files() -> None:
    for part, edits in PARTS.items():
        assert len({edit.file for edit in edits}) <= MOST[part], part
