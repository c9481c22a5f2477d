"""Rows in every supported shape become groups, once each; rows that cannot are quarantined with a reason."""

import gzip
import json
import random
from collections.abc import Iterator, Sequence
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offbeat.errors import CannotImport
from offbeat.experience.feedback import LateScore
from offbeat.experience.importing.importer import GROUPS_AT_ONCE, ImportTally, import_into, layout_of, read_groups
from offbeat.experience.importing.layout import RowShape, detect, parse_columns
from offbeat.experience.importing.records import Records, Row, SourceRecord, UnreadableCell, find_records, read_score
from offbeat.experience.importing.rows_out import export, export_rows, exported_group
from offbeat.experience.importing.shapes import Encoder, ImportDefaults, group_from
from offbeat.experience.log import ExperienceLog
from offbeat.experience.validation import RefusalReason, ValidationRules
from offbeat.types import UNKNOWN, Finish, Group, Score, is_reward
from tests.fixtures.groups import groups as any_groups
from tests.fixtures.groups import make_group

BYTES = Encoder(
    encode=lambda text: list(text.encode()),
    encode_chat=lambda messages: [1, *"|".join(f"{m['role']}:{m['content']}" for m in messages).encode(), 2],
    end=0,
)
DEFAULTS = ImportDefaults(task="arithmetic", source="model:other", encoder=BYTES)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ExperienceLog]:
    with ExperienceLog.open(tmp_path / "log") as opened:
        yield opened


def lines(path: Path, rows: Sequence[object]) -> str:
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def taken(where: str, log: ExperienceLog | None, *, columns: str = "", keep: Sequence[str] = (), dry: bool = False,
          defaults: ImportDefaults = DEFAULTS, rules: ValidationRules | None = None) -> ImportTally:  # fmt: skip
    records = find_records(where)
    layout = layout_of(records, parse_columns(columns), keep)
    return import_into(log, read_groups(records, layout, defaults), rules=rules or ValidationRules(), dry_run=dry)


def rollouts(count: int) -> list[Row]:
    return [
        {"prompt": [1, 2, i], "responses": [[3, i], [4]], "rewards": [1.0, 0.0], "logprobs": [[-0.5, -0.1], [-2.0]]}
        for i in range(count)
    ]


USER, GOOD, BAD = (
    {"role": "user", "content": "2+2="},
    {"role": "assistant", "content": "4"},
    {"role": "assistant", "content": "5"},
)


@pytest.mark.parametrize(
    ("rows", "shape", "prompt"),
    [
        ([{"question": "2+2=", "responses": ["4", "5"], "scores": [1, 0]}], RowShape.LISTS, b"2+2="),
        ([{"prompt": [USER], "completions": ["4", "5"], "rewards": [1, 0]}], RowShape.LISTS, b"\1user:2+2=\2"),
        ([{"prompt": [USER], "completions": [[GOOD], [BAD]], "rewards": [1, 0]}], RowShape.LISTS, b"\1user:2+2=\2"),
        ([{"messages": [USER], "responses": [GOOD, BAD], "rewards": [1, 0]}], RowShape.LISTS, b"\1user:2+2=\2"),
        (
            [{"prompt": "2+2=", "completion": "4", "reward": 1}, {"prompt": "2+2=", "completion": "5", "reward": 0}],
            RowShape.ROWS,
            b"2+2=",
        ),
        (
            [
                {"prompt": [USER], "completion": [GOOD], "reward": 1, "uid": "a"},
                {"prompt": [USER], "completion": [BAD], "reward": 0, "uid": "a"},
            ],
            RowShape.ROWS,
            b"\1user:2+2=\2",
        ),
        (
            [{"messages": [USER, GOOD], "score": 1}, {"messages": [USER, BAD], "score": 0}],
            RowShape.CONVERSATIONS,
            b"\1user:2+2=\2",
        ),
        (
            [
                {
                    "conversations": [{"from": "human", "value": "2+2="}, {"from": "gpt", "value": answer}],
                    "score": score,
                }
                for answer, score in (("4", 1), ("5", 0))
            ],
            RowShape.CONVERSATIONS,
            b"\1user:2+2=\2",
        ),
    ],
)
def test_every_shape_gives_the_same_group(rows: list[Row], shape: RowShape, prompt: bytes) -> None:
    layout = detect(rows)
    group = group_from(rows, layout, DEFAULTS)
    assert layout.shape is shape and layout.has_text
    assert bytes(group.prompt.token_ids.tolist()) == prompt
    assert [bytes(c.token_ids.tolist()) for c in group.completions] == [b"4\0", b"5\0"]
    assert [c.score for c in group.completions] == [Score(1.0), Score(0.0)]
    assert {c.source for c in group.completions} == {"model:other"}
    assert all(c.behavior_logprobs is UNKNOWN and c.versions == () for c in group.completions)


def test_token_ids_and_logprobs_are_stored_unchanged(tmp_path: Path, log: ExperienceLog) -> None:
    tally = taken(lines(tmp_path / "a.jsonl", rollouts(3)), log, defaults=ImportDefaults("arithmetic", "model:other"))
    group = log.read([1])[0]
    assert (tally.taken, tally.completions, tally.known, tally.awaited) == (3, 6, 6, 0)
    assert group.prompt.token_ids.tolist() == [1, 2, 1] and group.completions[0].token_ids.tolist() == [3, 1]
    assert np.array_equal(group.completions[0].behavior_logprobs, np.array([-0.5, -0.1], np.float32))


@pytest.mark.parametrize(("given_logprobs", "ends"), [([-1.0, -1.0], True), ([-1.0], False), (None, True)])
def test_the_end_token_is_added_unless_the_logprobs_do_not_include_it(given_logprobs: object, ends: bool) -> None:
    rows: list[Row] = [{"prompt": [1], "completion": "4", "logprobs": given_logprobs}]
    tokens = group_from(rows, detect(rows), DEFAULTS).completions[0].token_ids.tolist()
    assert tokens == ([52, 0] if ends else [52])


def test_a_truncated_completion_gets_no_end_token() -> None:
    rows: list[Row] = [{"prompt": [1], "completion": "4", "finish_reason": "max_tokens"}]
    completion = group_from(rows, detect(rows), DEFAULTS).completions[0]
    assert completion.finish is Finish.LENGTH and completion.token_ids.tolist() == [52]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.parquet", "directory", "dataset", "splits"])
def test_every_kind_of_file_gives_the_same_groups(tmp_path: Path, log: ExperienceLog, name: str) -> None:
    rows, path = rollouts(5), tmp_path / name
    text = "".join(json.dumps(row) + "\n" for row in rows)
    match name:
        case "rows.jsonl":
            path.write_text(text)
        case "rows.jsonl.gz":
            path.write_bytes(gzip.compress(text.encode()))
        case "rows.parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case "directory":
            path.mkdir()
            pq.write_table(pa.Table.from_pylist(rows[:2]), path / "part-0.parquet")
            lines(path / "part-1.jsonl", rows[2:])
        case _:
            datasets = pytest.importorskip("datasets")
            dataset = datasets.Dataset.from_list(rows)
            (dataset if name == "dataset" else datasets.DatasetDict({"train": dataset})).save_to_disk(path)
    assert taken(str(path), log).taken == 5
    expected = [group_from([row], detect([row]), DEFAULTS) for row in rows]
    assert list(log.groups()) == expected


def test_importing_again_adds_nothing_even_after_late_feedback(tmp_path: Path) -> None:
    rows: list[object] = [{"prompt": [1, i], "responses": [[2], [3]], "rewards": [None, 1.0]} for i in range(4)]
    rows += [{"prompt": [7], "responses": [[2]], "rewards": [float("nan")]}, "{broken\n"]
    file = lines(tmp_path / "a.jsonl", rows)
    with ExperienceLog.open(tmp_path / "log") as log:
        first = taken(file, log)
        group = log.read([0])[0]
        log.score([LateScore(group.id, group.completions[0].id, Score(0.5))])
        before = log.snapshot()
    with ExperienceLog.open(tmp_path / "log") as log:
        again = taken(file, log)
        assert log.snapshot() == before
    assert (first.taken, first.present, again.taken, again.present) == (4, 0, 0, 4)
    assert first.refused == again.refused == {RefusalReason.REWARD: 1, RefusalReason.UNREADABLE: 1}


def test_different_scores_for_the_same_answers_are_a_conflict_and_not_a_second_group(
    tmp_path: Path, log: ExperienceLog
) -> None:
    row = {"prompt": [1], "responses": [[2], [3]], "rewards": [0.0, 1.0]}
    taken(lines(tmp_path / "a.jsonl", [row]), log)
    tally = taken(lines(tmp_path / "b.jsonl", [row | {"rewards": [1.0, 1.0]}]), log)
    assert tally.refused == {RefusalReason.CONFLICT: 1} and log.size() == 1
    assert "late feedback" in tally.examples[RefusalReason.CONFLICT][0]


@pytest.mark.parametrize("dry", [True, False])
def test_rows_that_occur_twice_in_a_file_count_once(tmp_path: Path, log: ExperienceLog, dry: bool) -> None:
    rows = rollouts(GROUPS_AT_ONCE)
    tally = taken(lines(tmp_path / "a.jsonl", [*rows, *rows[:3], rows[0]]), log, dry=dry)
    assert (tally.taken, tally.present) == (GROUPS_AT_ONCE, 4)


def test_rows_of_a_group_may_be_anywhere_in_the_file(tmp_path: Path) -> None:
    rows: list[Row] = [
        {"problem_id": i, "prompt": [1, i], "response": [2, i, j], "reward": j} for i in range(40) for j in range(4)
    ]
    shuffled = random.Random(7).sample(rows, len(rows))
    found: list[set[frozenset[bytes]]] = []
    for name, given_rows in (("together", rows), ("scattered", shuffled)):
        with ExperienceLog.open(tmp_path / name / "log") as log:
            tally = taken(lines(tmp_path / f"{name}.jsonl", given_rows), log)
            assert (tally.taken, tally.completions) == (40, 160)
            found.append({frozenset(c.token_ids.tobytes() for c in group.completions) for group in log.groups()})
    assert found[0] == found[1]


def test_several_columns_can_make_a_group_together(tmp_path: Path, log: ExperienceLog) -> None:
    rows = [{"step": s, "prompt": "2+2=", "completion": str(s + i), "reward": i} for s in range(3) for i in range(2)]
    assert taken(lines(tmp_path / "a.jsonl", rows), log, columns="group=step+prompt").taken == 3


def test_columns_can_be_given_and_others_kept(tmp_path: Path, log: ExperienceLog) -> None:
    row = {"q": "2+2=", "a": ["4", "5"], "r": [1, 0], "by": "human:ann", "area": "sums", "n": 7, "gold": {"value": 4}}
    given_columns = "prompt=q,responses=a,rewards=r,source=by,task=area,prompt_id=n"
    taken(
        lines(tmp_path / "a.jsonl", [row]),
        log,
        columns=given_columns,
        keep=["gold"],
        defaults=ImportDefaults(encoder=BYTES),
    )
    group = log.read([0])[0]
    assert (group.prompt.task, group.prompt.id, dict(group.prompt.columns)) == ("sums", "7", {"gold": {"value": 4}})
    assert {c.source for c in group.completions} == {"human:ann"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{half a line\n", "not JSON"),
        ("[1, 2]\n", "expected a JSON object, found a list"),
        ("[" * 100_000 + "\n", "not JSON"),
        ({"prompt": [1], "responses": [[2], [3]], "rewards": [1]}, "2 completions in responses, but 1 in rewards"),
        ({"prompt": [1], "responses": [[2]], "rewards": 1}, "a list with one reward for each completion"),
        ({"prompt": [1], "responses": "4"}, "expected a list of completions"),
        ({"prompt": [1], "responses": [[2, 2.5]]}, "are float64, not integers"),
        ({"prompt": [1], "responses": [[2**40]]}, "do not fit 32 bits"),
        ({"prompt": [1], "responses": [[2**90]]}, "not integers"),
        ({"prompt": [1], "responses": [[2, [3]]]}, "no flat list of token ids"),
        ({"prompt": [1], "responses": [{"said": "4"}]}, "expected text, messages or token ids"),
        ({"prompt": [1], "responses": [[USER]]}, "expected one assistant message"),
        ({"prompt": [1], "responses": [[{"role": "assistant", "content": None}]]}, "a role and a text"),
        ({"prompt": [1], "responses": ["half a character \ud800"]}, "not valid Unicode"),
        ({"prompt": [1], "responses": [[2]], "logprobs": [["-1"]]}, "one number for each token"),
        ({"prompt": [1], "responses": [[2]], "logprobs": [-1.0]}, "expected a list of log-probs"),
        ({"prompt": [1], "responses": [[2]], "finish_reason": "tired"}, "has finish 'tired'"),
        ({"prompt": None, "responses": [[2]]}, "expected a list of token ids"),
        ({"responses": [[2]]}, "expected a list of token ids"),
    ],
)
def test_rows_that_cannot_become_a_group_are_quarantined_with_a_message(
    tmp_path: Path, log: ExperienceLog, row: object, message: str
) -> None:
    good = {"prompt": [1], "responses": [[9]], "rewards": [1.0], "logprobs": [[-1.0]], "finish_reason": "stop"}
    tally = taken(lines(tmp_path / "a.jsonl", [good, row]), log)
    assert tally.taken == 1 and tally.refused == {RefusalReason.UNREADABLE: 1}
    [entry] = log.quarantined()
    assert message in entry.refusal.detail and entry.refusal.detail in tally.examples[RefusalReason.UNREADABLE][0]
    assert tally.examples[RefusalReason.UNREADABLE][0].startswith("a.jsonl, line 2: ")
    assert entry.payload != "null" and str(log.ledger()).startswith("2 generated")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"logprobs": [[0.5]]}, RefusalReason.LOGPROBS),
        ({"logprobs": [[-1e300]]}, RefusalReason.LOGPROBS),
        ({"logprobs": [[-0.5, -0.5]]}, RefusalReason.LOGPROBS_LENGTH),
        ({"rewards": [7.0]}, RefusalReason.REWARD_RANGE),
        ({"rewards": ["1.0"]}, RefusalReason.REWARD),
        ({"rewards": [10**400]}, RefusalReason.REWARD),
        ({"rewards": [-1e200]}, RefusalReason.REWARD),
        ({"logprobs": [[-1e30]]}, RefusalReason.LOGPROBS),
        ({"responses": [[50]]}, RefusalReason.VOCABULARY),
        ({"responses": [[]]}, RefusalReason.TOKENS),
        ({"responses": [], "rewards": [], "logprobs": []}, RefusalReason.NO_COMPLETIONS),
        ({"prompt": []}, RefusalReason.PROMPT_TOKENS),
    ],
)
def test_every_imported_group_is_validated(
    tmp_path: Path, log: ExperienceLog, change: Row, reason: RefusalReason
) -> None:
    good: Row = {"prompt": [1], "responses": [[9]], "rewards": [1.0], "logprobs": [[-1.0]]}
    rules = ValidationRules(vocab_size=50, reward_ranges={"arithmetic": (0, 1)})
    tally = taken(lines(tmp_path / "a.jsonl", [good, good | change]), log, rules=rules)
    assert (tally.taken, dict(tally.refused)) == (1, {reason: 1})
    assert [entry.refusal.reason for entry in log.quarantined()] == [reason]


def test_a_dry_run_counts_the_same_and_writes_nothing(tmp_path: Path, log: ExperienceLog) -> None:
    rows: list[object] = [*rollouts(5), {"prompt": [1], "responses": [[2]], "rewards": [float("inf")]}, "no\n"]
    file = lines(tmp_path / "a.jsonl", rows)
    before = log.snapshot()
    dry, dry_without_log = taken(file, log, dry=True), taken(file, None, dry=True)
    assert log.snapshot() == before
    assert dry == dry_without_log == taken(file, log)


def test_a_group_whose_rows_disagree_on_the_prompt_is_refused(tmp_path: Path, log: ExperienceLog) -> None:
    rows = [{"uid": 1, "prompt": [1, i], "response": [2], "reward": 1} for i in range(2)]
    tally = taken(lines(tmp_path / "a.jsonl", rows), log)
    assert tally.taken == 0 and "differ in their prompts" in tally.examples[RefusalReason.UNREADABLE][0]


@pytest.mark.parametrize(
    ("rows", "columns", "defaults", "message"),
    [
        ([{"prompt": "2+2=", "responses": ["4"]}], "", ImportDefaults("t", "s"), "text needs the policy's tokenizer"),
        ([{"prompt": [1], "responses": [[2]]}], "", ImportDefaults("t"), "the rows have no source"),
        ([{"prompt": [1], "responses": [[2]]}], "", ImportDefaults(source="s"), "the rows have no task"),
        ([{"q": [1], "responses": [[2]]}], "", DEFAULTS, "no column looks like a prompt among q, responses"),
        ([{"prompt": [1], "said": [[2]]}], "", DEFAULTS, "no column looks like completions among prompt, said"),
        ([{"prompt": [1], "said": [[2]]}], "responses=sad", DEFAULTS, "did you mean 'said'?"),
        ([{"prompt": [1], "said": [[2]]}], "responses", DEFAULTS, "pairs like prompt=question"),
        (["not json\n"], "", DEFAULTS, "has no rows that can be read"),
    ],
)
def test_an_impossible_import_fails_before_anything_is_written(
    tmp_path: Path, rows: list[object], columns: str, defaults: ImportDefaults, message: str
) -> None:
    with pytest.raises(CannotImport, match=message.replace("?", r"\?")):
        taken(lines(tmp_path / "a.jsonl", rows), None, columns=columns, defaults=defaults, dry=True)


def test_an_incomplete_file_fails_and_keeps_the_groups_imported_so_far(tmp_path: Path, log: ExperienceLog) -> None:
    text = "".join(json.dumps(row) + "\n" for row in rollouts(5_000))
    whole = gzip.compress(text.encode())
    (tmp_path / "a.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CannotImport, match=r"a\.jsonl\.gz cannot be read to its end"):
        taken(str(tmp_path / "a.jsonl.gz"), log)
    assert 0 < log.size() < 5_000
    (tmp_path / "b.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(CannotImport, match=r"b\.parquet cannot be read"):
        taken(str(tmp_path / "b.parquet"), log)


def test_a_missing_file_is_not_looked_up_on_the_network(tmp_path: Path) -> None:
    with pytest.raises(CannotImport, match="hf:owner/name"):
        find_records(str(tmp_path / "rollots.jsonl"))
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(CannotImport, match="a JSON array is not JSONL"):
        find_records(str(tmp_path / "a.json"))


_CELLS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=4) | st.just("stop"),
    lambda inner: st.lists(inner, max_size=3) | st.fixed_dictionaries({"role": inner, "content": inner}),
    max_leaves=8,
)
_LAYOUTS: list[tuple[RowShape, Row]] = [
    (RowShape.LISTS, {"prompt": [1], "responses": [[2]], "rewards": [1], "logprobs": [[-1.0]], "finish": ["stop"]}),
    (RowShape.ROWS, {"prompt": [1], "response": [2], "reward": 1, "logprobs": [-1.0], "finish": "stop"}),
    (RowShape.CONVERSATIONS, {"messages": [USER, GOOD], "reward": 1, "logprobs": [-1.0, -1.0], "finish": "stop"}),
    (RowShape.EXPORT, next(iter(export_rows(make_group(0))))),
]


@pytest.mark.parametrize(
    ("shape", "good"), _LAYOUTS, ids=lambda value: value.name if isinstance(value, RowShape) else ""
)
@given(data=st.data())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_cells_become_a_group_or_a_message(shape: RowShape, good: Row, data: st.DataObject) -> None:
    layout = detect([good], kept=() if shape is RowShape.EXPORT else ["finish"])
    assert layout.shape is shape
    changes = st.dictionaries(st.sampled_from(sorted(good)), _CELLS, min_size=1, max_size=3)
    rows = [good | change for change in data.draw(st.lists(changes, min_size=1, max_size=3))]
    records = Records("rows", lambda _: (SourceRecord(f"row {i}", row) for i, row in enumerate(rows)))
    found = list(read_groups(records, layout, DEFAULTS))
    tally = import_into(None, found, rules=ValidationRules(), dry_run=True)
    assert 1 <= len(found) <= len(rows) and tally.taken + tally.present + sum(tally.refused.values()) == len(found)


@given(any_groups())
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_exported_rows_contain_the_whole_group(group: Group) -> None:
    rows = list(export_rows(group))
    assert exported_group(rows) == group
    assert exported_group(json.loads(json.dumps(rows))) == group


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@given(st.lists(any_groups(), min_size=6, max_size=8, unique_by=lambda group: group.id))
@settings(
    max_examples=2,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_an_export_that_is_imported_again_gives_the_same_log(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, some: list[Group]
) -> None:
    place = tmp_path_factory.mktemp("round")
    groups = [*some, *(make_group(i) for i in range(70))]
    with ExperienceLog.open(place / "one") as log:
        log.append(groups)
        log.score([LateScore("g3", "g3/0", Score(0.25, {"correct": 0.25}))])
        exported = list(log.groups())
        assert export(log.groups(), place / f"export{suffix}") == len(groups)
        assert taken(str(place / f"export{suffix}"), log, defaults=ImportDefaults()).present == len(groups)
    with ExperienceLog.open(place / "two") as log:
        tally = taken(str(place / f"export{suffix}"), log, defaults=ImportDefaults())
        assert tally.taken == len(groups) and list(log.groups()) == exported


def test_broken_rows_of_an_export_are_refused_and_the_others_imported(tmp_path: Path, log: ExperienceLog) -> None:
    rows = [list(export_rows(make_group(i))) for i in range(4)]
    rows[0][0]["versions"] = [{"wrong": 1}]
    rows[1][0]["completion_id"] = 7
    rows[2][0]["prompt_columns"] = "{not json"
    file = lines(tmp_path / "a.jsonl", [row for group in rows for row in group])
    tally = taken(file, log, defaults=ImportDefaults())
    assert tally.taken == 1 and tally.refused == {RefusalReason.UNREADABLE: 3}
    with pytest.raises(UnreadableCell, match="has no versions"):
        exported_group([{name: value for name, value in rows[3][0].items() if name != "versions"}])


def test_an_export_never_overwrites_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("mine")
    with pytest.raises(CannotImport, match="exists"):
        export([make_group(0)], tmp_path / "a.jsonl")
    with pytest.raises(CannotImport, match=r"neither \.jsonl nor \.parquet"):
        export([make_group(0)], tmp_path / "a.csv")
    assert (tmp_path / "a.jsonl").read_text() == "mine"


def test_rewards_of_database_columns_are_numbers() -> None:
    assert read_score(Decimal("1.5")) == Score(1.5) and not is_reward(read_score(Decimal("NaN")).reward)
