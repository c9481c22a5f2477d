"""Which groups are valid, and the refusals of the others."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from offbeat.experience.feedback import LateScore
from offbeat.experience.log import ExperienceLog
from offbeat.experience.validation import RefusalReason, ValidationRules, refused, validate_group, validate_late_score
from offbeat.types import Group, Score, Unscorable
from tests.fixtures.groups import BREAKAGES, RULES, groups, make_group, malformed


@given(groups())
def test_a_valid_group_is_accepted(group: Group) -> None:
    assert validate_group(group, RULES) is None


@given(malformed())
@settings(max_examples=500, deadline=None)
def test_a_broken_group_is_refused_for_what_is_wrong_with_it(case: tuple[object, RefusalReason, str]) -> None:
    group, reason, what = case
    refusal = validate_group(group, RULES)
    assert refusal is not None, what
    assert refusal.reason == reason, (what, refusal)
    assert len(refusal.detail) > 10
    assert refused(group, refusal).payload


@pytest.mark.parametrize("what", sorted(BREAKAGES))
def test_every_refusal_has_a_one_line_message(what: str) -> None:
    reason, change = BREAKAGES[what]
    refusal = validate_group(change(make_group(3), np.random.default_rng(0)), RULES)
    assert refusal is not None and refusal.reason == reason
    assert " " in refusal.detail and "\n" not in refusal.detail


def test_a_refused_group_does_not_affect_the_others(tmp_path: Path) -> None:
    broken = [change(make_group(100 + i), np.random.default_rng(i)) for i, (_, change) in enumerate(BREAKAGES.values())]
    good = [make_group(i) for i in range(len(broken))]
    mixed = [group for pair in zip(good, broken, strict=True) for group in pair]
    with ExperienceLog.open(tmp_path, rules=RULES) as log:
        receipt = log.append(mixed)  # type: ignore[arg-type]
        assert receipt.accepted == tuple(group.id for group in good)
        assert [entry.refusal.reason for entry in receipt.refused] == [reason for reason, _ in BREAKAGES.values()]
        assert list(log.groups()) == good
        assert log.quarantined() == list(receipt.refused)
        assert log.ledger().dropped == {"quarantined": len(broken)}


def test_the_default_rules_leave_vocabulary_and_rewards_open() -> None:
    wild = replace(make_group(1).completions[0], token_ids=np.full(16, 2**31 - 1), score=Score(-1e9))
    assert validate_group(replace(make_group(1), completions=(wild,)), ValidationRules()) is None


def test_late_feedback_is_validated_like_feedback_that_arrives_with_the_group() -> None:
    known = ("arithmetic", ["g/0"])
    assert validate_late_score(LateScore("g", "g/0", Score(1.0)), known, RULES) is None
    assert validate_late_score(LateScore("g", "g/0", Unscorable("timeout")), known, RULES) is None
    broken: list[tuple[Any, RefusalReason]] = [
        ({"reward": 1.0}, RefusalReason.SCORE),
        (LateScore("g", "g/0", None), RefusalReason.SCORE),  # type: ignore[arg-type]
        (LateScore("g", "g/0", Score(2.0)), RefusalReason.REWARD_RANGE),
        (LateScore("g", "g/0", Score(float("nan"))), RefusalReason.REWARD),
        (LateScore("g", "g/1", Score(1.0)), RefusalReason.UNKNOWN_COMPLETION),
        (LateScore("g", ["g/0"], Score(1.0)), RefusalReason.UNKNOWN_COMPLETION),  # type: ignore[arg-type]
        (LateScore(["g"], "g/0", Score(1.0)), RefusalReason.ID),  # type: ignore[arg-type]
        (LateScore("g", "g/0", Score(1.0), scorer="\ud800"), RefusalReason.SOURCE),
    ]
    for late, reason in broken:
        refusal = validate_late_score(late, known, RULES)
        assert refusal is not None and refusal.reason == reason


def test_refused_feedback_does_not_affect_the_rest(tmp_path: Path) -> None:
    with ExperienceLog.open(tmp_path, rules=RULES) as log:
        log.append([make_group(0)])
        odd: list[Any] = [None, LateScore({}, "g0/0", Score(1.0)), LateScore("g0", "g0/0", Score(0.5))]  # type: ignore[arg-type]
        assert log.score(odd).accepted == ("g0/0",)
        assert len(log.quarantined()) == 2


def test_a_long_group_is_validated_within_two_milliseconds() -> None:
    group = make_group(1, size=8, tokens=1024)
    validate_group(group, RULES)
    times = []
    for _ in range(50):
        start = time.perf_counter()
        assert validate_group(group, RULES) is None
        times.append(time.perf_counter() - start)
    assert np.median(times) < 2e-3
