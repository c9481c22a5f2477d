"""Why the door refuses: a word for counting, a sentence for the person."""

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
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

    >>> Refusal(Reason.REWARD, "completion g7/1 has reward nan; a reward is a finite number").reason
    <Reason.REWARD: 'reward'>
    """

    reason: Reason
    detail: str


class RefusedError(Exception):
    """How a rule of the door says no. It does not leave the door."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(detail)
        self.refusal = Refusal(reason, detail)
