"""Quarantine: what validation refused, stored with the reason and as JSON."""

import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Final, Literal

import numpy as np
import pyarrow as pa

from offbeat.experience.schema import QUARANTINE

MAX_PAYLOAD: Final = 4_194_304
"""Characters of a payload. A longer payload is cut and marked as cut."""

MAX_EXAMPLES: Final = 3
"""Examples kept for each reason."""

Kind = Literal["group", "score"]


class RefusalReason(StrEnum):
    """Why something was refused, as one word to count by."""

    NOT_A_GROUP = "not-a-group"
    """Not a `Group` made of a `Prompt` and `Completion`s."""
    ID = "id"
    """A missing or invalid id of a group, prompt or completion, or the same completion id twice in a group."""
    TASK = "task"
    """A missing or invalid task name."""
    PROMPT_TOKENS = "prompt-tokens"
    """A prompt without tokens, or token ids that are not a flat list."""
    PROMPT_COLUMNS = "prompt-columns"
    """Prompt columns that are not plain JSON."""
    NO_COMPLETIONS = "no-completions"
    """A group without completions."""
    TOKENS = "tokens"
    """An empty completion, or token ids that are not a flat list."""
    VOCABULARY = "vocabulary"
    """A token id below 0 or outside the vocabulary."""
    LOGPROBS_LENGTH = "logprobs-length"
    """A number of behavior log-probs that differs from the number of tokens."""
    LOGPROBS = "logprobs"
    """A behavior log-prob that is not finite or is above 0."""
    LOSS_MASK = "loss-mask"
    """A loss mask whose length differs from the number of tokens."""
    VERSIONS = "versions"
    """Version spans that do not cover the completion exactly once and in order, or a rollout without spans."""
    FINISH = "finish"
    """Not a `Finish`."""
    SOURCE = "source"
    """A missing or invalid source name."""
    SCORE = "score"
    """Not a `Score`, not an `Unscorable` with a known reason, and not None."""
    REWARD = "reward"
    """A reward, or a part of its breakdown, that is not a finite number."""
    REWARD_RANGE = "reward-range"
    """A reward outside the range of its task."""
    SIZE = "size"
    """More completions, tokens or text than the rules allow."""
    CONFLICT = "conflict"
    """The log has a group with this id and different content, or this completion with another score."""
    UNKNOWN_GROUP = "unknown-group"
    """Late feedback for a group that is not in the log."""
    UNKNOWN_COMPLETION = "unknown-completion"
    """Late feedback for a completion that its group does not have."""
    AMBIGUOUS = "ambiguous"
    """Late feedback by an id that several completions have."""
    UNREADABLE = "unreadable"
    """Imported rows that cannot be converted to a group, or feedback that cannot be converted to a score."""


@dataclass(frozen=True)
class Refusal:
    """The reason, and a sentence with the value found."""

    reason: RefusalReason
    detail: str


OnRefusal = Callable[[str, Refusal], None]
"""Called with the position of what was refused, for example "rows.jsonl, line 7", and why."""


@dataclass(kw_only=True)
class RefusalTally:
    """Counts refusals by reason, and keeps the first few of each as examples."""

    refused: Counter[RefusalReason] = field(default_factory=Counter)
    examples: dict[RefusalReason, list[str]] = field(default_factory=dict)
    on_refusal: OnRefusal = field(default=lambda _, __: None, repr=False, compare=False)

    def refuse(self, where: str, refusal: Refusal) -> None:
        """Count a refusal."""
        self.refused[refusal.reason] += 1
        examples = self.examples.setdefault(refusal.reason, [])
        if len(examples) < MAX_EXAMPLES:
            examples.append(f"{where}: {refusal.detail}")
        self.on_refusal(where, refusal)

    def refusals(self) -> list[str]:
        """Return lines with the count of each reason and its examples, the most frequent first."""
        lines = []
        for reason, count in self.refused.most_common():
            lines += [f"  {reason}: {count}", *(f"    {example}" for example in self.examples[reason])]
        return lines


class RefusedError(Exception):
    """Raised by a validation rule and caught inside validation."""

    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(detail)
        self.refusal = Refusal(reason, detail)


@dataclass(frozen=True)
class QuarantineEntry:
    """One refused group or late score, with its content as JSON."""

    group_id: str
    """Empty if there was no usable id."""
    refusal: Refusal
    payload: str
    kind: Kind = "group"


def refused(thing: object, refusal: Refusal, *, kind: Kind = "group") -> QuarantineEntry:
    """Return the quarantine entry for anything that was refused. Never raises.

    >>> refused({"id": "g7", "reward": float("nan")}, Refusal(RefusalReason.NOT_A_GROUP, "found a dict")).payload
    '{"id": "g7", "reward": "nan"}'
    """
    name = getattr(thing, "group_id" if kind == "score" else "id", None)
    try:
        payload = json.dumps(_plain(thing, depth=0))
    except (ValueError, TypeError, RecursionError) as error:
        payload = json.dumps(f"cannot be written as JSON: {error}")
    if len(payload) > MAX_PAYLOAD:
        payload = json.dumps({"cut": True, "characters": len(payload), "begins": payload[: MAX_PAYLOAD // 2]})
    return QuarantineEntry(_storable(name) if isinstance(name, str) else "", refusal, payload, kind)


def _storable(text: str) -> str:
    return text[:65_536].encode(errors="backslashreplace").decode()


def _plain(value: object, depth: int) -> object:
    """Convert anything to plain JSON. What JSON cannot express becomes its repr."""
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
    """Convert entries to rows of `quarantine`."""
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
