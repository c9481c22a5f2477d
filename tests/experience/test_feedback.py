"""Late scores, and deadlines for them."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.experience.feedback import Deadline, LateScore, Overdue
from offbeat.experience.log import ExperienceLog
from offbeat.experience.validation import RefusalReason
from offbeat.types import Score, Unscorable
from tests.fixtures.groups import RULES, make_group, without_scores


@pytest.fixture
def log(tmp_path: Path) -> Iterator[ExperienceLog]:
    with ExperienceLog.open(tmp_path / "log", rules=RULES) as opened:
        yield opened


def ripe(log: ExperienceLog) -> dict[int, bool]:
    rows, _ = log.index_since(None)
    return dict(zip(rows.ordinal.tolist(), rows.ripe.tolist(), strict=True))


def test_a_group_is_ripe_when_its_last_score_arrives(log: ExperienceLog) -> None:
    log.append([without_scores(make_group(0, size=2)), make_group(1)])
    assert ripe(log) == {0: False, 1: True}
    log.score([LateScore("g0", "g0/0", Score(1.0))])
    assert ripe(log) == {0: False, 1: True}
    log.score([LateScore("g0", "g0/1", Unscorable("crash", "segmentation fault"))])
    assert ripe(log) == {0: True, 1: True}
    assert [c.score for c in log.read(["g0"])[0].completions] == [Score(1.0), Unscorable("crash", "segmentation fault")]


def test_another_process_can_score(log: ExperienceLog, tmp_path: Path) -> None:
    log.append([without_scores(make_group(0, size=2))])
    with ExperienceLog.open(tmp_path / "log") as other:
        other.score([LateScore("g0", "g0/0", Score(1.0)), LateScore("g0", "g0/1", Score(0.0))])
    assert ripe(log) == {0: True}
    rows, _ = log.index_since(None)
    assert (rows.scored.tolist(), rows.reward_mean.tolist()) == ([2], [0.5])


def test_the_last_score_counts(log: ExperienceLog) -> None:
    log.append([make_group(0, size=2)])
    log.score([LateScore("g0", "g0/0", Score(0.25)), LateScore("g0", "g0/0", Score(0.75, {"style": 0.75}))])
    log.score([LateScore("g0", "g0/1", Score(0.1))])
    log.score([LateScore("g0", "g0/1", Score(0.25))])
    assert [c.score for c in log.read([0])[0].completions] == [Score(0.75, {"style": 0.75}), Score(0.25)]


def test_lag_counts_from_generation_however_late_the_score(log: ExperienceLog) -> None:
    log.append([without_scores(make_group(640, size=2))])
    log.score(LateScore("g640", f"g640/{i}", Score(1.0)) for i in range(2))
    rows, _ = log.index_since(None)
    assert rows.oldest_version.tolist() == [10]
    assert log.read([0])[0].oldest_version == 10


def test_invalid_feedback_is_quarantined_with_its_reason(log: ExperienceLog) -> None:
    log.append([without_scores(make_group(0, size=2))])
    receipt = log.score(
        [
            LateScore("g9", "g9/0", Score(1.0)),
            LateScore("g0", "g0/7", Score(1.0)),
            LateScore("g0", "g0/0", Score(3.0)),
            LateScore("g0", "g0/0", Score(float("nan"))),
            LateScore("g0", "g0/1", Score(1.0)),
        ]
    )
    assert receipt.accepted == ("g0/1",)
    assert [entry.refusal.reason for entry in log.quarantined()] == [
        RefusalReason.UNKNOWN_GROUP,
        RefusalReason.UNKNOWN_COMPLETION,
        RefusalReason.REWARD_RANGE,
        RefusalReason.REWARD,
    ]
    assert log.ledger().generated == 1, "refused feedback must not count as a refused group"


def test_no_group_is_overdue_before_the_deadline(log: ExperienceLog) -> None:
    log.append([without_scores(make_group(0))])
    assert log.give_up(Deadline(seconds=60), now=time.time() + 59) == []
    assert ripe(log) == {0: False}


def test_an_overdue_group_can_be_trained_on_the_scores_it_has(log: ExperienceLog) -> None:
    log.append([without_scores(make_group(0, size=4)), make_group(1)])
    log.score([LateScore("g0", "g0/0", Score(1.0)), LateScore("g0", "g0/2", Score(0.0))])
    assert log.give_up(Deadline(60, Overdue.TRAIN_SCORED), now=time.time() + 61) == ["g0"]
    rows, _ = log.index_since(None)
    assert (rows.ripe.tolist(), rows.scored.tolist()) == ([True, True], [2, 8])
    assert log.read(["g0"])[0].completions[1].score == Unscorable(
        "timeout", "no feedback within 60 s of being appended"
    )
    assert log.give_up(Deadline(60, Overdue.TRAIN_SCORED), now=time.time() + 61) == []


def test_an_overdue_group_can_be_dropped_permanently(log: ExperienceLog) -> None:
    log.append([without_scores(make_group(0, size=2)), make_group(1)])
    before = log.snapshot()
    assert log.give_up(Deadline(60, Overdue.DROP), now=time.time() + 61) == ["g0"]
    log.score(LateScore("g0", f"g0/{i}", Score(1.0)) for i in range(2))
    assert ripe(log) == {0: False, 1: True}
    assert log.ledger().dropped == {"expired": 1}
    assert log.ledger(before).dropped == {}
    assert log.give_up(Deadline(60, Overdue.DROP), now=time.time() + 61) == []
