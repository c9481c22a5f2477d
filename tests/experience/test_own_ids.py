"""An import keeps the user's own ids, so that scores can be joined by them later."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.experience.importing.importer import ImportTally, import_into, layout_of, read_groups
from offbeat.experience.importing.layout import detect, parse_columns
from offbeat.experience.importing.records import Row, UnreadableCell, find_records
from offbeat.experience.importing.shapes import ImportDefaults, group_from
from offbeat.experience.log import ExperienceLog
from offbeat.experience.validation import RefusalReason, ValidationRules

DEFAULTS = ImportDefaults(task="support", source="human")


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ExperienceLog]:
    with ExperienceLog.open(tmp_path / "log") as opened:
        yield opened


def taken(place: Path, log: ExperienceLog, rows: list[Row], columns: str = "") -> ImportTally:
    (place / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    records = find_records(str(place / "rows.jsonl"))
    found = read_groups(records, layout_of(records, parse_columns(columns)), DEFAULTS)
    return import_into(log, found, rules=ValidationRules())


def two(**ids: tuple[object, object]) -> list[Row]:
    """Two answers to one prompt, one row each."""
    return [{"prompt": [1], "response": [2 + i]} | {name: pair[i] for name, pair in ids.items()} for i in range(2)]


@pytest.mark.parametrize(
    ("rows", "group", "prompt", "completions"),
    [
        (two(group_id=("t81", "t81"), answer_id=("a1", "a2")), "t81", None, ["a1", "a2"]),
        (two(group=(81, 81)), "81", None, ["81/0", "81/1"]),
        (two(prompt_id=("p7", "p7"), completion_id=("a1", "a2")), None, "p7", ["a1", "a2"]),
        (two(problem_id=(7, 7)), None, "7", ["7/0", "7/1"]),
        (two(id=(1, 2)), None, None, ["1", "2"]),
        (two(id=(7, 7)), None, "7", ["7/0", "7/1"]),
        (two(uid=("u", "u")), "u", None, ["u/0", "u/1"]),
        (two(uid=("u", "v")), None, None, ["u", "v"]),
        (two(request_id=("r1", "r2")), None, None, ["r1", "r2"]),
        ([{"id": 7, "prompt": [1], "responses": [[2], [3]]}], None, "7", ["7/0", "7/1"]),
        ([{"uid": "u", "prompt": [1], "responses": [[2], [3]]}], "u", None, ["u/0", "u/1"]),
        (
            [{"id": 7, "prompt": [1], "responses": [[2], [3]], "answer_ids": ["a1", "a2"]}],
            *(None, "7", ["a1", "a2"]),
        ),
        (
            [{"prompt": [1], "responses": [[2], [3]], "completion_ids": ["a1", "a2"]}],
            *(None, None, ["a1", "a2"]),
        ),
    ],
)
def test_ids_are_recognized_and_kept(
    rows: list[Row], group: str | None, prompt: str | None, completions: list[str]
) -> None:
    found = group_from(rows, detect(rows), DEFAULTS)
    assert [completion.id for completion in found.completions] == completions
    assert found.id == group or (group is None and found.id.startswith("import-"))
    assert found.prompt.id == prompt or (prompt is None and found.prompt.id.startswith("prompt-"))


def test_columns_of_ids_can_be_given_and_joined() -> None:
    rows: list[Row] = [
        {"step": 3, "ticket": "t81", "n": i, "prompt": [1], "response": [2 + i], "id": 9} for i in range(2)
    ]
    found = group_from(rows, detect(rows, parse_columns("group=step+ticket,completion_id=n")), DEFAULTS)
    assert (found.id, [completion.id for completion in found.completions]) == ("3+t81", ["0", "1"])
    assert found.prompt.id == "9"
    by_prompt = group_from(rows, detect(rows, parse_columns("group=step+prompt")), DEFAULTS)
    assert by_prompt.id.startswith("import-")


def test_token_ids_are_not_taken_for_ids() -> None:
    rows: list[Row] = [{"prompt_ids": [1], "completion_ids": [[2], [3]], "rewards": [1, 0]}]
    assert "completion_id" not in detect(rows).columns and detect(rows).columns["response"] == "completion_ids"


@pytest.mark.parametrize("value", [None, 1.5, True, " ", ["a"]])
def test_a_value_that_is_no_id_is_refused(value: object) -> None:
    rows = two(answer_id=("a1", "a2"))
    layout = detect(rows)
    with pytest.raises(UnreadableCell, match="expected text or a whole number"):
        group_from([rows[0], rows[1] | {"answer_id": value}], layout, DEFAULTS)


def test_a_row_that_is_there_twice_counts_once(tmp_path: Path, log: ExperienceLog) -> None:
    rows = two(group_id=("t", "t"), answer_id=("a1", "a2"))
    tally = taken(tmp_path, log, [*rows, rows[0], rows[1] | {"day": "Monday"}])
    assert (tally.taken, tally.completions, tally.repeated) == (1, 2, 2)
    again = taken(tmp_path, log, rows)
    assert (again.taken, again.present, again.repeated) == (0, 1, 0)


def test_an_id_with_two_different_answers_is_refused_with_both_lines(tmp_path: Path, log: ExperienceLog) -> None:
    rows = two(group_id=("t", "t"), answer_id=("a1", "a1"))
    tally = taken(tmp_path, log, rows)
    assert tally.taken == 0 and tally.refused == {RefusalReason.ID: 1}
    assert "rows.jsonl, line 1; rows.jsonl, line 2" in tally.examples[RefusalReason.ID][0]


def test_the_same_answers_under_other_ids_are_another_group(tmp_path: Path, log: ExperienceLog) -> None:
    taken(tmp_path, log, two(answer_id=("a1", "a2")))
    assert taken(tmp_path, log, two(answer_id=("b1", "b2"))).taken == 1
    assert taken(tmp_path, log, two(answer_id=("b1", "b2"))).present == 1


def test_other_answers_under_the_same_group_id_are_a_conflict(tmp_path: Path, log: ExperienceLog) -> None:
    rows = two(group_id=("t", "t"))
    taken(tmp_path, log, rows)
    tally = taken(tmp_path, log, [rows[0], rows[1] | {"response": [9]}])
    assert tally.refused == {RefusalReason.CONFLICT: 1}
    assert "another group id" in tally.examples[RefusalReason.CONFLICT][0] and log.size() == 1
