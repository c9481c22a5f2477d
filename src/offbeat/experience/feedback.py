"""Late feedback: scores that arrive after their group, from any process, by completion id.

A group is *ripe* when every completion has feedback; an `Unscorable` counts as feedback. A deadline's decision is
written into the log like any other fact, so whether a group is ripe depends on the log and never on a clock.
Lag counts from generation, whenever the scores arrive.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from offbeat.types import Completion, Group, Score, Unscorable, is_reward


@dataclass(frozen=True)
class LateScore:
    """Feedback for one completion. If there are several for the same completion, the last in commit order counts."""

    group_id: str
    completion_id: str
    score: Score | Unscorable
    scorer: str = ""
    """The person or program that gave the score."""


@dataclass(frozen=True)
class PendingCompletion:
    """A completion that waits for a score, its group, and when the group was appended (unix seconds)."""

    group: Group
    completion: Completion
    appended_at: float


@dataclass(frozen=True)
class ScoreCard:
    """The scores of a group as they are now, by completion id; None while one is awaited."""

    group_id: str
    prompt_id: str
    task: str
    scores: dict[str, Score | Unscorable | None]


class Overdue(StrEnum):
    """What happens to a group whose feedback is incomplete when the deadline passes."""

    DROP = "drop"
    """The group expires, even if feedback arrives later."""
    TRAIN_SCORED = "train-scored"
    """Completions without feedback become unscorable. A group with at least two scores can be trained on."""


@dataclass(frozen=True)
class Deadline:
    """How long feedback may take, counted from the append. Without a deadline a group waits forever."""

    seconds: float
    then: Overdue = Overdue.TRAIN_SCORED

    def missing(self) -> Unscorable:
        """Return the feedback to record for a completion that got none in time."""
        return Unscorable("timeout", f"no feedback within {self.seconds:g} s of being appended")


def bounded(score: Score | Unscorable | None) -> Score | Unscorable | None:
    """Return a stored score; None, as if it had never come, for a reward that an earlier release let in."""
    return None if isinstance(score, Score) and not is_reward(score.reward) else score


def merge(group: Group, scores: Mapping[str, Score | Unscorable]) -> Group:
    """Return the group with late scores filled in, by completion id.

    >>> from offbeat.types import UNKNOWN, Completion, Prompt
    >>> answer = Completion("g7/0", [4, 2], UNKNOWN, source="human")
    >>> group = Group("g7", Prompt(id="p", token_ids=[1], task="arithmetic"), (answer,))
    >>> merge(group, {"g7/0": Score(1.0)}).scored
    True
    """
    now = [bounded(scores.get(c.id, c.score)) for c in group.completions]
    merged = (c if one is c.score else replace(c, score=one) for c, one in zip(group.completions, now, strict=True))
    return replace(group, completions=tuple(merged))
