"""Groups as plain rows, one for each completion, in JSONL or Parquet: for other tools and for import into another log.

An export contains the groups with their late scores filled in. It does not contain events and quarantine.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from offbeat.errors import CannotImport
from offbeat.experience.importing.layout import EXPORTED
from offbeat.experience.importing.records import Row, UnreadableCell, read_finish, read_logprobs, read_name, read_tokens
from offbeat.experience.schema import SPAN, canonical, score_fields, score_from
from offbeat.types import UNKNOWN, Completion, Group, Json, Prompt, VersionSpan

GROUPS_AT_ONCE: Final = 64
"""Groups in memory while writing Parquet."""

_TYPES: Final = {
    "prompt_token_ids": pa.list_(pa.int32()),
    "token_ids": pa.list_(pa.int32()),
    "behavior_logprobs": pa.list_(pa.float32()),
    "versions": pa.list_(pa.struct([*SPAN, pa.field("run", pa.string())])),
    "loss_mask": pa.list_(pa.bool_()),
    "reward": pa.float64(),
}
_TEXT: Final = ("prompt", "completion")
"""Columns for other tools; an import leaves them out."""
SCHEMA: Final = pa.schema([pa.field(name, _TYPES.get(name, pa.string())) for name in (*EXPORTED, *_TEXT)])
"""The schema of the Parquet file. In JSONL, `prompt_columns` and `breakdown` are objects and not text."""


def export_rows(group: Group) -> Iterator[Row]:
    """Yield one row for each completion.

    >>> answer = Completion("g7/0", [4, 2], UNKNOWN, source="human")
    >>> group = Group("g7", Prompt(id="p", token_ids=[1], task="arithmetic"), (answer,))
    >>> [row] = export_rows(group)
    >>> row["token_ids"], row["behavior_logprobs"], exported_group([row]) == group
    ([4, 2], None, True)
    """
    prompt = group.prompt
    for completion in group.completions:
        logprobs, mask = completion.behavior_logprobs, completion.loss_mask
        reward, unscorable, detail, breakdown = score_fields(completion.score)
        yield {
            "group_id": group.id,
            "completion_id": completion.id,
            "task": prompt.task,
            "prompt_id": prompt.id,
            "prompt_token_ids": prompt.token_ids.tolist(),
            "prompt_columns": canonical(dict(prompt.columns)),
            "token_ids": completion.token_ids.tolist(),
            "behavior_logprobs": None if logprobs is UNKNOWN else logprobs.tolist(),
            "versions": [asdict(span) for span in completion.versions],
            "loss_mask": None if mask.all() else mask.tolist(),
            "finish": completion.finish.value,
            "source": completion.source,
            "reward": reward,
            "unscorable": unscorable,
            "detail": detail,
            "breakdown": breakdown,
            "prompt": prompt.text or None,
            "completion": completion.text or None,
        }


def exported_group(rows: Sequence[Row]) -> Group:
    """Convert rows of `export_rows` back to their group."""
    first = rows[0]
    if missing := [name for name in EXPORTED if name not in first]:
        raise UnreadableCell(f"the exported row has no {', '.join(missing)}")
    columns = first["prompt_columns"]
    try:
        columns = json.loads(columns) if isinstance(columns, str) else columns
    except (ValueError, RecursionError) as error:
        raise UnreadableCell(f"prompt_columns is not JSON: {error!s:.120}") from error
    prompt = Prompt(
        id=read_name(first["prompt_id"], "prompt_id"),
        token_ids=read_tokens(first["prompt_token_ids"], "the prompt"),
        task=read_name(first["task"], "task"),
        columns=cast(dict[str, Json], columns),
    )
    return Group(read_name(first["group_id"], "group_id"), prompt, tuple(_completion(row) for row in rows))


def _completion(row: Row) -> Completion:
    try:
        spans = tuple(VersionSpan(**span) for span in cast(list[dict[str, Any]], row["versions"]))
        parts = row["breakdown"]
        score = score_from(
            cast(float | None, row["reward"]),
            cast(str | None, row["unscorable"]),
            cast(str | None, row["detail"]),
            parts if isinstance(parts, str | None) else json.dumps(parts),
        )
        mask = None if row["loss_mask"] is None else np.asarray(row["loss_mask"], np.bool_)
    except (TypeError, ValueError, KeyError) as error:
        raise UnreadableCell(
            f"completion {row.get('completion_id')!r:.80} does not look like an exported row: {error!s:.120}"
        ) from error
    return Completion(
        id=read_name(row["completion_id"], "completion_id"),
        token_ids=read_tokens(row["token_ids"], "a completion"),
        behavior_logprobs=read_logprobs(row["behavior_logprobs"]),
        versions=spans,
        loss_mask=mask,  # type: ignore[arg-type]
        finish=read_finish(row["finish"]),
        source=read_name(row["source"], "source"),
        score=score,
    )


def export(groups: Iterable[Group], file: Path) -> int:
    """Write groups to a new .jsonl or .parquet file and return their number. An existing file is never overwritten."""
    write = {".jsonl": _write_lines, ".parquet": _write_parquet}.get(file.suffix)
    if write is None:
        raise CannotImport(f"{file.name} is neither .jsonl nor .parquet; use one of these suffixes")
    if file.exists():
        raise CannotImport(f"{file} exists; choose another name")
    return write(groups, file)


def _write_lines(groups: Iterable[Group], file: Path) -> int:
    count = 0
    with file.open("x", encoding="utf-8") as lines:
        for group in groups:
            count += 1
            for row in export_rows(group):
                # As objects they need no second parse.
                row |= {name: json.loads(cast(str, row[name]) or "null") for name in ("prompt_columns", "breakdown")}
                lines.write(json.dumps(row) + "\n")
    return count


def _write_parquet(groups: Iterable[Group], file: Path) -> int:
    count = 0
    with pa.parquet.ParquetWriter(file, SCHEMA) as writer:
        left = iter(groups)
        while some := list(islice(left, GROUPS_AT_ONCE)):
            count += len(some)
            writer.write_table(pa.Table.from_pylist([row for group in some for row in export_rows(group)], SCHEMA))
    return count
