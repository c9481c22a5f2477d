"""Validation: every group and late score is checked here once, before it is written to the experience log.

Each rule has a `RefusalReason`, and each refusal a sentence with the value found. Validation never raises for what it
checks and never changes it: a refused group goes to quarantine unchanged, and the other groups of its batch are stored.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from offbeat.experience.feedback import LateScore
from offbeat.experience.quarantine import Refusal, RefusedError
from offbeat.experience.quarantine import RefusalReason as Reason
from offbeat.types import (
    UNKNOWN,
    Completion,
    Finish,
    Group,
    Prompt,
    Score,
    Unscorable,
    VersionSpan,
    invalid_logprobs,
    is_finite_number,
    outside_vocabulary,
)

UNSCORABLE_REASONS: Final = get_args(Unscorable.__annotations__["reason"])
INT32_MAX: Final = 2**31 - 1


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
    >>> validate_group(Group("g", prompt, (answer,)), ValidationRules()).detail
    'completion g/0 has behavior log-prob 0.3 at token 1; a log-prob is finite and at most 0'
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
        raise RefusedError(Reason.SCORE, f"found a {type(late).__name__}, expected a LateScore")
    _check_text(late.group_id, "the group's id", Reason.ID, rules)
    if known is None:
        raise RefusedError(
            Reason.UNKNOWN_GROUP, f"there is no group {late.group_id!r:.80} in this log; append the group first"
        )
    task, completion_ids = known
    if late.completion_id not in completion_ids:
        has = f"group {late.group_id} has no completion {late.completion_id!r:.80}; it has {completion_ids!s:.200}"
        raise RefusedError(Reason.UNKNOWN_COMPLETION, has)
    if late.scorer != "":
        _check_text(late.scorer, f"the scorer of completion {late.completion_id}", Reason.SOURCE, rules)
    if late.score is None:
        raise RefusedError(Reason.SCORE, f"the late score of completion {late.completion_id} is None")
    _check_score(late.score, task, rules, f"completion {late.completion_id}")


def _check_group(group: object, rules: ValidationRules) -> None:
    if not isinstance(group, Group):
        raise RefusedError(Reason.NOT_A_GROUP, f"found a {type(group).__name__}, expected a Group")
    _check_text(group.id, "the group's id", Reason.ID, rules)
    _check_prompt(group.prompt, rules)
    if not group.completions:
        raise RefusedError(Reason.NO_COMPLETIONS, f"group {group.id} has no completions")
    if len(group.completions) > rules.max_completions:
        raise RefusedError(
            Reason.SIZE,
            f"group {group.id} has {len(group.completions)} completions; the limit is {rules.max_completions}",
        )
    for completion in group.completions:
        if not isinstance(completion, Completion):
            raise RefusedError(Reason.NOT_A_GROUP, f"found a {type(completion).__name__} among the completions")
    streams_valid = _are_streams_valid(group.completions, rules)
    seen: set[str] = set()
    for completion in group.completions:
        _check_text(completion.id, "a completion's id", Reason.ID, rules)
        if completion.id in seen:
            raise RefusedError(Reason.ID, f"completion id {completion.id} occurs twice in group {group.id}")
        seen.add(completion.id)
        if not streams_valid:
            _check_streams(completion, rules)
        _check_completion(completion, group.prompt.task, rules)
    if len({span.run for completion in group.completions for span in completion.versions}) > 1:
        raise RefusedError(Reason.VERSIONS, f"group {group.id} has versions of several runs; one run writes a group")


def _check_prompt(prompt: object, rules: ValidationRules) -> None:
    if not isinstance(prompt, Prompt):
        raise RefusedError(Reason.NOT_A_GROUP, f"found a {type(prompt).__name__} as the prompt")
    _check_text(prompt.id, "the prompt's id", Reason.ID, rules)
    _check_text(prompt.task, "the task's name", Reason.TASK, rules)
    _check_tokens(prompt.token_ids, f"prompt {prompt.id}", Reason.PROMPT_TOKENS, rules)
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
    _check_tokens(completion.token_ids, what, Reason.TOKENS, rules)
    length = len(completion.token_ids)
    _check_logprobs(completion.behavior_logprobs, length, what)
    if completion.loss_mask.shape != (length,):
        raise RefusedError(
            Reason.LOSS_MASK, f"{what} has {length} tokens and a loss mask of shape {completion.loss_mask.shape}"
        )


def _check_completion(completion: Completion, task: str, rules: ValidationRules) -> None:
    what = f"completion {completion.id}"
    _check_text(completion.source, f"the source of {what}", Reason.SOURCE, rules)
    _check_versions(completion, len(completion.token_ids), what)
    if not isinstance(completion.finish, Finish):
        raise RefusedError(
            Reason.FINISH, f"{what} has finish {completion.finish!r:.80}; expected one of {', '.join(Finish)}"
        )
    _check_score(completion.score, task, rules, what)


def _check_text(text: object, what: str, reason: Reason, rules: ValidationRules) -> None:
    """Check a name that people and every reader of the log can use: not blank, valid Unicode, not too long."""
    if type(text) is str and text.isascii() and len(text) <= rules.max_text and not text.isspace() and text:
        return
    if not isinstance(text, str) or not text.strip():
        raise RefusedError(reason, f"{what} is {text!r:.80}; expected text that is not blank")
    _check_storable(text, what, reason, rules)


def _check_storable(text: str, what: str, reason: Reason, rules: ValidationRules) -> None:
    if len(text) > rules.max_text:
        raise RefusedError(Reason.SIZE, f"{what} has {len(text)} characters; the limit is {rules.max_text}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RefusedError(reason, f"{what} is {text!a:.80}, which is not valid Unicode") from error


def _check_tokens(tokens: NDArray[np.int32], what: str, reason: Reason, rules: ValidationRules) -> None:
    if tokens.ndim != 1 or not len(tokens):
        raise RefusedError(
            reason, f"{what} has token ids of shape {tokens.shape}; expected a flat list with at least one id"
        )
    if len(tokens) > rules.max_tokens:
        raise RefusedError(Reason.SIZE, f"{what} has {len(tokens)} tokens; the limit is {rules.max_tokens}")
    outside = outside_vocabulary(tokens, rules.vocab_size)
    if len(outside):
        limit = (
            "ids start at 0" if outside[0] < 0 else f"the vocabulary size is {rules.vocab_size}: is it another model's?"
        )
        raise RefusedError(Reason.VOCABULARY, f"{what} has token id {outside[0]}; {limit}")


def _check_logprobs(logprobs: object, length: int, what: str) -> None:
    if logprobs is UNKNOWN:
        return
    assert isinstance(logprobs, np.ndarray)  # Completion converts it
    if logprobs.shape != (length,):
        raise RefusedError(
            Reason.LOGPROBS_LENGTH, f"{what} has {length} tokens and behavior log-probs of shape {logprobs.shape}"
        )
    invalid = invalid_logprobs(logprobs)
    if invalid.any():
        at = int(np.argmax(invalid))
        raise RefusedError(
            Reason.LOGPROBS,
            f"{what} has behavior log-prob {logprobs[at]:.6g} at token {at}; a log-prob is finite and at most 0",
        )


def _check_versions(completion: Completion, length: int, what: str) -> None:
    spans = completion.versions
    if not spans:
        if completion.source == "policy":
            raise RefusedError(
                Reason.VERSIONS,
                f"{what} has source 'policy' but no version spans; add its spans, or set another source",
            )
        return
    reached = 0
    for span in spans:
        if not _is_integer_span(span):
            raise RefusedError(
                Reason.VERSIONS,
                f"{what} has version span {span!r:.80}; expected a VersionSpan of integers and the id of a run",
            )
        if not 0 <= span.version <= INT32_MAX:
            raise RefusedError(Reason.VERSIONS, f"{what} has version {span.version}; versions are 0 to {INT32_MAX}")
        if span.start != reached or span.end <= span.start:
            raise RefusedError(
                Reason.VERSIONS,
                f"{what} has version span [{span.start}, {span.end}); expected a span that starts at token {reached}",
            )
        reached = span.end
    if reached != length:
        raise RefusedError(Reason.VERSIONS, f"{what} has {length} tokens, but its version spans end at {reached}")


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
        raise RefusedError(Reason.SCORE, f"{what} has score {score!r:.80}; expected a Score, an Unscorable or None")
    _check_number(score.reward, f"{what} has reward")
    if type(score.breakdown) is not dict and not isinstance(score.breakdown, Mapping):
        raise RefusedError(
            Reason.REWARD, f"{what} has breakdown {score.breakdown!r:.80}; expected a mapping of names to numbers"
        )
    for name, part in score.breakdown.items():
        _check_text(name, f"a name in the breakdown of {what}", Reason.REWARD, rules)
        _check_number(part, f"{what} has in its breakdown {name!a:.80} =")
    low, high = rules.reward_ranges.get(task, (-np.inf, np.inf))
    if not low <= score.reward <= high:
        raise RefusedError(
            Reason.REWARD_RANGE, f"{what} has reward {score.reward}; rewards of task {task} are in [{low}, {high}]"
        )


def _check_unscorable(score: Unscorable, rules: ValidationRules, what: str) -> None:
    if score.reason not in UNSCORABLE_REASONS:
        known = ", ".join(UNSCORABLE_REASONS)
        raise RefusedError(
            Reason.SCORE, f"{what} is unscorable with reason {score.reason!r:.80}; expected one of {known}"
        )
    if not isinstance(score.detail, str):
        raise RefusedError(Reason.SCORE, f"{what} is unscorable with detail {score.detail!r:.80}; expected text")
    _check_storable(score.detail, f"the detail of {what}", Reason.SCORE, rules)


def _check_number(value: object, prefix: str) -> None:
    if not is_finite_number(value):
        raise RefusedError(Reason.REWARD, f"{prefix} {value!r:.80}; a reward is a finite number")


def _check_columns(prompt: Prompt, rules: ValidationRules) -> None:
    what = f"the columns of prompt {prompt.id}"
    try:
        if not isinstance(prompt.columns, Mapping):
            raise TypeError(f"they are a {type(prompt.columns).__name__}, not a mapping")
        text = json.dumps(dict(prompt.columns), allow_nan=False, ensure_ascii=False)
        text.encode()
        same = json.loads(text) == prompt.columns
    except (TypeError, ValueError, RecursionError) as error:
        raise RefusedError(Reason.PROMPT_COLUMNS, f"{what} are not plain JSON: {error!s:.200}") from error
    if not same:
        raise RefusedError(
            Reason.PROMPT_COLUMNS, f"{what} are not plain JSON: they have tuples, or keys that are not text"
        )
    if len(text) > rules.max_text:
        raise RefusedError(Reason.SIZE, f"{what} have {len(text)} characters; the limit is {rules.max_text}")
