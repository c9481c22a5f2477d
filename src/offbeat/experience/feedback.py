"""Late feedback: scores that come after the group did, from any process, by completion id.

A group ripens when every completion has feedback, an `Unscorable` counting as feedback. What a deadline decides is
written into the log like any other fact, so that whether a group is ripe depends on the log alone and on no clock.
Lag counts from generation, whenever the scores came.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from offbeat.types import Group, Score, Unscorable


@dataclass(frozen=True)
class LateScore:
    """Feedback for one completion. For the same completion the last in commit order counts.

    >>> LateScore("g7", "g7/2", Score(1.0), scorer="annotator-3").score
    Score(reward=1.0, breakdown={})
    """

    group_id: str
    completion_id: str
    score: Score | Unscorable
    scorer: str = ""
    """Who says so."""


class Overdue(StrEnum):
    """What becomes of a group whose feedback is not complete when the deadline passes."""

    DROP = "drop"
    """It expires, whatever comes later."""
    TRAIN_SCORED = "train-scored"
    """What is missing becomes unscorable; with at least two scores the group can be trained on."""


@dataclass(frozen=True)
class Deadline:
    """How long feedback may take, counted from appending. Without a deadline a group waits for ever.

    >>> Deadline(seconds=86_400, then=Overdue.TRAIN_SCORED).missing().reason
    'timeout'
    """

    seconds: float
    then: Overdue = Overdue.TRAIN_SCORED

    def missing(self) -> Unscorable:
        """The feedback that stands for feedback which never came."""
        return Unscorable("timeout", f"no feedback within {self.seconds:g} s of being appended")


def merge(group: Group, scores: Mapping[str, Score | Unscorable]) -> Group:
    """The group with late scores in place, by completion id.

    >>> from offbeat.types import UNKNOWN, Completion, Prompt
    >>> answer = Completion("g7/0", [4, 2], UNKNOWN, source="human")
    >>> group = Group("g7", Prompt(id="p", token_ids=[1], task="arithmetic"), (answer,))
    >>> merge(group, {"g7/0": Score(1.0)}).scored
    True
    """
    return replace(
        group,
        completions=tuple(replace(c, score=scores[c.id]) if c.id in scores else c for c in group.completions),
    )
