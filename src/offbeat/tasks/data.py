"""Examples, and how to load them from JSONL, Parquet or Hugging Face datasets.

`ColumnMap` names the columns. Chats use the tokenizer's own template.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, cast, overload

from offbeat.errors import DataError, TaskError, first_line, suggest_nearest
from offbeat.tasks.tokenizer import rendering
from offbeat.types import PROMPT_COLUMNS, Json

Row = Mapping[str, object]
Messages = tuple[Mapping[str, str], ...]
"""A chat: `({"role": "user", "content": "1+1="},)`."""
EVALUATION_SPLITS: Final = ("test", "validation")


@dataclass(frozen=True)
class Example:
    """One problem.

    >>> example = Example("add-7", "17+25=", {"answer": "42"})
    >>> example.record
    {'prompt': '17+25=', 'answer': '42'}
    """

    id: str
    prompt: str | Messages
    """Plain text, or chat messages for the tokenizer's template."""
    columns: Mapping[str, Json] = field(default_factory=dict)
    """What a reward function needs: the reference answer, tests, a difficulty. JSON, without a key 'prompt'."""

    def __post_init__(self) -> None:
        if not isinstance(self.prompt, str):
            object.__setattr__(self, "prompt", tuple(dict(message) for message in self.prompt))
        if "prompt" in self.columns:
            raise TaskError(f"example {self.id!r}: 'prompt' is reserved for the prompt itself; rename that column")

    @property
    def record(self) -> dict[str, Json]:
        """The columns plus the prompt: what reward functions receive and the experience log stores."""
        prompt: Json = self.prompt if isinstance(self.prompt, str) else [dict(m) for m in self.prompt]
        return {"prompt": prompt, **self.columns}


class Deferred(Sequence[Example]):
    """Examples that load on first use, so a task can score stored completions without its data.

    >>> examples = Deferred(lambda: [Example("a", "1+1=")])
    >>> len(examples), examples[0].id
    (1, 'a')
    """

    def __init__(self, load_examples: Callable[[], Sequence[Example]]) -> None:
        self._load = load_examples
        self._examples: Sequence[Example] | None = None

    def _loaded(self) -> Sequence[Example]:
        if self._examples is None:
            self._examples = self._load()
        return self._examples

    def __len__(self) -> int:
        return len(self._loaded())

    @overload
    def __getitem__(self, at: int) -> Example: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[Example]: ...
    def __getitem__(self, at: int | slice) -> Example | Sequence[Example]:
        return self._loaded()[at]


class Tokenizer(Protocol):
    """The two methods used here; every tokenizer of transformers has them."""

    def encode(self, text: str) -> list[int]: ...

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> list[int]: ...


@dataclass(frozen=True)
class Loaded:
    """What was loaded."""

    examples: list[Example]


@dataclass(frozen=True)
class ColumnMap:
    """Maps the columns of a dataset to the parts of an example.

    >>> columns = ColumnMap(prompt="question", keep={"answer": "solution"}, chat=True)
    >>> columns.example({"question": "1+1=", "solution": "2", "author": "me"}, "sums-0").record
    {'prompt': [{'role': 'user', 'content': '1+1='}], 'answer': '2'}
    """

    prompt: str = "prompt"
    """The column with the prompt, which is text or chat messages."""
    keep: Mapping[str, str] | None = None
    """Name in the example → name in the data. None keeps every other column under its own name."""
    id: str | None = None
    """The column with the id. None numbers the rows."""
    chat: bool = False
    """Turn a text prompt into a user message. A system message implies this."""
    system: str | None = None
    """A system message to put before every prompt."""

    def example(self, row: Row, default_id: str) -> Example:
        """Convert one row; `DataError` if a column is missing or does not fit."""
        keep = {name: name for name in row if name not in (self.prompt, self.id)} if self.keep is None else self.keep
        wanted = [self.prompt, *keep.values(), *([self.id] if self.id else [])]
        for name in wanted:
            if name not in row:
                raise DataError(f"{default_id}: there is no column {name!r}; {suggest_nearest(name, row)}")
        id_ = str(row[self.id]) if self.id else default_id
        return Example(id_, self._prompt(row[self.prompt], id_), {n: _json(row[c], id_, c) for n, c in keep.items()})

    def _prompt(self, value: object, id_: str) -> str | Messages:
        if isinstance(value, str):
            if not self.chat and self.system is None:
                return value
            messages: Messages = ({"role": "user", "content": value},)
        else:
            messages = _messages(value, id_, self.prompt)
        return messages if self.system is None else ({"role": "system", "content": self.system}, *messages)


def _messages(value: object, id_: str, column: str) -> Messages:
    if not isinstance(value, Iterable):
        raise DataError(f"{id_}: column {column!r} holds {value!r:.80}; a prompt is text or a list of chat messages")
    messages = list(value)
    for message in messages:
        if not isinstance(message, Mapping) or not {"role", "content"} <= set(message):
            raise DataError(f"{id_}: {message!r:.80} in {column!r} is not a message with 'role' and 'content'")
    return tuple({"role": str(m["role"]), "content": str(m["content"])} for m in messages)


def _json(value: object, id_: str, column: str) -> Json:
    try:
        return cast("Json", json.loads(json.dumps(value, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise DataError(
            f"{id_}: column {column!r} holds {value!r:.80}, which is not JSON ({error}); leave it out with keep={{…}}"
        ) from None


def load(
    source: str | Path,
    columns: ColumnMap | None = None,
    *,
    split: str = "train",
    subset: str | None = None,
) -> Loaded:
    """Load examples from a file, a directory, or a dataset on the hub.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     file = Path(place, "sums.jsonl")
    ...     _ = file.write_text('{"question": "1+1=", "answer": "2"}')
    ...     load(file, ColumnMap(prompt="question")).examples
    [Example(id='sums-0', prompt='1+1=', columns={'answer': '2'})]

    Args:
        source: A path that ends in .jsonl, .json or .parquet is a file; an existing directory holds a file for each
            split, such as train.jsonl and test.jsonl, or a saved dataset; anything else is a name on the hub.
        columns: Which column holds what. None looks for the prompt (`with_prompt`) and keeps all others.
        split: The split to read, if the dataset has splits.
        subset: The dataset's configuration on the hub.
    """
    mapping = columns or ColumnMap()
    name = Path(source).stem
    found = rows(source, split=split, subset=subset)
    found = with_prompt(found) if columns is None else found
    examples = [mapping.example(row, f"{name}-{number}") for number, row in enumerate(found)]
    if not examples:
        raise DataError(f"{source} holds no rows; check the path and the split")
    repeated = [id_ for id_, count in Counter(example.id for example in examples).items() if count > 1]
    if repeated:
        raise DataError(f"{source}: two examples have the id {repeated[0]!r}; choose another id column, or none")
    return Loaded(examples)


def prompt_column(row: Row) -> str:
    """Return the column of a row that is the prompt: the first of `PROMPT_COLUMNS`.

    >>> prompt_column({"answer": "2", "question": "1+1="})
    'question'
    """
    for name in PROMPT_COLUMNS:
        if name in row:
            return name
    raise DataError(
        f"no column looks like a prompt among {', '.join(map(repr, row))}; rename the one that is to 'prompt'"
    )


def with_prompt(found: Iterable[Row]) -> Iterator[Row]:
    """Yield rows with a column 'prompt', which is the same column in all of them; other columns stay.

    A conversation that ends with an answer of the assistant is asked without it.

    >>> list(with_prompt([{"question": "1+1=", "answer": "2"}]))
    [{'prompt': '1+1=', 'question': '1+1=', 'answer': '2'}]
    """
    column = None
    for row in found:
        column = column or prompt_column(row)
        if column == "prompt" or column not in row:
            yield row
            continue
        prompt = row[column]
        if isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping):
            prompt = prompt[:-1] if prompt[-1].get("role") == "assistant" else prompt
        yield {"prompt": prompt, **row}


def rows(source: str | Path, *, split: str = "train", subset: str | None = None) -> Iterator[Row]:
    """Read the rows of a file or dataset without converting them; the arguments are those of `load`."""
    path = Path(source)
    if path.suffix in (".jsonl", ".json", ".parquet") and not path.is_file():
        raise DataError(f"{source} does not exist; check the path")
    if path.suffix in (".jsonl", ".json"):
        return _json_lines(path)
    if path.suffix == ".parquet":
        return _parquet(path)
    if path.is_file():
        raise DataError(
            f"{source} is neither .jsonl, .json nor .parquet; convert it, for example with pandas: to_parquet"
        )
    return _dataset(source, split, subset)


def evaluation_rows(source: str | Path, *, split: str = "train", subset: str | None = None) -> Iterator[Row]:
    """Read the split of a dataset that is meant for evaluation: `test`, or else `validation`.

    There are no rows if the dataset has neither, if `split` is the one, or if the source is a single file.
    """
    if Path(source).suffix in (".jsonl", ".json", ".parquet"):
        return
    for name in EVALUATION_SPLITS:
        if split.startswith(name):
            return
        try:
            found = _dataset(source, name, subset)
        except (DataError, ValueError):  # there is no split of that name
            continue
        yield from found
        return


def _json_lines(path: Path) -> Iterator[Row]:
    """Yield the objects of JSONL, or of one array in a file that ends in .json."""
    with path.open("rb") as file:
        array = path.suffix == ".json" and file.read(1) == b"["
        file.seek(0)
        for number, line in enumerate([file.read()] if array else file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, line {number} is not JSON: {error}; repair or remove the line") from None
            if array and all(isinstance(one, dict) for one in row):
                yield from row
                return
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number} is not a JSON object: {line[:80]!r}")
            yield row


def _parquet(path: Path) -> Iterator[Row]:
    from pyarrow import parquet

    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        raise DataError(f"{path} cannot be read as Parquet: {first_line(error)}; write or copy it again") from error


def _dataset(source: str | Path, split: str, subset: str | None) -> Iterator[Row]:
    for suffix, read in ((".jsonl", _json_lines), (".json", _json_lines), (".parquet", _parquet)):
        if (file := Path(source, split + suffix)).is_file():
            return read(file)
    import datasets

    datasets.disable_progress_bars()  # they would break what a run shows
    try:
        on_disk = Path(source).is_dir()
        found = (
            datasets.load_from_disk(str(source)) if on_disk else datasets.load_dataset(str(source), subset, split=split)
        )
    except Exception as error:  # whatever the library or damaged files cause
        raise DataError(
            f"datasets cannot load {source}: {type(error).__name__}: {first_line(error)}; check the path or name"
        ) from error
    if on_disk and isinstance(found, Mapping):
        if split not in found:
            raise DataError(f"{source} has no split {split!r}; {suggest_nearest(split, found)}")
        found = found[split]
    return cast("Iterator[Row]", iter(found))


def tokens(prompt: str | Messages, tokenizer: Tokenizer) -> list[int]:
    """Convert a prompt to token ids: text unchanged, a chat through the tokenizer's template."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    chat = [dict(message) for message in prompt]
    with rendering():
        return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)
