"""Data: every format gives the same examples, and an error names the place and the reason."""

import json
from pathlib import Path

import pytest

from offbeat.errors import DataError
from offbeat.tasks.data import ColumnMap, Example, evaluation_rows, load, tokens, with_prompt
from tests.fixtures.tiny_model import save_tokenizer

ROWS = [{"question": f"{n}+{n}=", "answer": str(2 * n), "level": n % 2} for n in range(20)]
COLUMNS = ColumnMap(prompt="question", keep={"solution": "answer", "difficulty": "level"})


def as_jsonl(place: Path) -> Path:
    path = place / "sums.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in ROWS) + "\n\n")
    return path


def as_parquet(place: Path) -> Path:
    pa = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = place / "sums.parquet"
    parquet.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=7)
    return path


def as_saved(place: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    path = place / "sums"
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS)}).save_to_disk(path)
    return path


@pytest.mark.parametrize("form", [as_jsonl, as_parquet, as_saved])
def test_every_format_gives_the_same_examples(form: object, tmp_path: Path) -> None:
    loaded = load(form(tmp_path), COLUMNS)  # type: ignore[operator]
    assert len(loaded.examples) == 20
    assert loaded.examples[7] == Example("sums-7", "7+7=", {"solution": "14", "difficulty": 1})


def test_a_directory_may_hold_a_file_for_each_split(tmp_path: Path) -> None:
    as_jsonl(tmp_path).rename(tmp_path / "train.jsonl")
    assert len(load(tmp_path, COLUMNS).examples) == 20 and list(evaluation_rows(tmp_path)) == []
    (tmp_path / "test.jsonl").write_text(json.dumps(ROWS[3]))
    assert list(evaluation_rows(tmp_path)) == [ROWS[3]]
    with pytest.raises(DataError, match="datasets cannot load"):
        load(tmp_path, COLUMNS, split="trian")


def test_a_missing_split_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="did you mean 'train'"):
        load(as_saved(tmp_path), COLUMNS, split="trian")


def test_a_missing_column_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sums-0: there is no column 'questions'; did you mean 'question'"):
        load(as_jsonl(tmp_path), ColumnMap(prompt="questions"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is not a JSON object"),
        ('{"prompt": 7}', "a prompt is text or a list of chat messages"),
        ('{"prompt": [{"role": "user"}]}', "is not a message with 'role' and 'content'"),
        ('{"prompt": "b", "id": "a"}', "two examples have the id 'a'"),
        ('{"prompt": "b", "id": "b", "x": NaN}', "which is not JSON"),
    ],
)
def test_a_broken_row_is_refused_with_its_line_or_id(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "id": "a"}\n' + line)
    with pytest.raises(DataError, match=message):
        load(file, ColumnMap(id="id" if '"id"' in line else None))


def test_a_missing_file_and_an_empty_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load(tmp_path / "none.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(DataError, match="holds no rows"):
        load(empty)


def test_chats_use_the_tokenizers_template(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    save_tokenizer(tmp_path, chat=True)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    [example] = [ColumnMap(chat=True, system="be brief").example({"prompt": "1+1"}, "a")]
    assert example.record["prompt"] == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]
    assert tokenizer.decode(tokens(example.prompt, tokenizer)) == "<be brief><1+1>="
    assert tokenizer.decode(tokens("1+1", tokenizer)) == "1+1"


@pytest.mark.parametrize("form", [as_jsonl, as_parquet, as_saved])
def test_the_prompt_is_found_under_the_names_that_people_use_and_its_column_stays(form: object, tmp_path: Path) -> None:
    [example, *_] = load(form(tmp_path)).examples  # type: ignore[operator]
    assert example == Example("sums-0", "0+0=", {"question": "0+0=", "answer": "0", "level": 0})


def test_every_row_has_the_same_column_as_its_prompt() -> None:
    found = list(with_prompt([{"problem": "1+1="}, {"input": "a b", "problem": "2+2="}, {"input": "a b"}]))
    assert [row.get("prompt") for row in found] == ["1+1=", "2+2=", None]


def test_a_conversation_is_asked_without_the_answer_that_it_ends_with() -> None:
    asked, answer = {"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}
    [ended, open_] = with_prompt([{"messages": [asked, answer]}, {"messages": [asked]}])
    assert ended == {"prompt": [asked], "messages": [asked, answer]} and open_["prompt"] == [asked]


def test_one_array_in_a_json_file_is_read_and_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "sums.json"
    path.write_text(json.dumps(ROWS, indent=1))
    assert load(path).examples == load(as_jsonl(tmp_path)).examples
    path.write_text("[1]")
    with pytest.raises(DataError, match="line 1 is not a JSON object"):
        load(path)
    (tmp_path / "sums.csv").write_text("question,answer\n1+1=,2\n")
    with pytest.raises(DataError, match=r"neither \.jsonl, \.json nor \.parquet; convert it"):
        load(tmp_path / "sums.csv")


def test_data_without_a_prompt_names_its_columns() -> None:
    with pytest.raises(DataError, match="no column looks like a prompt among 'text', 'label'"):
        list(with_prompt([{"text": "1+1=", "label": 2}]))
