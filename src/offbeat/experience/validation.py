"""The door: what enters the experience log is checked here, once, before anything is written.

Each rule has a `RefusalReason`, and each refusal a sentence with the value found. The door never raises for what it is
shown and never changes it: a refused group goes to quarantine as it came, the others of its batch go in.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Final, get_args

import numpy as np
from numpy.typing import NDArray

from offbeat.experience.feedback import LateScore
from offbeat.experience.quarantine import Refusal, RefusalReason, RefusedError
from offbeat.types import UNKNOWN, Completion, Finish, Group, Prompt, Score, Unscorable, VersionSpan

UNSCORABLE_REASONS: Final = get_args(Unscorable.__annotations__["reason"])
INT32_MAX: Final = 2**31 - 1


@dataclass(frozen=True)
class ValidationRules:
    """What the door knows of this run. The default rules ask only what holds for every run.

    >>> ValidationRules(vocab_size=49152, reward_ranges={"arithmetic": (0.0, 1.0)}).vocab_size
    49152
    """

    vocab_size: int | None = None
    """Token ids lie in [0, vocab_size); None leaves the upper end open."""
    reward_ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Lowest and highest reward of a task; a task without an entry has no limits."""
    max_completions: int = 1024
    max_tokens: int = 131_072
    """Of one completion, and of the prompt."""
    max_text: int = 1_048_576
    """Characters of one text: an id, a detail, the prompt's columns as JSON."""


def validate_group(group: object, rules: ValidationRules) -> Refusal | None:
    """Why this group may not enter, or None if it may.

    >>> prompt = Prompt(id="p", token_ids=[1], task="arithmetic")
    >>> answer = Completion("g/0", [4, 2], [-0.1, 0.3], (VersionSpan(3, 0, 2),), score=Score(1.0))
    >>> validate_group(Group("g", prompt, (answer,)), ValidationRules()).detail
    'completion g/0 has behavior log-prob 0.3 at token 1; a log-prob is finite and at most 0'
    """
    try:
        _group(group, rules)
    except RefusedError as refused:
        return refused.refusal
    return None


def validate_late_score(
    late: object, known: tuple[str, Sequence[str]] | None, rules: ValidationRules
) -> Refusal | None:
    """Why this late feedback may not enter, or None if it may; `known` is its group's task and completion ids.

    >>> rules = ValidationRules(reward_ranges={"arithmetic": (0.0, 1.0)})
    >>> validate_late_score(LateScore("g", "g/0", Score(7.0)), ("arithmetic", ["g/0"]), rules).detail
    'completion g/0 has reward 7.0; rewards of task arithmetic lie in [0.0, 1.0]'
    """
    try:
        _late(late, known, rules)
    except RefusedError as refused:
        return refused.refusal
    return None


def group_named_by(late: object) -> str:
    """The id of the group that this feedback speaks of; empty where it names none.

    >>> group_named_by(LateScore("g", "g/0", Score(1.0))), group_named_by(None)
    ('g', '')
    """
    name: object = late.group_id if isinstance(late, LateScore) else ""
    return name if isinstance(name, str) else ""


def _late(late: object, known: tuple[str, Sequence[str]] | None, rules: ValidationRules) -> None:
    if not isinstance(late, LateScore):
        raise RefusedError(RefusalReason.SCORE, f"found a {type(late).__name__}; late feedback comes as LateScore")
    _text(late.group_id, "the group's id", RefusalReason.ID, rules)
    if known is None:
        raise RefusedError(
            RefusalReason.UNKNOWN_GROUP, f"there is no group {late.group_id!r:.80} in this log; append the group first"
        )
    task, completion_ids = known
    if late.completion_id not in completion_ids:
        has = f"group {late.group_id} has no completion {late.completion_id!r:.80}; it has {completion_ids!s:.200}"
        raise RefusedError(RefusalReason.UNKNOWN_COMPLETION, has)
    if late.scorer != "":
        _text(late.scorer, f"the scorer of completion {late.completion_id}", RefusalReason.SOURCE, rules)
    if late.score is None:
        raise RefusedError(RefusalReason.SCORE, f"completion {late.completion_id} comes with no score")
    _score(late.score, task, rules, late.completion_id)


def _group(group: object, rules: ValidationRules) -> None:
    if not isinstance(group, Group):
        raise RefusedError(
            RefusalReason.NOT_A_GROUP, f"found a {type(group).__name__}; the log takes offbeat.types.Group"
        )
    _text(group.id, "the group's id", RefusalReason.ID, rules)
    _prompt(group.prompt, rules)
    if not group.completions:
        raise RefusedError(RefusalReason.NO_COMPLETIONS, f"group {group.id} has no completions")
    if len(group.completions) > rules.max_completions:
        raise RefusedError(
            RefusalReason.SIZE,
            f"group {group.id} has {len(group.completions)} completions; at most {rules.max_completions}",
        )
    for completion in group.completions:
        if not isinstance(completion, Completion):
            raise RefusedError(RefusalReason.NOT_A_GROUP, f"found a {type(completion).__name__} among the completions")
    sound = _streams_sound(group.completions, rules)
    seen: set[str] = set()
    for completion in group.completions:
        _text(completion.id, "a completion's id", RefusalReason.ID, rules)
        if completion.id in seen:
            raise RefusedError(RefusalReason.ID, f"completion id {completion.id} stands twice in group {group.id}")
        seen.add(completion.id)
        if not sound:
            _streams(completion, rules)
        _completion(completion, group.prompt.task, rules)


def _prompt(prompt: object, rules: ValidationRules) -> None:
    if not isinstance(prompt, Prompt):
        raise RefusedError(RefusalReason.NOT_A_GROUP, f"found a {type(prompt).__name__} as its prompt")
    _text(prompt.id, "the prompt's id", RefusalReason.ID, rules)
    _text(prompt.task, "the task's name", RefusalReason.TASK, rules)
    _tokens(prompt.token_ids, f"prompt {prompt.id}", RefusalReason.PROMPT_TOKENS, rules)
    _columns(prompt, rules)


def _streams_sound(completions: Sequence[Completion], rules: ValidationRules) -> bool:
    """Whether all per-token values are in order, in a few passes over the group; which is not is seen after."""
    for c in completions:
        shape = c.token_ids.shape
        if len(shape) != 1 or not 0 < shape[0] <= rules.max_tokens or c.loss_mask.shape != shape:
            return False
        if c.behavior_logprobs is not UNKNOWN and c.behavior_logprobs.shape != shape:
            return False
    tokens = np.concatenate([c.token_ids for c in completions])
    if tokens.min() < 0 or (rules.vocab_size is not None and tokens.max() >= rules.vocab_size):
        return False
    known = [c.behavior_logprobs for c in completions if c.behavior_logprobs is not UNKNOWN]
    if not known:
        return True
    logprobs = np.concatenate(known)
    return bool(logprobs.max() <= 0 and logprobs.min() > -np.inf)  # false for NaN too


def _streams(completion: Completion, rules: ValidationRules) -> None:
    what = f"completion {completion.id}"
    _tokens(completion.token_ids, what, RefusalReason.TOKENS, rules)
    length = len(completion.token_ids)
    _logprobs(completion.behavior_logprobs, length, what)
    if completion.loss_mask.shape != (length,):
        raise RefusedError(
            RefusalReason.LOSS_MASK, f"{what} has {length} tokens and a loss mask of shape {completion.loss_mask.shape}"
        )


def _completion(completion: Completion, task: str, rules: ValidationRules) -> None:
    what = f"completion {completion.id}"
    _text(completion.source, f"the source of {what}", RefusalReason.SOURCE, rules)
    _versions(completion, len(completion.token_ids), what)
    if not isinstance(completion.finish, Finish):
        raise RefusedError(
            RefusalReason.FINISH, f"{what} finished by {completion.finish!r:.80}; one of {', '.join(Finish)} was meant"
        )
    _score(completion.score, task, rules, completion.id)


def _text(text: object, what: str, reason: RefusalReason, rules: ValidationRules) -> None:
    """A name that people and every reader of the log can use: not empty, valid Unicode, of sane length."""
    if type(text) is str and text.isascii() and len(text) <= rules.max_text and not text.isspace() and text:
        return
    if not isinstance(text, str) or not text.strip():
        raise RefusedError(reason, f"{what} is {text!r:.80}; a text that is not blank was meant")
    _storable(text, what, reason, rules)


def _storable(text: str, what: str, reason: RefusalReason, rules: ValidationRules) -> None:
    if len(text) > rules.max_text:
        raise RefusedError(RefusalReason.SIZE, f"{what} has {len(text)} characters; at most {rules.max_text}")
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RefusedError(reason, f"{what} is {text!a:.80}, which is not valid Unicode") from error


def _tokens(tokens: NDArray[np.int32], what: str, reason: RefusalReason, rules: ValidationRules) -> None:
    if tokens.ndim != 1 or not len(tokens):
        raise RefusedError(
            reason, f"{what} has token ids of shape {tokens.shape}; a flat list of at least one was meant"
        )
    if len(tokens) > rules.max_tokens:
        raise RefusedError(RefusalReason.SIZE, f"{what} has {len(tokens)} tokens; at most {rules.max_tokens}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0:
        raise RefusedError(RefusalReason.VOCABULARY, f"{what} has token id {low}; ids start at 0")
    if rules.vocab_size is not None and high >= rules.vocab_size:
        raise RefusedError(
            RefusalReason.VOCABULARY,
            f"{what} has token id {high}; the vocabulary has {rules.vocab_size}: is it another model's?",
        )


def _logprobs(logprobs: object, length: int, what: str) -> None:
    if logprobs is UNKNOWN:
        return
    assert isinstance(logprobs, np.ndarray)  # Completion makes it one
    if logprobs.shape != (length,):
        raise RefusedError(
            RefusalReason.LOGPROBS_LENGTH,
            f"{what} has {length} tokens and behavior log-probs of shape {logprobs.shape}",
        )
    fine = (logprobs <= 0) & (logprobs > -np.inf)  # false for NaN too
    if not fine.all():
        at = int(np.argmin(fine))
        raise RefusedError(
            RefusalReason.LOGPROBS,
            f"{what} has behavior log-prob {logprobs[at]:.6g} at token {at}; a log-prob is finite and at most 0",
        )


def _versions(completion: Completion, length: int, what: str) -> None:
    spans = completion.versions
    if not spans:
        if completion.source == "policy":
            raise RefusedError(
                RefusalReason.VERSIONS,
                f"{what} comes from the policy but names no version; give its spans, or another source",
            )
        return
    reached = 0
    for span in spans:
        if not _whole_numbers(span):
            raise RefusedError(
                RefusalReason.VERSIONS, f"{what} has version span {span!r:.80}; three whole numbers were meant"
            )
        if not 0 <= span.version <= INT32_MAX:
            raise RefusedError(RefusalReason.VERSIONS, f"{what} has version {span.version}; versions count from 0")
        if span.start != reached or span.end <= span.start:
            raise RefusedError(
                RefusalReason.VERSIONS,
                f"{what} has a version span [{span.start}, {span.end}) where one from token {reached} was due",
            )
        reached = span.end
    if reached != length:
        raise RefusedError(
            RefusalReason.VERSIONS, f"{what} has {length} tokens, but its version spans end at {reached}"
        )


def _whole_numbers(span: object) -> bool:
    if not isinstance(span, VersionSpan):
        return False
    numbers: tuple[object, ...] = (span.version, span.start, span.end)
    if all(type(n) is int for n in numbers):
        return True
    return all(isinstance(n, int | np.integer) and not isinstance(n, bool) for n in numbers)


def _score(score: object, task: str, rules: ValidationRules, of: str) -> None:
    what = f"completion {of}"
    if score is None:
        return
    if isinstance(score, Unscorable):
        if score.reason not in UNSCORABLE_REASONS:
            known = ", ".join(UNSCORABLE_REASONS)
            raise RefusedError(RefusalReason.SCORE, f"{what} is unscorable for {score.reason!r:.80}; known are {known}")
        if not isinstance(score.detail, str):
            raise RefusedError(
                RefusalReason.SCORE, f"{what} is unscorable with detail {score.detail!r:.80}; a text was meant"
            )
        _storable(score.detail, f"the detail of {what}", RefusalReason.SCORE, rules)
        return
    if not isinstance(score, Score):
        raise RefusedError(RefusalReason.SCORE, f"{what} has score {score!r:.80}; Score, Unscorable or None was meant")
    _number(score.reward, f"{what} has reward")
    if type(score.breakdown) is not dict and not isinstance(score.breakdown, Mapping):
        raise RefusedError(
            RefusalReason.REWARD, f"{what} has breakdown {score.breakdown!r:.80}; named parts were meant"
        )
    for name, part in score.breakdown.items():
        _text(name, f"a part's name in the breakdown of {what}", RefusalReason.REWARD, rules)
        _number(part, f"{what} has in its breakdown {name!a:.80} =")
    low, high = rules.reward_ranges.get(task, (-np.inf, np.inf))
    if not low <= score.reward <= high:
        raise RefusedError(
            RefusalReason.REWARD_RANGE,
            f"{what} has reward {score.reward}; rewards of task {task} lie in [{low}, {high}]",
        )


def _number(value: object, saying: str) -> None:
    if type(value) is float and math.isfinite(value):  # the usual case, without the slow look at abstract classes
        return
    try:
        finite = isinstance(value, Real) and math.isfinite(value)
    except OverflowError:  # a whole number that no float can hold
        finite = False
    if not finite:
        raise RefusedError(RefusalReason.REWARD, f"{saying} {value!r:.80}; a reward is a finite number")


def _columns(prompt: Prompt, rules: ValidationRules) -> None:
    try:
        if not isinstance(prompt.columns, Mapping):
            raise TypeError(f"they are a {type(prompt.columns).__name__}, not a mapping")
        text = json.dumps(dict(prompt.columns), allow_nan=False, ensure_ascii=False)
        text.encode()
        same = json.loads(text) == prompt.columns
    except (TypeError, ValueError, RecursionError) as error:
        raise RefusedError(
            RefusalReason.PROMPT_COLUMNS, f"the columns of prompt {prompt.id} are not plain JSON: {error!s:.200}"
        ) from error
    if not same:
        raise RefusedError(
            RefusalReason.PROMPT_COLUMNS,
            f"the columns of prompt {prompt.id} are not plain JSON: tuples, or keys that are no text",
        )
    if len(text) > rules.max_text:
        raise RefusedError(
            RefusalReason.SIZE,
            f"the columns of prompt {prompt.id} take {len(text)} characters; at most {rules.max_text}",
        )
