"""Convert rows of other tools to groups: collect the rows of each group, wherever they are in a file, and convert them.

Token ids are used unchanged; text needs an `Encoder`. Nothing is guessed: missing log-probs are unknown, a missing
reward is awaited, and rows that cannot be converted raise `UnreadableCell` with a sentence.
"""

import array
import hashlib
import json
import tempfile
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from offbeat.experience.importing.layout import ColumnLayout, RowShape, cell_kind
from offbeat.experience.importing.records import (
    BrokenRecord,
    Message,
    Records,
    Row,
    SourceRecord,
    Tokens,
    UnreadableCell,
    read_finish,
    read_id,
    read_json,
    read_logprobs,
    read_messages,
    read_name,
    read_score,
    read_text,
    read_tokens,
)
from offbeat.experience.importing.rows_out import exported_group
from offbeat.experience.schema import canonical
from offbeat.experience.validation import RefusalReason, RefusedError
from offbeat.types import UNKNOWN, Completion, Finish, Group, Prompt

BUCKETS: Final = 64
"""Files that scattered rows are sorted into. One of them is held in memory at a time."""

GroupRows = list[SourceRecord]
"""The rows of one group."""


@dataclass(frozen=True)
class Encoder:
    """Converts text to the token ids of the policy that will be trained.

    >>> encoder = Encoder(lambda text: list(text.encode()), end=0)
    >>> encoder.completion("42", Finish.STOP), encoder.completion("42", Finish.LENGTH)
    ([52, 50, 0], [52, 50])
    """

    encode: Callable[[str], list[int]]
    """Encodes a completion, without special tokens."""
    encode_prompt: Callable[[str], list[int]] | None = None
    """Encodes a prompt given as text. The default is `encode`."""
    encode_chat: Callable[[list[Message]], list[int]] | None = None
    """Encodes a prompt given as messages, up to where the assistant's answer starts."""
    end: int | None = None
    """The token that ends a completion. The policy learns from it to stop, and text rarely contains it."""
    stops: Collection[int] = ()
    """All tokens that end a completion; text that ends with one of them gets no other."""

    def completion(self, text: str, finish: Finish) -> list[int]:
        """Return the tokens of a completion, with the end token unless it was truncated or has one."""
        tokens = self.encode(text)
        if finish is not Finish.STOP or self.end is None or (tokens and tokens[-1] in self.stops):
            return tokens
        return [*tokens, self.end]


@dataclass(frozen=True)
class ImportDefaults:
    """Values for what the rows do not contain, and the encoder for their text."""

    task: str | None = None
    source: str | None = None
    encoder: Encoder | None = None


def group_from(rows: Sequence[Row], layout: ColumnLayout, defaults: ImportDefaults) -> Group:
    """Convert the rows of one group: a single row if completions are in lists, else one row for each completion.

    Ids that the rows have are kept. Otherwise a group's id is a hash of its task, prompt, completions, their sources
    and their own ids, so the same rows give the same id, and completions are numbered after their group or prompt.

    >>> from offbeat.experience.importing.layout import detect
    >>> rows = [{"prompt": [3, 14, 4], "responses": [[4, 2], [4, 1]], "rewards": [1.0, None]}]
    >>> group = group_from(rows, detect(rows), ImportDefaults("arithmetic", "human"))
    >>> group.id, [completion.score for completion in group.completions]
    ('import-1462464687183de42c2d', [Score(reward=1.0, breakdown={}), None])
    """
    if layout.shape is RowShape.EXPORT:
        return exported_group(rows)
    prompt_cell, parts = _split(rows, layout)
    prompt = _prompt(rows[0], prompt_cell, layout, defaults)
    unnamed = [_completion(part, defaults) for part in parts]
    own_ids = [completion.id for completion in unnamed if completion.id]
    names = [prompt.task, *(completion.source for completion in unnamed), *own_ids]
    group_id = "+".join(read_id(rows[0].get(name), "group id") for name in layout.group_id)
    stem = group_id or (prompt.id if "prompt_id" in layout.columns else "")
    if not group_id:
        group_id = f"import-{content_hash(names, prompt.token_ids, *(completion.token_ids for completion in unnamed))}"
    completions = (replace(c, id=c.id or f"{stem or group_id}/{i}") for i, c in enumerate(unnamed))
    return Group(group_id, prompt, tuple(completions))


def content_hash(content: object, *tokens: Tokens) -> str:
    """Return a hash of JSON and lists of token ids that is the same on every machine."""
    hasher = hashlib.sha256(canonical([content, [len(part) for part in tokens]]).encode())
    for part in tokens:
        hasher.update(part.astype("<i4").data)
    return hasher.hexdigest()[:20]


def _prompt(row: Row, cell: object, layout: ColumnLayout, defaults: ImportDefaults) -> Prompt:
    tokens = _prompt_tokens(cell, defaults.encoder)
    task, name = layout.columns.get("task"), layout.columns.get("prompt_id")
    return Prompt(
        id=read_id(row.get(name), "prompt id") if name else f"prompt-{content_hash(None, tokens)}",
        token_ids=tokens,
        task=read_name(row.get(task) if task else defaults.task, "task"),
        columns={name: read_json(row.get(name)) for name in layout.kept},
    )


def _split(rows: Sequence[Row], layout: ColumnLayout) -> tuple[object, list[Row]]:
    """Return the cell of the prompt, and for each completion the cells by role."""
    columns = {role: column for role, column in layout.columns.items() if role not in ("prompt", "prompt_id", "task")}
    if layout.shape is RowShape.LISTS:
        return rows[0].get(layout.columns["prompt"]), _split_lists(rows[0], columns)
    parts: list[Row] = [{role: row.get(column) for role, column in columns.items()} for row in rows]
    prompts: list[object]
    if layout.shape is RowShape.ROWS:
        prompts = [row.get(layout.columns["prompt"]) for row in rows]
    else:
        prompts = []
        for part in parts:
            *before, last = read_messages(part["conversation"], "the conversation")
            prompts.append(before)
            part["response"] = [last]
    if any(prompt != prompts[0] for prompt in prompts):
        raise UnreadableCell(
            f"{len(rows)} rows of one group differ in their prompts; group by more columns, for example group=id+prompt"
        )
    return prompts[0], parts


def _split_lists(row: Row, columns: Mapping[str, str]) -> list[Row]:
    """Split a row with lists into one part for each completion. A cell that is not a list holds for all of them."""
    responses = row.get(columns["response"])
    if not isinstance(responses, list):
        raise UnreadableCell(f"{columns['response']} is {responses!r:.80}; expected a list of completions")
    parts: list[Row] = [{} for _ in responses]
    for role, column in columns.items():
        values = row.get(column)
        if not isinstance(values, list):
            if role == "reward" and values is not None:
                raise UnreadableCell(f"{column} is {values!r:.80}; expected a list with one reward for each completion")
            values = [values] * len(responses)
        if len(values) != len(responses):
            raise UnreadableCell(
                f"{len(responses)} completions in {columns['response']}, but {len(values)} in {column}"
            )
        for part, value in zip(parts, values, strict=True):
            part[role] = value
    return parts


def _completion(part: Row, defaults: ImportDefaults) -> Completion:
    """Convert the cells of one completion. Without an id of its own, its id stays empty until the group has one."""
    finish, logprobs = read_finish(part.get("finish")), read_logprobs(part.get("logprobs"))
    source = read_name(part.get("source", defaults.source), "source")
    response = part.get("response")
    if cell_kind(response) not in ("token ids", "nothing"):
        text, encoder = read_text(_response_text(response)), _require(defaults.encoder)
        response = encoder.completion(text, finish)
        if logprobs is not UNKNOWN and len(response) == len(logprobs) + 1:
            response = encoder.encode(text)  # the recorded log-probs do not include the end token
    tokens, score = read_tokens(response, "a completion"), read_score(part.get("reward"))
    own_id = read_id(part["completion_id"], "completion id") if "completion_id" in part else ""
    return Completion(own_id, tokens, logprobs, finish=finish, source=source, score=score)


def _response_text(response: object) -> str:
    if isinstance(response, str):
        return response
    if cell_kind(response) != "messages":
        raise UnreadableCell(f"a completion is {response!r:.80}; expected text, messages or token ids")
    messages = read_messages(response, "a completion")
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        roles = ", ".join(message["role"] for message in messages)
        raise UnreadableCell(f"a completion has messages with roles {roles:.80}; expected one assistant message")
    return messages[0]["content"]


def _prompt_tokens(prompt: object, encoder: Encoder | None) -> Tokens:
    kind = cell_kind(prompt)
    if kind == "text":
        with_text = _require(encoder)
        return read_tokens((with_text.encode_prompt or with_text.encode)(read_text(str(prompt))), "the prompt")
    if kind == "messages":
        chat = _require(encoder).encode_chat
        if chat is None:
            raise UnreadableCell("the prompt is a list of messages, but the tokenizer has no chat template")
        return read_tokens(chat(read_messages(prompt, "the prompt")), "the prompt")
    return read_tokens(prompt, "the prompt")


def _require(encoder: Encoder | None) -> Encoder:
    if encoder is None:
        raise UnreadableCell("the cell is text, and there is no tokenizer to encode it")
    return encoder


def rows_by_group(records: Records, layout: ColumnLayout) -> Iterator[GroupRows | BrokenRecord]:
    """Yield the rows of each group. Contiguous groups are read in order; scattered rows are sorted on disk first."""
    if layout.shape is RowShape.LISTS:
        for record in records.read(layout.needed):
            yield record if isinstance(record, BrokenRecord) else [record]
    elif _is_contiguous(records, layout):
        yield from _contiguous(records.read(layout.needed), layout)
    else:
        yield from _scattered(records.read(layout.needed), layout)


def _is_contiguous(records: Records, layout: ColumnLayout) -> bool:
    """Return True if no group is interrupted by another. Takes 8 bytes of memory for each group."""
    starts, before = array.array("q"), None
    for record in records.read(layout.needed):
        if isinstance(record, SourceRecord) and (key := layout.key(record.row)) != before:
            before = key
            starts.append(hash(key))
    return len(set(starts)) == len(starts)


def _contiguous(
    records: Iterable[SourceRecord | BrokenRecord], layout: ColumnLayout
) -> Iterator[GroupRows | BrokenRecord]:
    key, group = "", list[SourceRecord]()
    for record in records:
        if isinstance(record, BrokenRecord):
            yield record
            continue
        if (next_key := layout.key(record.row)) != key:
            if group:
                yield group
            key, group = next_key, []
        group.append(record)
    if group:
        yield group


def _scattered(
    records: Iterable[SourceRecord | BrokenRecord], layout: ColumnLayout
) -> Iterator[GroupRows | BrokenRecord]:
    """Sort rows into files by their key, and yield the groups of one file at a time."""
    with tempfile.TemporaryDirectory(prefix="offbeat-import-") as place:
        paths = [Path(place, f"{number}.jsonl") for number in range(BUCKETS)]
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("w", encoding="utf-8")) for path in paths]
            for record in records:
                if isinstance(record, BrokenRecord):
                    yield record
                    continue
                key = layout.key(record.row)
                needed = {name: record.row.get(name) for name in layout.needed}
                line = json.dumps([key, record.where, needed], default=str)
                files[zlib.crc32(key.encode()) % BUCKETS].write(line + "\n")
        for path in paths:
            groups: dict[str, GroupRows] = {}
            with path.open(encoding="utf-8") as lines:
                for key, where, row in map(json.loads, lines):
                    groups.setdefault(key, []).append(SourceRecord(where, row))
            yield from groups.values()


def without_repeats(records: GroupRows, layout: ColumnLayout) -> list[Row]:
    """Return the rows of a group without those that repeat an earlier one. Only own ids show that a row is a repeat.

    An id with two different rows is refused: nothing says which of them is right.
    """
    column = layout.columns.get("completion_id")
    if column is None or layout.shape is RowShape.LISTS:
        return [record.row for record in records]
    first: dict[str, SourceRecord] = {}
    for record in records:
        name = read_id(record.row.get(column), "completion id")
        earlier = first.setdefault(name, record)
        if any(earlier.row.get(cell) != record.row.get(cell) for cell in layout.needed):
            detail = (
                f"completion {name!r:.80} is there twice and differs: {earlier.where}; {record.where}. Remove one, or "
                f"say what the column is, for example with prompt_id={column}"
            )
            raise RefusedError(RefusalReason.ID, detail)
    return [record.row for record in first.values()]
