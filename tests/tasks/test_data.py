"""Data: every format gives the same examples, and an error names the place and the reason."""

import json
from pathlib import Path

import pytest

from lab.fixtures.tiny_model import save_tokenizer
from offbeat.errors import DataError, PromptTooLong
from offbeat.tasks.data import ColumnMap, Example, Limit, fit, load, tokens

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
    assert loaded.dropped == 0 and len(loaded.examples) == 20
    assert loaded.examples[7] == Example("sums-7", "7+7=", {"solution": "14", "difficulty": 1})


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


class Characters:
    """A tokenizer with one token per character."""

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def apply_chat_template(self, conversation: list[dict[str, str]], **_: bool) -> list[int]:
        return self.encode("".join(f"[{message['content']}]" for message in conversation))


def test_prompts_over_the_limit_are_refused_or_dropped_and_counted(tmp_path: Path) -> None:
    source = as_jsonl(tmp_path)
    loaded = load(source, COLUMNS, limit=Limit(Characters(), 4, over="drop"))
    assert loaded.dropped == 10 and len(loaded.examples) == 10
    with pytest.raises(PromptTooLong, match="10 of 20 prompts have more than 4 tokens; the longest, sums-10, has 6"):
        load(source, COLUMNS, limit=Limit(Characters(), 4))
    with pytest.raises(PromptTooLong, match="all 20 prompts"):
        load(source, COLUMNS, limit=Limit(Characters(), 2, over="drop"))


def test_the_template_counts_towards_the_limit() -> None:
    chat = [Example("a", ({"role": "user", "content": "12345"},))]
    assert fit(chat, Limit(Characters(), 7, over="drop")).dropped == 0
    with pytest.raises(PromptTooLong):
        fit(chat, Limit(Characters(), 6))
