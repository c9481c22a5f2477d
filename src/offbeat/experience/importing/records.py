"""Rows of files that other people made: JSONL, Parquet and Hugging Face datasets, read a few at a time.

Nothing here knows what a row means; `shapes.py` does. Nothing is executed: no pickles, and no code of a dataset.
"""

import gzip
import importlib
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

import pyarrow as pa
import pyarrow.parquet

from offbeat.errors import CannotImport

AT_ONCE: Final = 16
"""Rows of Parquet held at a time. As Python's numbers they take ten times the room they take in Arrow."""
LINES: Final = (".jsonl", ".ndjson", ".jsonl.gz", ".ndjson.gz")
HUB: Final = "hf:"

Row = dict[str, object]


@dataclass(frozen=True)
class SourceRecord:
    """One row, and where it stands.

    >>> SourceRecord("rollouts.jsonl, line 7", {"prompt": "2 + 2 ="}).row["prompt"]
    '2 + 2 ='
    """

    where: str
    row: Row


@dataclass(frozen=True)
class Broken:
    """What stands where a row should, and why it is none.

    >>> Broken("rollouts.jsonl, line 8", "not JSON", '{"prompt": ').problem
    'not JSON'
    """

    where: str
    problem: str
    found: object


@dataclass(frozen=True)
class Records:
    """Rows that can be read again and again; each reading starts anew.

    `read` takes the columns wanted, None for all. Formats that cannot leave out columns give more than asked for.
    """

    name: str
    read: Callable[[Sequence[str] | None], Iterator[SourceRecord | Broken]]


def find_records(where: str, split: str = "train") -> Records:
    """The rows of a file, of a directory of files, of a saved dataset, or of one on the hub (`hf:owner/name`).

    >>> find_records("no.txt")
    Traceback (most recent call last):
    offbeat.errors.CannotImport: there is no no.txt; a dataset on the hub is called hf:owner/name
    """
    if where.startswith(HUB):
        return _hub(where.removeprefix(HUB), split)
    path = Path(where)
    if not path.exists():
        raise CannotImport(f"there is no {where}; a dataset on the hub is called {HUB}owner/name")
    if not path.is_dir():
        return _file(path)
    if (path / "dataset_dict.json").exists() or (path / "state.json").exists():
        return _saved_dataset(path, split)
    files = [_file(file) for file in sorted(path.iterdir()) if file.name.endswith((*LINES, ".parquet"))]
    if not files:
        raise CannotImport(f"{where} holds no {', no '.join((*LINES, '.parquet'))} and no saved dataset")
    return Records(path.name, lambda columns: (record for file in files for record in file.read(columns)))


def _file(path: Path) -> Records:
    if path.name.endswith(LINES):
        return Records(path.name, lambda _: _lines(path))
    if path.suffix == ".parquet":
        return Records(path.name, lambda columns: _parquet(path, columns))
    raise CannotImport(f"{path.name} is none of {', '.join((*LINES, '.parquet'))}; a JSON array is not JSONL")


def _lines(path: Path) -> Iterator[SourceRecord | Broken]:
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines, _whole(path):
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path.name}, line {number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield Broken(where, f"not JSON: {error}", line.decode(errors="backslashreplace"))
                continue
            if isinstance(row, dict):
                yield SourceRecord(where, row)
            else:
                yield Broken(where, f"a {type(row).__name__} where a JSON object was meant", row)


@contextmanager
def _whole(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError, zlib.error, pa.ArrowException) as error:
        raise CannotImport(
            f"{path.name} cannot be read to its end: {error}. What was taken stays; import it again when it is whole"
        ) from error


def _parquet(path: Path, columns: Sequence[str] | None) -> Iterator[SourceRecord]:
    with _whole(path), pa.parquet.ParquetFile(path) as file:
        wanted = columns and [name for name in file.schema_arrow.names if name in columns]
        yield from _batches(path.name, (pa.table(b) for b in file.iter_batches(AT_ONCE, columns=wanted)))


def _batches(name: str, tables: Iterator[pa.Table]) -> Iterator[SourceRecord]:
    number = 0
    for table in tables:
        for batch in table.to_batches():
            columns = [as_python(column) for column in batch.columns]
            for values in zip(*columns, strict=True):
                number += 1
                yield SourceRecord(f"{name}, row {number}", dict(zip(batch.schema.names, values, strict=True)))


def as_python(column: pa.Array) -> list[object]:
    """What `to_pylist` gives, twenty times faster for lists of numbers.

    >>> as_python(pa.array([[1, 2], None, []]))
    [[1, 2], None, []]
    """
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
    datasets = _library()
    loaded = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        if split not in loaded:
            raise CannotImport(f"{path} has no split {split!r}; it has {', '.join(loaded)}")
        loaded = loaded[split]

    def read(columns: Sequence[str] | None) -> Iterator[SourceRecord]:
        chosen = loaded.select_columns([c for c in loaded.column_names if columns is None or c in columns])
        return _batches(path.name, chosen.with_format("arrow").iter(AT_ONCE))

    return Records(path.name, read)


def _hub(name: str, split: str) -> Records:
    datasets = _library()

    def read(_: Sequence[str] | None) -> Iterator[SourceRecord]:
        rows = datasets.load_dataset(name, split=split, streaming=True)
        return (SourceRecord(f"{name}, row {number}", dict(row)) for number, row in enumerate(rows, 1))

    return Records(name, read)


def _library() -> ModuleType:
    try:
        return importlib.import_module("datasets")
    except ModuleNotFoundError as missing:
        raise CannotImport("this needs the library of Hugging Face datasets: pip install datasets") from missing
