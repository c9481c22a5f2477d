"""Rows of somebody else become groups.

Token ids are taken as they are; text needs an `Encoder`. Nothing is guessed: log-probs that are not given are unknown,
a reward that is not given is awaited, and rows that no group can be made of are `UnreadableCell`, with a sentence.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offbeat.experience.importing.layout import ColumnLayout, RowShape, kind
from offbeat.experience.importing.records import Row
from offbeat.experience.importing.rows_out import exported_group
from offbeat.experience.importing.values import (
    Message,
    Tokens,
    UnreadableCell,
    read_finish,
    read_json,
    read_logprobs,
    read_messages,
    read_name,
    read_score,
    read_text,
    read_tokens,
)
from offbeat.experience.schema import canonical
from offbeat.types import UNKNOWN, Completion, Finish, Group, Prompt, Unknown


@dataclass(frozen=True)
class Encoder:
    """Turns text into the token ids of the policy that will be trained.

    >>> encoder = Encoder(lambda text: list(text.encode()), end=0)
    >>> encoder.completion("42", Finish.STOP), encoder.completion("42", Finish.LENGTH)
    ([52, 50, 0], [52, 50])
    """

    encode: Callable[[str], list[int]]
    """Of a completion, without special tokens."""
    encode_prompt: Callable[[str], list[int]] | None = None
    """Of a prompt given as text; `encode` unless given."""
    encode_chat: Callable[[list[Message]], list[int]] | None = None
    """Of a prompt given as messages, up to where the assistant begins to speak."""
    end: int | None = None
    """The token that ends a completion. A policy learns to stop from it, and text does not show it."""

    def completion(self, text: str, finish: Finish) -> list[int]:
        """Tokens of a completion, with its end if it came to one."""
        return self.encode(text) + ([self.end] if self.end is not None and finish is Finish.STOP else [])


@dataclass(frozen=True)
class About:
    """What the rows do not say themselves.

    >>> About(task="arithmetic", source="human").source
    'human'
    """

    task: str | None = None
    source: str | None = None
    encoder: Encoder | None = None


def group_from(rows: Sequence[Row], layout: ColumnLayout, about: About) -> Group:
    """The group these rows hold: one row where completions lie in lists, else one row per completion.

    The id is made of task, prompt, completions and their sources, so the same rows give the same id.

    >>> from offbeat.experience.importing.layout import detect
    >>> rows = [{"prompt": [3, 14, 4], "responses": [[4, 2], [4, 1]], "rewards": [1.0, None]}]
    >>> group = group_from(rows, detect(rows), About("arithmetic", "human"))
    >>> group.id, [completion.score for completion in group.completions]
    ('import-1462464687183de42c2d', [Score(reward=1.0, breakdown={}), None])
    """
    if layout.shape is RowShape.EXPORT:
        return exported_group(rows)
    spoken, parts = _parts(rows, layout)
    prompt = _prompt(rows[0], spoken, layout, about)
    answers = [_answer(part, about) for part in parts]
    named = [prompt.task, *(answer.source for answer in answers)]
    group_id = f"import-{content_hash(named, prompt.token_ids, *(answer.tokens for answer in answers))}"
    completions = [
        Completion(
            id=f"{group_id}/{i}",
            token_ids=answer.tokens,
            behavior_logprobs=answer.logprobs,
            finish=answer.finish,
            source=answer.source,
            score=read_score(part.get("reward")),
        )
        for i, (part, answer) in enumerate(zip(parts, answers, strict=True))
    ]
    return Group(group_id, prompt, tuple(completions))


def content_hash(content: object, *tokens: Tokens) -> str:
    """A name for JSON and lists of token ids: the same wherever it is made.

    >>> content_hash(["arithmetic"], read_tokens([4, 2], "a completion"))
    '21caf338a403db57fb7f'
    """
    hasher = hashlib.sha256(canonical([content, [len(part) for part in tokens]]).encode())
    for part in tokens:
        hasher.update(part.astype("<i4").data)
    return hasher.hexdigest()[:20]


def _prompt(row: Row, spoken: object, layout: ColumnLayout, about: About) -> Prompt:
    tokens = _prompt_tokens(spoken, about.encoder)
    task, name = layout.columns.get("task"), layout.columns.get("prompt_id")
    return Prompt(
        id=str(row.get(name)) if name else f"prompt-{content_hash(None, tokens)}",
        token_ids=tokens,
        task=read_name(row.get(task) if task else about.task, "task"),
        columns={name: read_json(row.get(name)) for name in layout.kept},
    )


def _parts(rows: Sequence[Row], layout: ColumnLayout) -> tuple[object, list[Row]]:
    """The prompt as it is given, and for each completion the values of its roles."""
    columns = {role: column for role, column in layout.columns.items() if role not in ("prompt", "prompt_id", "task")}
    if layout.shape is RowShape.LISTS:
        return rows[0].get(layout.columns["prompt"]), _spread(rows[0], columns)
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
            f"{len(rows)} rows belong to one group but differ in their prompts; group by something finer"
        )
    return prompts[0], parts


def _spread(row: Row, columns: Mapping[str, str]) -> list[Row]:
    """One row with lists as one part per completion; what is no list holds for all of them."""
    responses = row.get(columns["response"])
    if not isinstance(responses, list):
        raise UnreadableCell(f"{columns['response']} is {responses!r:.80}; a list of completions was meant")
    parts: list[Row] = [{} for _ in responses]
    for role, column in columns.items():
        values = row.get(column)
        if not isinstance(values, list):
            if role == "reward" and values is not None:
                raise UnreadableCell(f"{column} is {values!r:.80}; a list with one for each completion was meant")
            values = [values] * len(responses)
        if len(values) != len(responses):
            raise UnreadableCell(
                f"{len(responses)} completions in {columns['response']}, but {len(values)} in {column}"
            )
        for part, value in zip(parts, values, strict=True):
            part[role] = value
    return parts


@dataclass(frozen=True, eq=False)
class _Answer:
    tokens: Tokens
    logprobs: NDArray[np.float32] | Unknown
    finish: Finish
    source: str


def _answer(part: Row, about: About) -> _Answer:
    finish, logprobs = read_finish(part.get("finish")), read_logprobs(part.get("logprobs"))
    source = read_name(part.get("source", about.source), "source")
    response = part.get("response")
    if kind(response) in ("token ids", "nothing"):
        return _Answer(read_tokens(response, "a completion"), logprobs, finish, source)
    text, encoder = read_text(_said(response)), _needed(about.encoder)
    tokens = encoder.completion(text, finish)
    if logprobs is not UNKNOWN and len(tokens) == len(logprobs) + 1:
        tokens = encoder.encode(text)  # whoever recorded the log-probs left the end out
    return _Answer(read_tokens(tokens, "a completion"), logprobs, finish, source)


def _said(response: object) -> str:
    """What the assistant said."""
    if isinstance(response, str):
        return response
    if kind(response) != "messages":
        raise UnreadableCell(f"a completion is {response!r:.80}; text, messages or token ids were meant")
    messages = read_messages(response, "a completion")
    if len(messages) != 1 or messages[0]["role"] != "assistant":
        speakers = ", ".join(message["role"] for message in messages)
        raise UnreadableCell(f"a completion has messages of {speakers:.80}; one of the assistant was meant")
    return messages[0]["content"]


def _prompt_tokens(prompt: object, encoder: Encoder | None) -> Tokens:
    given = kind(prompt)
    if given == "text":
        with_text = _needed(encoder)
        return read_tokens((with_text.encode_prompt or with_text.encode)(read_text(str(prompt))), "the prompt")
    if given == "messages":
        chat = _needed(encoder).encode_chat
        if chat is None:
            raise UnreadableCell("the prompt is a list of messages, and the tokenizer has no chat template")
        return read_tokens(chat(read_messages(prompt, "the prompt")), "the prompt")
    return read_tokens(prompt, "the prompt")


def _needed(encoder: Encoder | None) -> Encoder:
    if encoder is None:
        raise UnreadableCell("it is text, and there is no tokenizer to turn it into token ids")
    return encoder
