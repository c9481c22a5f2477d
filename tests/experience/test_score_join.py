"""Late feedback as plain rows: joined by ids, counted exactly, refused with a reason, and harmless to repeat."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.experience.feedback import Deadline, Overdue
from offbeat.experience.log import ExperienceLog
from offbeat.experience.score_join import FeedbackTally
from offbeat.experience.validation import RefusalReason, ValidationRules
from offbeat.types import UNKNOWN, Completion, Group, Prompt, Score, Unscorable
from tests.fixtures.groups import make_group, without_scores


def waiting(name: str, *completions: str, prompt: str = "p") -> Group:
    answers = (Completion(one, [4, i], UNKNOWN, source="human") for i, one in enumerate(completions))
    return Group(name, Prompt(id=prompt, token_ids=[1], task="support"), tuple(answers))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ExperienceLog]:
    """Two tickets with own ids, and two groups whose completions have the same names."""
    rules = ValidationRules(reward_ranges={"support": (0.0, 1.0)})
    with ExperienceLog.open(tmp_path / "log", rules=rules) as opened:
        opened.append([waiting("t1", "a1", "a2"), waiting("t2", "a3")])
        opened.append([waiting("s1", "0", "1", prompt="p1"), waiting("s2", "0", "1", prompt="p2")])
        yield opened


def scores(log: ExperienceLog) -> dict[str, object]:
    return {f"{g.id} {c.id}": c.score for g in log.groups() for c in g.completions if c.score is not None}


def counts(tally: FeedbackTally) -> tuple[int, int, int, int]:
    return tally.new, tally.known, tally.replaced, sum(tally.refused.values())


@pytest.mark.parametrize(
    ("row", "about"),
    [
        ({"completion_id": "a2", "score": 1}, "t1 a2"),
        ({"answer_id": "a2", "reward": 1}, "t1 a2"),
        ({"id": "a2", "score": True}, "t1 a2"),
        ({"group_id": "t1", "completion_id": "a2", "score": 1.0}, "t1 a2"),
        ({"group_id": "t2", "score": 1}, "t2 a3"),
        ({"uid": "t2", "score": 1}, "t2 a3"),
        ({"group_id": "s2", "completion_id": 1, "score": 1}, "s2 1"),
        ({"prompt_id": "p2", "completion_id": 1, "score": 1}, "s2 1"),
        ({"prompt_id": "other name of the prompt", "completion_id": "a2", "score": 1}, "t1 a2"),
    ],
)
def test_a_row_is_joined_by_its_ids(log: ExperienceLog, row: dict[str, object], about: str) -> None:
    assert counts(log.feedback([row])) == (1, 0, 0, 0)
    assert scores(log) == {about: Score(1.0)}


@pytest.mark.parametrize(
    ("row", "reason", "detail"),
    [
        ({"completion_id": "a9", "score": 1}, RefusalReason.UNKNOWN_COMPLETION, "no completion 'a9' in this log"),
        ({"group_id": "t9", "completion_id": "a1", "score": 1}, RefusalReason.UNKNOWN_GROUP, "no group 't9'"),
        ({"group_id": "t2", "completion_id": "a1", "score": 1}, RefusalReason.UNKNOWN_COMPLETION, "in group 't2'"),
        ({"completion_id": "0", "score": 1}, RefusalReason.AMBIGUOUS, "2 groups have a completion '0'"),
        ({"group_id": "t1", "score": 1}, RefusalReason.AMBIGUOUS, "group 't1' has 2 completions"),
        ({"completion_id": "a1"}, RefusalReason.UNREADABLE, "no column is a score among completion_id"),
        ({"score": 1}, RefusalReason.UNREADABLE, "no column is the id of a completion"),
        ({"completion_id": 1.5, "score": 1}, RefusalReason.UNREADABLE, "completion_id is 1.5"),
        ({"completion_id": "a1", "scores": [1, 0]}, RefusalReason.UNREADABLE, "one line for each completion"),
        ({"completion_id": "a1", "score": "good"}, RefusalReason.REWARD, "a reward is a finite number"),
        ({"completion_id": "a1", "score": float("nan")}, RefusalReason.REWARD, "a reward is a finite number"),
        ({"completion_id": "a1", "score": 7}, RefusalReason.REWARD_RANGE, "in [0.0, 1.0]"),
        ({"completion_id": "a1", "unscorable": "tired"}, RefusalReason.SCORE, "reason 'tired'"),
    ],
)
def test_a_row_that_does_not_fit_is_refused_with_its_place_and_the_others_go_in(
    log: ExperienceLog, row: dict[str, object], reason: RefusalReason, detail: str
) -> None:
    tally = log.feedback([row, {"completion_id": "a2", "score": 0}])
    assert tally.refused == {reason: 1} and tally.new == 1
    assert tally.examples[reason][0].startswith("row 1: ") and detail in tally.examples[reason][0]
    assert scores(log) == {"t1 a2": Score(0.0)} and log.quarantined() == []


def test_the_same_feedback_can_be_sent_any_number_of_times(log: ExperienceLog, tmp_path: Path) -> None:
    rows: list[dict[str, object]] = [
        {"completion_id": "a1", "score": 1},
        {"completion_id": "a1", "score": 1.0},
        {"completion_id": "a1", "score": 0},
        {"completion_id": "a2", "unscorable": "timeout", "detail": "no opinion"},
        {"completion_id": "a3", "score": None},
        {"completion_id": "a9", "score": 1},
    ]
    first = log.feedback(rows)
    assert counts(first) == (2, 1, 0, 2) and first.waiting == 1 and first.lines == 6
    before = log.snapshot()
    with ExperienceLog.open(tmp_path / "log") as other:  # another process knows them too
        for _ in range(2):
            again = other.feedback(rows)
            assert counts(again) == (0, 3, 0, 2) and again.refused == first.refused
    assert log.snapshot() == before
    assert scores(log) == {"t1 a1": Score(1.0), "t1 a2": Unscorable("timeout", "no opinion")}


def test_a_wrong_score_can_be_replaced(log: ExperienceLog) -> None:
    log.feedback([{"completion_id": "a1", "score": 1}])
    refused = log.feedback([{"completion_id": "a1", "score": 0.5}])
    assert refused.examples[RefusalReason.CONFLICT] == [
        "row 1: completion 'a1' has the score 1.0, here it is 0.5; if the earlier one is wrong, replace it"
    ]
    assert counts(log.feedback([{"completion_id": "a1", "score": 0.5}], replace=True)) == (0, 0, 1, 0)
    assert scores(log) == {"t1 a1": Score(0.5)}


def test_pending_lists_what_waits_and_nothing_else(log: ExperienceLog) -> None:
    log.append([make_group(0)])
    log.feedback([{"completion_id": "a1", "score": 1}, {"completion_id": "a3", "score": 0}])
    assert [one.completion.id for one in log.pending()] == ["a2", "0", "1", "0", "1"]
    assert {one.group.id for one in log.pending()} == {"t1", "s1", "s2"}
    log.give_up(Deadline(0.0, Overdue.DROP), now=next(log.pending()).appended_at + 60)
    assert list(log.pending()) == []


def test_scores_given_at_the_append_are_known(log: ExperienceLog) -> None:
    group = make_group(5, size=2)
    score = group.completions[0].score
    assert isinstance(score, Score)
    log.append([group, without_scores(make_group(6, size=2))])
    tally = log.feedback([{"completion_id": "g5/0", "score": score.reward}, {"completion_id": "g6/0", "score": 1}])
    assert counts(tally) == (1, 1, 0, 0)


def test_a_group_that_was_appended_later_is_found(log: ExperienceLog) -> None:
    assert log.feedback([{"completion_id": "late", "score": 1}]).new == 0
    log.append([waiting("t9", "late")])
    assert log.feedback([{"completion_id": "late", "score": 1}]).new == 1
