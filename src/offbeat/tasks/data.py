"""Examples from data: JSONL, Parquet, Hugging Face datasets, with a column mapping and a limit on length.

Chat templates are the tokenizer's own. A prompt over the limit is refused or dropped, as asked for, and counted.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast, overload

from offbeat.errors import DataError, PromptTooLong, nearest
from offbeat.tasks.task import Example, Messages, Task
from offbeat.types import Json, Prompt

Row = Mapping[str, object]


class Tokenizer(Protocol):
    """What is needed of a tokenizer; every one of transformers has it."""

    def encode(self, text: str) -> list[int]:
        """Text as token ids."""

    def apply_chat_template(
        self, conversation: list[dict[str, str]], *, add_generation_prompt: bool, tokenize: bool, return_dict: bool
    ) -> list[int]:
        """A chat as token ids, up to where the assistant begins."""


@dataclass(frozen=True)
class Limit:
    """How long prompts may be, and what becomes of longer ones."""

    tokenizer: Tokenizer
    max_tokens: int
    over: Literal["refuse", "drop"] = "refuse"


@dataclass(frozen=True)
class Loaded:
    """Examples, and how many were left out for their length."""

    examples: list[Example]
    dropped: int = 0


@dataclass(frozen=True)
class ColumnMap:
    """Which columns of the data mean what.

    >>> columns = ColumnMap(prompt="question", keep={"answer": "solution"}, chat=True)
    >>> columns.example({"question": "1+1=", "solution": "2", "author": "me"}, "sums-0").record
    {'prompt': [{'role': 'user', 'content': '1+1='}], 'answer': '2'}
    """

    prompt: str = "prompt"
    """Holds text, or chat messages."""
    keep: Mapping[str, str] | None = None
    """Our name → theirs; None keeps every other column under its own name."""
    id: str | None = None
    """Holds an id; None numbers the rows."""
    chat: bool = False
    """Whether text is one message of a chat by the user; a system message makes it one anyway."""
    system: str | None = None
    """A system message to put before every prompt."""

    def example(self, row: Row, default_id: str) -> Example:
        """One row as an example."""
        keep = {name: name for name in row if name not in (self.prompt, self.id)} if self.keep is None else self.keep
        wanted = [self.prompt, *keep.values(), *([self.id] if self.id else [])]
        for name in wanted:
            if name not in row:
                raise DataError(f"{default_id}: there is no column {name!r}; {nearest(name, row)}")
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
    limit: Limit | None = None,
) -> Loaded:
    """Examples from a file, a directory of `datasets.save_to_disk`, or a dataset's name on the hub.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as place:
    ...     file = Path(place, "sums.jsonl")
    ...     _ = file.write_text('{"question": "1+1=", "answer": "2"}')
    ...     load(file, ColumnMap(prompt="question")).examples
    [Example(id='sums-0', prompt='1+1=', columns={'answer': '2'})]

    Args:
        source: What ends in .jsonl, .json or .parquet is a file; an existing directory is a saved dataset.
        columns: Which columns mean what.
        split: Of a dataset that has splits.
        subset: A dataset's configuration on the hub.
        limit: How long prompts may be.
    """
    mapping = columns or ColumnMap()
    name = Path(source).stem
    found = rows(source, split=split, subset=subset)
    examples = [mapping.example(row, f"{name}-{number}") for number, row in enumerate(found)]
    if not examples:
        raise DataError(f"{source} holds no rows")
    _unique(examples, str(source))
    return Loaded(examples) if limit is None else fit(examples, limit)


def _unique(examples: Sequence[Example], source: str) -> None:
    seen: set[str] = set()
    for example in examples:
        if example.id in seen:
            raise DataError(f"{source}: two examples have the id {example.id!r}; choose another id column, or none")
        seen.add(example.id)


def rows(source: str | Path, *, split: str = "train", subset: str | None = None) -> Iterator[Row]:
    """The rows of a file or dataset as they are, for a task that makes its own examples of them; see `load`."""
    path = Path(source)
    if path.suffix in (".jsonl", ".json", ".parquet") and not path.is_file():
        raise DataError(f"{source} does not exist; check the path")
    if path.suffix in (".jsonl", ".json"):
        return _json_lines(path)
    if path.suffix == ".parquet":
        return _parquet(path)
    return _dataset(source, split, subset)


def _json_lines(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise DataError(f"{path}, line {number} is not JSON: {error}") from None
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number} is not a JSON object: {line[:80]!r}")
            yield row


def _parquet(path: Path) -> Iterator[Row]:
    from pyarrow import parquet

    for batch in parquet.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def _dataset(source: str | Path, split: str, subset: str | None) -> Iterator[Row]:
    import datasets

    if not Path(source).is_dir():
        found = datasets.load_dataset(str(source), subset, split=split)
    else:
        found = datasets.load_from_disk(str(source))
        if isinstance(found, Mapping):
            if split not in found:
                raise DataError(f"{source} has no split {split!r}; {nearest(split, found)}")
            found = found[split]
    return cast("Iterator[Row]", iter(found))


def tokens(prompt: str | Messages, tokenizer: Tokenizer) -> list[int]:
    """A prompt as token ids: text as it is, a chat through the tokenizer's own template."""
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    chat = [dict(message) for message in prompt]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=True, return_dict=False)


def prompt_at(task: Task, tokenizer: Tokenizer, seed: int) -> Callable[[int], Prompt]:
    """A task's prompts as tokens, by their place in the endless order of a run's seed."""
    order = task.order(seed)

    def at(place: int) -> Prompt:
        example = task.examples[order.index(place)]
        return task.prompt(example, tokens(example.prompt, tokenizer))

    return at


def fit(examples: Sequence[Example], limit: Limit) -> Loaded:
    """The examples whose prompts are within the limit; the others refused or dropped, and counted."""
    lengths = [len(tokens(example.prompt, limit.tokenizer)) for example in examples]
    fitting = [example for example, length in zip(examples, lengths, strict=True) if length <= limit.max_tokens]
    dropped = len(examples) - len(fitting)
    if dropped and limit.over == "refuse":
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        raise PromptTooLong(
            f"{dropped} of {len(examples)} prompts have more than {limit.max_tokens} tokens; the longest, "
            f"{examples[longest].id}, has {lengths[longest]}; raise the limit, or drop them with over='drop'"
        )
    if not fitting:
        raise PromptTooLong(f"all {dropped} prompts have more than {limit.max_tokens} tokens; raise the limit")
    return Loaded(fitting, dropped)


class Deferred(Sequence[Example]):
    """Examples that are loaded when first touched, so that a task can score stored completions without its data.

    >>> examples = Deferred(lambda: [Example("a", "1+1=")])
    >>> len(examples), examples[0].id
    (1, 'a')
    """

    def __init__(self, load_them: Callable[[], Sequence[Example]]) -> None:
        self._load = load_them
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
