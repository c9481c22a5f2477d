"""Read files of other tools: rows of JSONL, Parquet and Hugging Face datasets, and the values in their cells.

Rows are read a few at a time. Nothing is executed: no pickles, and no code of a dataset. A cell that cannot be
converted raises `UnreadableCell` with the value found.
"""

import gzip
import importlib
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from types import ModuleType
from typing import Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from numpy.typing import NDArray

from offbeat.errors import CannotImport
from offbeat.types import UNKNOWN, Finish, Json, Score, Unknown, is_reward

ROWS_AT_ONCE: Final = 16
"""Rows of Parquet in memory. As Python numbers they take ten times the memory they take in Arrow."""
JSONL_SUFFIXES: Final = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
HUB_PREFIX: Final = "hf:"
FINISHES: Final = {
    **dict.fromkeys(("stop", "eos", "eos_token", "end_turn", "stop_sequence"), Finish.STOP),
    **dict.fromkeys(("length", "max_tokens", "max_length"), Finish.LENGTH),
}
"""The words that engines use for how a completion ended."""
ROLE_NAMES: Final = {"human": "user", "gpt": "assistant"}
"""Message roles that other tools name differently."""

Row = dict[str, object]
Message = dict[str, str]
"""`role` and `content`."""
Tokens = NDArray[np.int32]


@dataclass(frozen=True)
class SourceRecord:
    """One row and where it is, for example "rollouts.jsonl, line 7"."""

    where: str
    row: Row


@dataclass(frozen=True)
class BrokenRecord:
    """Something that is not a row, where it is, and why it is not a row."""

    where: str
    problem: str
    found: object


@dataclass(frozen=True)
class Records:
    """Rows that can be read any number of times; each call of `read` starts at the first row.

    `read` takes the wanted columns, or None for all. Formats that cannot skip columns return more than was requested.
    """

    name: str
    read: Callable[[Sequence[str] | None], Iterator[SourceRecord | BrokenRecord]]


class UnreadableCell(Exception):
    """These rows cannot be converted to a group."""


def find_records(where: str, split: str = "train") -> Records:
    """Return the rows of a file, a directory of files, a saved dataset, or a dataset on the hub (`hf:owner/name`).

    >>> find_records("no.txt")
    Traceback (most recent call last):
    offbeat.errors.CannotImport: there is no file no.txt; the name of a dataset on the hub is hf:owner/name
    """
    if where.startswith(HUB_PREFIX):
        return _hub_dataset(where.removeprefix(HUB_PREFIX), split)
    path = Path(where)
    if not (path.is_file() or path.is_dir()):
        raise CannotImport(f"there is no file {where}; the name of a dataset on the hub is {HUB_PREFIX}owner/name")
    if not path.is_dir():
        return _file(path)
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return _saved_dataset(path, split)
    files = [_file(file) for file in sorted(path.iterdir()) if file.name.endswith((*JSONL_SUFFIXES, ".parquet"))]
    if not files:
        raise CannotImport(f"{where} contains no {', no '.join((*JSONL_SUFFIXES, '.parquet'))} and no saved dataset")
    return Records(path.name, lambda columns: (record for file in files for record in file.read(columns)))


def _file(path: Path) -> Records:
    if path.name.endswith(JSONL_SUFFIXES):
        return Records(path.name, lambda _: _read_lines(path))
    if path.suffix == ".parquet":
        return Records(path.name, lambda columns: _read_parquet(path, columns))
    known = ", ".join((*JSONL_SUFFIXES, ".parquet"))
    raise CannotImport(f"the suffix of {path.name} is not one of {known}; a JSON array is not JSONL")


def _read_lines(path: Path) -> Iterator[SourceRecord | BrokenRecord]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines, _reading(path):
        yield from parse_lines(lines, path.name)


def parse_lines(lines: Iterable[bytes], name: str) -> Iterator[SourceRecord | BrokenRecord]:
    """Parse lines of JSONL, from a file or a pipe, one at a time. Blank lines count but are left out."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            yield BrokenRecord(where, f"not JSON: {error}", line.decode(errors="backslashreplace"))
            continue
        if isinstance(row, dict):
            yield SourceRecord(where, row)
        else:
            yield BrokenRecord(where, f"expected a JSON object, found a {type(row).__name__}", row)


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise CannotImport(
            f"{path.name} cannot be read to its end: {error}. Groups imported so far stay in the log; replace the file "
            "with a complete copy and import it again"
        ) from error


def _read_parquet(path: Path, columns: Sequence[str] | None) -> Iterator[SourceRecord]:
    with _reading(path), pa.parquet.ParquetFile(path) as file:
        wanted = columns and [name for name in file.schema_arrow.names if name in columns]
        yield from _rows_of(path.name, (pa.table(b) for b in file.iter_batches(ROWS_AT_ONCE, columns=wanted)))


def _rows_of(name: str, tables: Iterator[pa.Table]) -> Iterator[SourceRecord]:
    number = 0
    for table in tables:
        for batch in table.to_batches():
            columns = [as_python(column) for column in batch.columns]
            for values in zip(*columns, strict=True):
                number += 1
                yield SourceRecord(f"{name}, row {number}", dict(zip(batch.schema.names, values, strict=True)))


def as_python(column: pa.Array) -> list[object]:
    """Return what `to_pylist` returns, twenty times faster for lists of numbers."""
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        parts, end = as_python(column.flatten()), 0
        lists: list[object] = []
        for length in column.value_lengths().to_pylist():
            end += length or 0
            lists.append(None if length is None else parts[end - length : end])
        return lists
    if column.null_count or not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        return column.to_pylist()  # type: ignore[no-any-return]
    return column.to_numpy().tolist()  # type: ignore[no-any-return]


def _saved_dataset(path: Path, split: str) -> Records:
    datasets = _import_datasets()
    loaded = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise CannotImport(f"{path} has no split {split!r}; it has {', '.join(loaded)}")
        loaded = loaded[split]

    def read(columns: Sequence[str] | None) -> Iterator[SourceRecord]:
        chosen = loaded.select_columns([c for c in loaded.column_names if columns is None or c in columns])
        return _rows_of(path.name, chosen.with_format("arrow").iter(ROWS_AT_ONCE))

    return Records(path.name, read)


def _hub_dataset(name: str, split: str) -> Records:
    datasets = _import_datasets()

    def read(_: Sequence[str] | None) -> Iterator[SourceRecord]:
        rows = datasets.load_dataset(name, split=split, streaming=True)
        return (SourceRecord(f"{name}, row {number}", dict(row)) for number, row in enumerate(rows, 1))

    return Records(name, read)


def _import_datasets() -> ModuleType:
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError as missing:
        raise CannotImport("Hugging Face datasets is not installed: pip install datasets") from missing


def read_tokens(values: object, what: str) -> Tokens:
    """Convert a list of token ids.

    >>> read_tokens([4, 2], "a completion")
    array([4, 2], dtype=int32)
    >>> read_tokens([4.5], "c7")
    Traceback (most recent call last):
    offbeat.experience.importing.records.UnreadableCell: the token ids of c7 are float64, not integers
    """
    found = _array(values, what, "token ids")
    if found.size and found.dtype.kind not in "iu":
        raise UnreadableCell(f"the token ids of {what} are {found.dtype.name}, not integers")
    if found.size and (int(found.min()) < -(2**31) or int(found.max()) >= 2**31):
        raise UnreadableCell(f"{what} has token ids that do not fit 32 bits")
    return found.astype(np.int32)


def read_logprobs(values: object) -> NDArray[np.float32] | Unknown:
    """Convert a list with one log-prob for each token; None is unknown."""
    if values is None:
        return UNKNOWN
    found = _array(values, "a completion", "log-probs")
    if found.size and found.dtype.kind not in "fiu":
        raise UnreadableCell(f"log-probs are {values!r:.80}; expected one number for each token")
    with np.errstate(over="ignore"):  # a number that is too large becomes infinite, which validation refuses
        return found.astype(np.float32)


def _array(values: object, what: str, expected: str) -> NDArray[np.generic]:
    if not isinstance(values, list):
        raise UnreadableCell(f"{what} has {values!r:.80}; expected a list of {expected}")
    try:
        return np.asarray(values)
    except (ValueError, OverflowError) as error:  # lists of unequal length, numbers beyond 64 bits
        raise UnreadableCell(f"{what} has no flat list of {expected}: {error!s:.120}") from error


def read_finish(word: object) -> Finish:
    """Convert how a completion ended; None counts as a normal end."""
    if word is None:
        return Finish.STOP
    finish = FINISHES.get(str(word).lower())
    if finish is None:
        raise UnreadableCell(f"a completion has finish {word!r:.80}; expected one of {', '.join(FINISHES)}")
    return finish


def read_score(reward: object) -> Score | None:
    """Convert a reward; None means that feedback is awaited. Validation checks the number."""
    if isinstance(reward, Decimal) and reward.is_finite():  # columns of databases
        reward = float(reward)
    return None if reward is None else Score(float(reward) if is_reward(reward) else cast(float, reward))


def read_name(value: object, what: str) -> str:
    """Return a text unchanged, and refuse everything else."""
    if not isinstance(value, str):
        raise UnreadableCell(f"the {what} is {value!r:.80}; expected text")
    return value


def read_id(value: object, what: str) -> str:
    """Return an id as text; ids of other tools are text or whole numbers.

    >>> read_id("a17", "completion id"), read_id(17, "completion id")
    ('a17', '17')
    """
    if not isinstance(value, str | int) or isinstance(value, bool) or not str(value).strip():
        raise UnreadableCell(f"the {what} is {value!r:.80}; expected text or a whole number")
    return str(value)


def read_text(text: str) -> str:
    """Return a text unchanged, and refuse one that a tokenizer cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnreadableCell(f"not valid Unicode: {text!a:.80}") from error
    return text


def read_json(value: object) -> Json:
    """Convert to plain JSON; dates and similar values become text."""
    return cast(Json, json.loads(json.dumps(value, default=str)))


def read_messages(value: object, what: str) -> list[Message]:
    """Convert messages, each with a role and a text, under the names that other tools use.

    >>> read_messages([{"from": "human", "value": "2 + 2 ="}], "the prompt")
    [{'role': 'user', 'content': '2 + 2 ='}]
    """
    messages: list[Message] = []
    for message in value if isinstance(value, list) else [value]:
        match message:
            case {"role": str(role), "content": str(content)} | {"from": str(role), "value": str(content)}:
                messages.append({"role": ROLE_NAMES.get(role, role), "content": read_text(content)})
            case _:
                raise UnreadableCell(f"{what} has message {message!r:.80}; expected a role and a text")
    if not messages:
        raise UnreadableCell(f"{what} has no messages")
    return messages
