"""Validation: every group and late score is checked here once before it is stored, and what is refused is quarantined.

Each rule has a `RefusalReason`, and each refusal a sentence with the value found. Validation never raises for what it
checks and never changes it: a refused group goes to quarantine as JSON, and the other groups of its batch are stored.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import StrEnum
from typing import Final, Literal, get_args

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from offbeat.experience.feedback import LateScore
from offbeat.experience.schema import QUARANTINE
from offbeat.types import (
    LOGPROB_RULE,
    REWARD_RULE,
    UNKNOWN,
    Completion,
    Finish,
    Group,
    Prompt,
    Score,
    Unscorable,
    VersionSpan,
    invalid_logprobs,
    is_reward,
    outside_vocabulary,
)

UNSCORABLE_REASONS: Final = get_args(Unscorable.__annotations__["reason"])
INT32_MAX: Final = 2**31 - 1
MAX_PAYLOAD: Final = 4_194_304
"""Characters of a payload in quarantine. A longer payload is cut and marked as cut."""
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
    """A behavior log-prob that is not finite, above 0 or below -10,000."""
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
    """A reward, or a part of its breakdown, that is not a finite number of at most 1e9 in magnitude."""
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
class ValidationRules:
    """The rules of one run. The default rules check only what holds for every run."""

    vocab_size: int | None = None
    """Token ids must be in [0, vocab_size); None leaves the upper end open."""
    reward_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Lowest and highest reward of each task; a task without an entry has no limits."""
    max_completions: int = 1024
    max_tokens: int = 131_072
    """Limit for each completion and for the prompt."""
    max_text: int = 1_048_576
    """Characters of one text: an id, a detail, the prompt's columns as JSON."""


def validate_group(group: object, rules: ValidationRules) -> Refusal | None:
    """Return why a group is refused, or None if it is valid.

    >>> prompt = Prompt(id="p", token_ids=[1], task="arithmetic")
    >>> answer = Completion("g/0", [4, 2], [-0.1, 0.3], (VersionSpan(3, 0, 2),), score=Score(1.0))
    >>> validate_group(Group("g", prompt, (answer,)), ValidationRules()).detail.partition(";")[0]
    'completion g/0 has behavior log-prob 0.3 at token 1'
    """
    try:
        _check_group(group, rules)
    except RefusedError as refused:
        return refused.refusal
    return None


def validate_late_score(
    late: object, known: tuple[str, Sequence[str]] | None, rules: ValidationRules
) -> Refusal | None:
    """Return why late feedback is refused, or None if it is valid; `known` is its group's task and completion ids.

    >>> rules = ValidationRules(reward_ranges={"arithmetic": (0.0, 1.0)})
    >>> validate_late_score(LateScore("g", "g/0", Score(7.0)), ("arithmetic", ["g/0"]), rules).detail
    'completion g/0 has reward 7.0; rewards of task arithmetic are in [0.0, 1.0]'
    """
    try:
        _check_late_score(late, known, rules)
    except RefusedError as refused:
        return refused.refusal
    return None


def group_named_by(late: object) -> str:
    """Return the group id of late feedback, or an empty text if it has none."""
    name: object = late.group_id if isinstance(late, LateScore) else ""
    return name if isinstance(name, str) else ""


def _check_late_score(late: object, known: tuple[str, Sequence[str]] | None, rules: ValidationRules) -> None:
    if not isinstance(late, LateScore):
        raise RefusedError(RefusalReason.SCORE, f"found a {type(late).__name__}, expected a LateScore")
    _check_text(late.group_id, "the group's id", RefusalReason.ID, rules)
    if known is None:
        raise RefusedError(
            RefusalReason.UNKNOWN_GROUP, f"there is no group {late.group_id!r:.80} in this log; append the group first"
        )
    task, completion_ids = known
    if late.completion_id not in completion_ids:
        has = f"group {late.group_id} has no completion {late.completion_id!r:.80}; it has {completion_ids!s:.200}"
        raise RefusedError(RefusalReason.UNKNOWN_COMPLETION, has)
    if late.scorer != "":
        _check_text(late.scorer, f"the scorer of completion {late.completion_id}", RefusalReason.SOURCE, rules)
    if late.score is None:
        raise RefusedError(RefusalReason.SCORE, f"the late score of completion {late.completion_id} is None")
    _check_score(late.score, task, rules, f"completion {late.completion_id}")


def _check_group(group: object, rules: ValidationRules) -> None:
    if not isinstance(group, Group):
        raise RefusedError(RefusalReason.NOT_A_GROUP, f"found a {type(group).__name__}, expected a Group")
    _check_text(group.id, "the group's id", RefusalReason.ID, rules)
    _check_prompt(group.prompt, rules)
    if not group.completions:
        raise RefusedError(RefusalReason.NO_COMPLETIONS, f"group {group.id} has no completions")
    if len(group.completions) > rules.max_completions:
        raise RefusedError(
            RefusalReason.SIZE,
            f"group {group.id} has {len(group.completions)} completions; the limit is {rules.max_completions}",
        )
    for completion in group.completions:
        if not isinstance(completion, Completion):
            raise RefusedError(RefusalReason.NOT_A_GROUP, f"found a {type(completion).__name__} among the completions")
    streams_valid = _are_streams_valid(group.completions, rules)
    seen: set[str] = set()
    for completion in group.completions:
        _check_text(completion.id, "a completion's id", RefusalReason.ID, rules)
        if completion.id in seen:
            raise RefusedError(RefusalReason.ID, f"completion id {completion.id} occurs twice in group {group.id}")
        seen.add(completion.id)
        if not streams_valid:
            _check_streams(completion, rules)
        _check_completion(completion, group.prompt.task, rules)
    if len({span.run for completion in group.completions for span in completion.versions}) > 1:
        raise RefusedError(
            RefusalReason.VERSIONS, f"group {group.id} has versions of several runs; one run writes a group"
        )


def _check_prompt(prompt: object, rules: ValidationRules) -> None:
    if not isinstance(prompt, Prompt):
        raise RefusedError(RefusalReason.NOT_A_GROUP, f"found a {type(prompt).__name__} as the prompt")
    _check_text(prompt.id, "the prompt's id", RefusalReason.ID, rules)
    _check_text(prompt.task, "the task's name", RefusalReason.TASK, rules)
    _check_tokens(prompt.token_ids, f"prompt {prompt.id}", RefusalReason.PROMPT_TOKENS, rules)
    _check_columns(prompt, rules)


def _are_streams_valid(completions: Sequence[Completion], rules: ValidationRules) -> bool:
    """Check all per-token values in a few passes over the group; `_check_streams` then finds what is wrong."""
    for c in completions:
        shape = c.token_ids.shape
        if len(shape) != 1 or not 0 < shape[0] <= rules.max_tokens or c.loss_mask.shape != shape:
            return False
        if c.behavior_logprobs is not UNKNOWN and c.behavior_logprobs.shape != shape:
            return False
    if len(outside_vocabulary(np.concatenate([c.token_ids for c in completions]), rules.vocab_size)):
        return False
    known = [c.behavior_logprobs for c in completions if c.behavior_logprobs is not UNKNOWN]
    return not known or not invalid_logprobs(np.concatenate(known)).any()


def _check_streams(completion: Completion, rules: ValidationRules) -> None:
    what = f"completion {completion.id}"
    _check_tokens(completion.token_ids, what, RefusalReason.TOKENS, rules)
    length = len(completion.token_ids)
    _check_logprobs(completion.behavior_logprobs, length, what)
    if completion.loss_mask.shape != (length,):
        raise RefusedError(
            RefusalReason.LOSS_MASK, f"{what} has {length} tokens and a loss mask of shape {completion.loss_mask.shape}"
        )


def _check_completion(completion: Completion, task: str, rules: ValidationRules) -> None:
    what = f"completion {completion.id}"
    _check_text(completion.source, f"the source of {what}", RefusalReason.SOURCE, rules)
    _check_versions(completion, len(completion.token_ids), what)
    if not isinstance(completion.finish, Finish):
        raise RefusedError(
            RefusalReason.FINISH, f"{what} has finish {completion.finish!r:.80}; expected one of {', '.join(Finish)}"
        )
    _check_score(completion.score, task, rules, what)


def _check_text(text: object, what: str, reason: RefusalReason, rules: ValidationRules) -> None:
    """Check a name that people and every reader of the log can use: not blank, valid Unicode, not too long."""
    if type(text) is str and text.isascii() and len(text) <= rules.max_text and not text.isspace() and text:
        return
    if not isinstance(text, str) or not text.strip():
        raise RefusedError(reason, f"{what} is {text!r:.80}; expected text that is not blank")
    _check_storable(text, what, reason, rules)


def _check_storable(text: str, what: str, reason: RefusalReason, rules: ValidationRules) -> None:
    if len(text) > rules.max_text:
        raise RefusedError(RefusalReason.SIZE, f"{what} has {len(text)} characters; the limit is {rules.max_text}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RefusedError(reason, f"{what} is {text!a:.80}, which is not valid Unicode") from error


def _check_tokens(tokens: NDArray[np.int32], what: str, reason: RefusalReason, rules: ValidationRules) -> None:
    if tokens.ndim != 1 or not len(tokens):
        raise RefusedError(
            reason, f"{what} has token ids of shape {tokens.shape}; expected a flat list with at least one id"
        )
    if len(tokens) > rules.max_tokens:
        raise RefusedError(RefusalReason.SIZE, f"{what} has {len(tokens)} tokens; the limit is {rules.max_tokens}")
    outside = outside_vocabulary(tokens, rules.vocab_size)
    if len(outside):
        limit = (
            "ids start at 0" if outside[0] < 0 else f"the vocabulary size is {rules.vocab_size}: is it another model's?"
        )
        raise RefusedError(RefusalReason.VOCABULARY, f"{what} has token id {outside[0]}; {limit}")


def _check_logprobs(logprobs: object, length: int, what: str) -> None:
    if logprobs is UNKNOWN:
        return
    assert isinstance(logprobs, np.ndarray)  # Completion converts it
    if logprobs.shape != (length,):
        raise RefusedError(
            RefusalReason.LOGPROBS_LENGTH,
            f"{what} has {length} tokens and behavior log-probs of shape {logprobs.shape}",
        )
    invalid = invalid_logprobs(logprobs)
    if invalid.any():
        at = int(np.argmax(invalid))
        raise RefusedError(
            RefusalReason.LOGPROBS,
            f"{what} has behavior log-prob {logprobs[at]:.6g} at token {at}; {LOGPROB_RULE}",
        )


def _check_versions(completion: Completion, length: int, what: str) -> None:
    spans = completion.versions
    if not spans:
        if completion.source == "policy":
            raise RefusedError(
                RefusalReason.VERSIONS,
                f"{what} has source 'policy' but no version spans; add its spans, or set another source",
            )
        return
    reached = 0
    for span in spans:
        if not _is_integer_span(span):
            raise RefusedError(
                RefusalReason.VERSIONS,
                f"{what} has version span {span!r:.80}; expected a VersionSpan of integers and the id of a run",
            )
        if not 0 <= span.version <= INT32_MAX:
            raise RefusedError(
                RefusalReason.VERSIONS, f"{what} has version {span.version}; versions are 0 to {INT32_MAX}"
            )
        if span.start != reached or span.end <= span.start:
            raise RefusedError(
                RefusalReason.VERSIONS,
                f"{what} has version span [{span.start}, {span.end}); expected a span that starts at token {reached}",
            )
        reached = span.end
    if reached != length:
        raise RefusedError(
            RefusalReason.VERSIONS, f"{what} has {length} tokens, but its version spans end at {reached}"
        )


def _is_integer_span(span: object) -> bool:
    if not isinstance(span, VersionSpan):
        return False
    run: object = span.run
    if run is not None and type(run) is not str:
        return False
    numbers: tuple[object, ...] = (span.version, span.start, span.end)
    if all(type(n) is int for n in numbers):
        return True
    return all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in numbers)


def _check_score(score: object, task: str, rules: ValidationRules, what: str) -> None:
    if score is None:
        return
    if isinstance(score, Unscorable):
        _check_unscorable(score, rules, what)
        return
    if not isinstance(score, Score):
        raise RefusedError(
            RefusalReason.SCORE, f"{what} has score {score!r:.80}; expected a Score, an Unscorable or None"
        )
    _check_number(score.reward, f"{what} has reward")
    if type(score.breakdown) is not dict and not isinstance(score.breakdown, Mapping):
        raise RefusedError(
            RefusalReason.REWARD,
            f"{what} has breakdown {score.breakdown!r:.80}; expected a mapping of names to numbers",
        )
    for name, part in score.breakdown.items():
        _check_text(name, f"a name in the breakdown of {what}", RefusalReason.REWARD, rules)
        _check_number(part, f"{what} has in its breakdown {name!a:.80} =")
    low, high = rules.reward_ranges.get(task, (-np.inf, np.inf))
    if not low <= score.reward <= high:
        raise RefusedError(
            RefusalReason.REWARD_RANGE,
            f"{what} has reward {score.reward}; rewards of task {task} are in [{low}, {high}]",
        )


def _check_unscorable(score: Unscorable, rules: ValidationRules, what: str) -> None:
    if score.reason not in UNSCORABLE_REASONS:
        known = ", ".join(UNSCORABLE_REASONS)
        raise RefusedError(
            RefusalReason.SCORE, f"{what} is unscorable with reason {score.reason!r:.80}; expected one of {known}"
        )
    if not isinstance(score.detail, str):
        raise RefusedError(RefusalReason.SCORE, f"{what} is unscorable with detail {score.detail!r:.80}; expected text")
    _check_storable(score.detail, f"the detail of {what}", RefusalReason.SCORE, rules)


def _check_number(value: object, prefix: str) -> None:
    if not is_reward(value):
        value = value if not isinstance(value, int) else f"an integer of {value.bit_length()} bits"
        raise RefusedError(RefusalReason.REWARD, f"{prefix} {value!r:.80}; {REWARD_RULE}")


def _check_columns(prompt: Prompt, rules: ValidationRules) -> None:
    what = f"the columns of prompt {prompt.id}"
    try:
        if not isinstance(prompt.columns, Mapping):
            raise TypeError(f"they are a {type(prompt.columns).__name__}, not a mapping")
        text = json.dumps(dict(prompt.columns), allow_nan=False, ensure_ascii=False)
        text.encode()
        same = json.loads(text) == prompt.columns
    except (TypeError, ValueError, RecursionError) as error:
        raise RefusedError(RefusalReason.PROMPT_COLUMNS, f"{what} are not plain JSON: {error!s:.200}") from error
    if not same:
        raise RefusedError(
            RefusalReason.PROMPT_COLUMNS, f"{what} are not plain JSON: they have tuples, or keys that are not text"
        )
    if len(text) > rules.max_text:
        raise RefusedError(RefusalReason.SIZE, f"{what} have {len(text)} characters; the limit is {rules.max_text}")


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
