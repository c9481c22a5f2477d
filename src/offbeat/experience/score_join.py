"""Join scores from outside to the completions that wait for them, by ids, any number of times.

    {"completion_id": "a17", "score": 1}
    {"group_id": "ticket-81", "completion_id": "ticket-81/0", "score": 0.5, "scorer": "ann"}
    {"completion_id": "a18", "unscorable": "timeout", "detail": "no opinion"}

A score that the log already has counts as known. Another one for the same completion is a conflict, unless scores are
to be replaced. So a file can be sent twice, and after a correction it can be sent as a whole. A refused line leaves
nothing in the log.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Protocol

from offbeat.experience.feedback import LateScore, ScoreCard
from offbeat.experience.importing.layout import ID_NAMES, ROLES, UNDECIDED
from offbeat.experience.importing.records import BrokenRecord, Row, SourceRecord, UnreadableCell, read_id, read_score
from offbeat.experience.validation import (
    OnRefusal,
    Refusal,
    RefusalReason,
    RefusalTally,
    RefusedError,
    ValidationRules,
    validate_late_score,
)
from offbeat.types import Score, Unscorable

LINES_AT_ONCE: Final = 4_096
"""Lines in memory, and scores of one commit."""
FEEDBACK_ROLES: Final[Mapping[str, tuple[str, ...]]] = {
    "completion_id": (*(name for name in ID_NAMES["completion_id"] if name.endswith("_id")), *UNDECIDED),
    "group": ID_NAMES["group"],
    "prompt_id": ID_NAMES["prompt_id"],
    "reward": ROLES["reward"],
    "scorer": ("scorer",),
}
"""The names of each role in a line of feedback, the most reliable first."""


@dataclass
class FeedbackTally(RefusalTally):
    """What became of the lines of feedback.

    >>> print(FeedbackTally(lines=4, new=2, known=1, waiting=1))
    read      4 lines
    new       2 scores
    known     1 that the log has with the same score
    waiting   1 lines whose score is null
    refused   0
    """

    lines: int = 0
    new: int = 0
    replaced: int = 0
    """Scores that count from now on instead of an earlier one."""
    known: int = 0
    """Lines that repeat the score that counts."""
    waiting: int = 0
    """Lines with the score null: the completion still waits."""

    def __str__(self) -> str:
        return "\n".join(
            [
                f"read      {self.lines} lines",
                f"new       {self.new} scores",
                *([f"replaced  {self.replaced} scores"] if self.replaced else []),
                f"known     {self.known} that the log has with the same score",
                *([f"waiting   {self.waiting} lines whose score is null"] if self.waiting else []),
                f"refused   {sum(self.refused.values())}",
                *self.refusals(),
            ]
        )


@dataclass(frozen=True)
class FeedbackLine:
    """One line of feedback: the ids it gives, and its score; None if it says that there is none yet."""

    where: str
    group_id: str | None
    prompt_id: str | None
    completion_id: str | None
    score: Score | Unscorable | None
    scorer: str


def read_line(record: SourceRecord, columns: Mapping[str, str]) -> FeedbackLine:
    """Read a row as feedback; `columns` has the names that the user set, by role.

    >>> line = read_line(SourceRecord("line 1", {"answer_id": "a17", "stars": 0.5}), {"reward": "stars"})
    >>> line.completion_id, line.score
    ('a17', Score(reward=0.5, breakdown={}))
    """
    row = record.row

    def column(role: str) -> str | None:
        names = (columns[role],) if role in columns else FEEDBACK_ROLES[role]
        return next((name for name in names if name in row), None)

    def own_id(role: str) -> str | None:
        name = column(role)
        return None if name is None or row[name] is None else read_id(row[name], name)

    ids = own_id("group"), own_id("prompt_id"), own_id("completion_id")
    scorer = column("scorer")
    return FeedbackLine(
        record.where, *ids, _read_score(row, column("reward")), str(row[scorer] or "") if scorer else ""
    )


def _read_score(row: Row, name: str | None) -> Score | Unscorable | None:
    if row.get("unscorable") is not None:
        # Validation checks the reason.
        return Unscorable(row["unscorable"], str(row.get("detail") or ""))  # type: ignore[arg-type]
    if name is None:
        raise UnreadableCell(f"no column is a score among {', '.join(row) or '(none)':.200}; expected score or reward")
    if isinstance(row[name], list):
        raise UnreadableCell(f"{name} is a list; give one line for each completion")
    return read_score(row[name])


class ScoredLog(Protocol):
    """The part of `ExperienceLog` that scores are joined to."""

    def score(self, scores: Iterable[LateScore]) -> object: ...

    def score_cards(self, group_ids: Sequence[str]) -> list[ScoreCard | None]: ...

    def score_cards_with(self, completion_ids: Sequence[str]) -> list[list[ScoreCard]]: ...


@dataclass(frozen=True)
class ScoreJoin:
    """How lines of feedback are joined to a log."""

    columns: Mapping[str, str] = field(default_factory=dict)
    """Names of columns by role; `FEEDBACK_ROLES` has those that are detected."""
    scorer: str = ""
    """The person or program behind all lines that do not name one."""
    replace: bool = False
    """Another score for the same completion counts from now on, instead of being refused."""
    rules: ValidationRules = field(default_factory=ValidationRules)
    """Limits of rewards."""

    def run(
        self,
        log: ScoredLog,
        records: Iterable[SourceRecord | BrokenRecord],
        *,
        on_batch: Callable[[FeedbackTally], None] = lambda _: None,
        on_refusal: OnRefusal = lambda _, __: None,
    ) -> FeedbackTally:
        """Append the scores of these lines to a log, and return what became of each line. Lines are read once."""
        tally, left = FeedbackTally(on_refusal=on_refusal), iter(records)
        while batch := list(islice(left, LINES_AT_ONCE)):
            tally.lines += len(batch)
            log.score(list(self._accepted(log, self._readable(batch, tally), tally)))
            on_batch(tally)
        return tally

    def run_rows(self, log: ScoredLog, rows: Iterable[Mapping[str, object]]) -> FeedbackTally:
        """Append the scores of plain rows."""
        return self.run(log, (SourceRecord(f"row {number}", dict(row)) for number, row in enumerate(rows, 1)))

    def _readable(self, batch: Sequence[SourceRecord | BrokenRecord], tally: FeedbackTally) -> list[FeedbackLine]:
        lines = []
        for record in batch:
            try:
                if isinstance(record, BrokenRecord):
                    raise UnreadableCell(record.problem)
                lines.append(read_line(record, self.columns))
            except UnreadableCell as error:
                tally.refuse(record.where, Refusal(RefusalReason.UNREADABLE, str(error)))
        return lines

    def _accepted(self, log: ScoredLog, lines: Sequence[FeedbackLine], tally: FeedbackTally) -> Iterator[LateScore]:
        current: dict[str, ScoreCard] = {}
        for line, cards in zip(lines, _candidates(log, lines), strict=True):
            try:
                card, completion_id = _match(line, [current.setdefault(card.group_id, card) for card in cards])
                late = self._decide(line, card, completion_id, tally)
            except RefusedError as error:
                tally.refuse(line.where, error.refusal)
                continue
            if late is not None:
                card.scores[completion_id] = late.score  # for the next line about the same completion
                yield late

    def _decide(
        self, line: FeedbackLine, card: ScoreCard, completion_id: str, tally: FeedbackTally
    ) -> LateScore | None:
        """Count a line, and return the score to append, if it brings one."""
        if line.score is None:
            tally.waiting += 1
            return None
        late = LateScore(card.group_id, completion_id, line.score, line.scorer or self.scorer)
        if refusal := validate_late_score(late, (card.task, list(card.scores)), self.rules):
            raise RefusedError(refusal.reason, refusal.detail)
        before = card.scores[completion_id]
        if before is None:
            tally.new += 1
        elif _worth(before) == _worth(late.score):
            tally.known += 1
            return None
        elif self.replace:
            tally.replaced += 1
        else:
            detail = (
                f"completion {completion_id!r:.80} has the score {_worth(before)}, here it is {_worth(late.score)}; "
                "if the earlier one is wrong, replace it"
            )
            raise RefusedError(RefusalReason.CONFLICT, detail)
        return late


def _candidates(log: ScoredLog, lines: Sequence[FeedbackLine]) -> list[list[ScoreCard]]:
    """Return for each line the groups it may be about: those with its completion, else the one that it names."""
    loose = [i for i, line in enumerate(lines) if line.group_id is None and line.completion_id is not None]
    found: list[list[ScoreCard]] = [[] for _ in lines]
    for i, cards in zip(loose, log.score_cards_with([lines[i].completion_id or "" for i in loose]), strict=True):
        found[i] = cards
    named = {i: name for i, line in enumerate(lines) if not found[i] and (name := line.group_id or line.completion_id)}
    for i, card in zip(named, log.score_cards(list(named.values())), strict=True):
        found[i] = [card] if card else []
    return found


def _match(line: FeedbackLine, cards: Sequence[ScoreCard]) -> tuple[ScoreCard, str]:
    """Return the group and the completion that a line is about."""
    group_id, completion_id = line.group_id, line.completion_id
    if group_id is None and completion_id is None:
        known = ", ".join(FEEDBACK_ROLES["completion_id"])
        raise RefusedError(RefusalReason.UNREADABLE, f"no column is the id of a completion; expected one of {known}")
    found = [(card, completion_id) for card in cards if completion_id is not None and completion_id in card.scores]
    if len(found) > 1:
        found = [(card, name) for card, name in found if card.prompt_id == line.prompt_id] or found
    if not found and cards and cards[0].group_id == (completion_id or group_id):
        found = [(cards[0], name) for name in cards[0].scores]  # the line names a group
    if len(found) == 1:
        return found[0]
    if found:
        detail = f"{len(found)} groups have a completion {completion_id!r:.80}; add the id of the group"
        if found[0][0] is found[1][0]:
            detail = f"group {found[0][0].group_id!r:.80} has {len(found)} completions; add the id of one"
        raise RefusedError(RefusalReason.AMBIGUOUS, detail)
    if group_id is not None and not cards:
        raise RefusedError(RefusalReason.UNKNOWN_GROUP, f"there is no group {group_id!r:.80} in this log")
    place = "this log" if group_id is None else f"group {group_id!r:.80}"
    raise RefusedError(RefusalReason.UNKNOWN_COMPLETION, f"there is no completion {completion_id!r:.80} in {place}")


def _worth(score: Score | Unscorable) -> float | str:
    """Return the reward, or why there is none: two scores with the same worth say the same."""
    return f"unscorable ({score.reason})" if isinstance(score, Unscorable) else float(score.reward)
