"""What the door refused, kept with the reason and as much of it as JSON can hold."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from typing import Final, Literal

import numpy as np
import pyarrow as pa

from offbeat.experience.schema import QUARANTINE

MAX_PAYLOAD: Final = 4_194_304
"""Characters of a payload; a longer one is cut and says so. What is cut was refused, and usually for its size."""

Kind = Literal["group", "score"]


class RefusalReason(StrEnum):
    """Why something was refused: one word for counting, beside it a sentence for the person."""

    NOT_A_GROUP = "not-a-group"
    """Not a `Group` of a `Prompt` and `Completion`s at all."""
    ID = "id"
    """A missing or unusable id of group, prompt or completion, or one completion id twice in a group."""
    TASK = "task"
    """The task has no usable name."""
    PROMPT_TOKENS = "prompt-tokens"
    """No prompt tokens, or not a flat list of them."""
    PROMPT_COLUMNS = "prompt-columns"
    """The prompt's columns are not plain JSON."""
    NO_COMPLETIONS = "no-completions"
    """A group without completions."""
    TOKENS = "tokens"
    """An empty completion, or token ids that are not a flat list."""
    VOCABULARY = "vocabulary"
    """A token id below 0 or beyond the vocabulary."""
    LOGPROBS_LENGTH = "logprobs-length"
    """Not one behavior log-prob for each token."""
    LOGPROBS = "logprobs"
    """A behavior log-prob that is not finite, or above 0."""
    LOSS_MASK = "loss-mask"
    """Not one entry for each token."""
    VERSIONS = "versions"
    """Version spans that do not cover the completion once, in order; or a rollout that names no version."""
    FINISH = "finish"
    """Not one of the ways a completion can end."""
    SOURCE = "source"
    """The source has no usable name."""
    SCORE = "score"
    """Neither a score, nor unscorable for a known reason, nor awaited."""
    REWARD = "reward"
    """A reward, or a part of it, that is not a finite number."""
    REWARD_RANGE = "reward-range"
    """A reward outside the range of its task."""
    SIZE = "size"
    """More completions, tokens or text than a group may hold."""
    CONFLICT = "conflict"
    """The log holds a group of this id with other content."""
    UNKNOWN_GROUP = "unknown-group"
    """Late feedback for a group that is not in the log."""
    UNKNOWN_COMPLETION = "unknown-completion"
    """Late feedback for a completion its group does not have."""
    UNREADABLE = "unreadable"
    """An importer could not make a group of it."""


@dataclass(frozen=True)
class Refusal:
    """Why, and the sentence that tells the person what was found.

    >>> Refusal(RefusalReason.REWARD, "completion g7/1 has reward nan; a reward is a finite number").reason
    <RefusalReason.REWARD: 'reward'>
    """

    reason: RefusalReason
    detail: str


class RefusedError(Exception):
    """How a rule of the door says no. It does not leave the door."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(detail)
        self.refusal = Refusal(reason, detail)


@dataclass(frozen=True)
class QuarantineEntry:
    """One thing that was refused.

    >>> QuarantineEntry("g7", Refusal(RefusalReason.ID, "the prompt's id is ''"), payload='{"id":"g7"}').kind
    'group'
    """

    group_id: str
    """Empty where it had no usable id."""
    refusal: Refusal
    payload: str
    kind: Kind = "group"


def refused(thing: object, refusal: Refusal, *, kind: Kind = "group") -> QuarantineEntry:
    """Take down what was refused. Never fails, whatever it is.

    >>> refused({"id": "g7", "reward": float("nan")}, Refusal(RefusalReason.NOT_A_GROUP, "found a dict")).payload
    '{"id": "g7", "reward": "nan"}'
    """
    name = getattr(thing, "group_id" if kind == "score" else "id", None)
    try:
        payload = json.dumps(_plain(thing, depth=0))
    except (ValueError, TypeError, RecursionError) as error:
        payload = json.dumps(f"not expressible as JSON: {error}")
    if len(payload) > MAX_PAYLOAD:
        payload = json.dumps({"cut": True, "characters": len(payload), "begins": payload[: MAX_PAYLOAD // 2]})
    return QuarantineEntry(_storable(name) if isinstance(name, str) else "", refusal, payload, kind)


def _storable(text: str) -> str:
    return text[:65_536].encode(errors="backslashreplace").decode()


def _plain(value: object, depth: int) -> object:
    """Anything as plain JSON; what JSON has no word for becomes its repr."""
    if depth > 32:
        return "…"
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if np.isfinite(value) else str(value)
        case np.ndarray():
            return _plain(value.tolist(), depth)
        case np.generic():
            return _plain(value.item(), depth)
        case dict():
            return {str(key): _plain(part, depth + 1) for key, part in value.items()}
        case list() | tuple():
            return [_plain(part, depth + 1) for part in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name), depth + 1) for f in fields(value)}
    return f"{value!r:.200}"


def quarantine_rows(entries: Sequence[QuarantineEntry], *, at: float, writer: str) -> pa.Table:
    """Refusals as rows of `quarantine`."""
    columns = {
        "group_id": [entry.group_id for entry in entries],
        "kind": [entry.kind for entry in entries],
        "reason": [str(entry.refusal.reason) for entry in entries],
        "detail": [_storable(entry.refusal.detail) for entry in entries],
        "payload": [entry.payload for entry in entries],
        "writer": [writer] * len(entries),
        "at": [at] * len(entries),
    }
    return pa.table(columns, schema=QUARANTINE)
