"""Who caused it that a completion could not be scored: the answer, which then has a score, or the grader."""

import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from offbeat.errors import TaskError
from offbeat.sandbox.meter import Usage
from offbeat.scoring import process
from offbeat.scoring.pool import ScoringPool
from offbeat.scoring.tally import FailureLimit
from offbeat.tasks import task as tasks
from offbeat.tasks.rewards import FOR_EVALUATION, Reward
from offbeat.tasks.task import Task
from offbeat.types import Score, Unscorable
from tests.scoring import scorers

WAIT = 120.0


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    with ScoringPool([Reward(scorers.act)], (0.25, 1.0), deadline=1.0, workers=1, memory_mib=256) as opened:
        yield opened


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("raise", "crash"),
        ("exit", "crash"),
        ("abort", "crash"),
        ("eat", "crash"),
        ("spin", "timeout"),
        ("slow", "timeout"),
        ("return nan", "invalid"),
        ("huge", "invalid"),
    ],
)
def test_an_answer_that_makes_its_scoring_fail_gets_the_lowest_reward(
    pool: ScoringPool, text: str, reason: str
) -> None:
    pool.score("return 0.5", {}).result(timeout=WAIT)
    outcome = pool.score(text, {}).result(timeout=WAIT)
    assert outcome == Score(0.25, {f"unscorable.{reason}": 0.25})
    assert isinstance(outcome, Score) and outcome.fault == reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("kill", "crash"),  # a signal, as from outside
        ("unsafe", "sandbox"),  # the sandbox failed
        ("offline", "crash"),  # a service failed
        ("late 0.4", "crash"),  # it failed after waiting for something
        ("sleep 60", "timeout"),  # it waited for something
        ("none", "invalid"),  # the reward function says that it does not apply
    ],
)
def test_a_failure_that_need_not_be_the_answers_has_no_score(pool: ScoringPool, text: str, reason: str) -> None:
    pool.score("return 0.5", {}).result(timeout=WAIT)
    outcome = pool.score(text, {}).result(timeout=WAIT)
    assert isinstance(outcome, Unscorable) and (outcome.reason, outcome.blame) == (reason, "grader")


def test_a_grader_that_fails_for_every_answer_is_to_blame(pool: ScoringPool) -> None:
    pool.score("return 0.5", {}).result(timeout=WAIT)
    outcome = pool.score("return 1", {"broken": True}).result(timeout=WAIT)
    assert isinstance(outcome, Unscorable) and outcome.blame == "grader" and "cannot be read" in outcome.detail


def test_a_failure_that_does_not_repeat_is_forgotten(pool: ScoringPool, tmp_path: Path) -> None:
    assert isinstance(pool.score(f"once {tmp_path / 'seen'}", {}).result(timeout=WAIT), Score)


def test_a_starved_worker_is_asked_again_and_then_the_machine_is_to_blame(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = itertools.count()

    class Starved:
        def __init__(self, pid: int) -> None:
            next(looks)

        def read(self) -> Usage:
            return Usage(wall=1e9, cpu=0.1, waited=1e9 - 0.1)

    monkeypatch.setattr(process, "TreeMeter", Starved)
    with ScoringPool([Reward(scorers.act)], workers=1, deadline=2.0) as pool:
        outcome = pool.score("spin", {}).result(timeout=WAIT)
    assert isinstance(outcome, Unscorable) and (outcome.reason, outcome.blame) == ("sandbox", "grader")
    assert "too busy to score it: the worker received" in outcome.detail and next(looks) == 2


def test_the_task_decides_what_such_an_answer_gets() -> None:
    rewards = (Reward(scorers.act),)
    penalized = Task("t", [], rewards, answer_fault=-0.5)
    left_out = Task("e", [], (*rewards, Reward(scorers.one, weight=0.0)), answer_fault="unscorable")
    with ScoringPool.of(tasks.replace(penalized, evaluation=left_out), workers=1) as pool:
        trained, evaluated = pool.score_all([("raise", {}), ("raise", {FOR_EVALUATION: True})])
    assert trained == Score(-0.5, {"unscorable.crash": -0.5})
    assert isinstance(evaluated, Unscorable) and (evaluated.reason, evaluated.blame) == ("crash", "answer")


def test_without_a_lower_end_of_the_range_such_an_answer_gets_the_lowest_reward_so_far() -> None:
    with ScoringPool([Reward(scorers.act)], (-math.inf, math.inf), workers=1) as pool:
        texts = ["return -2", "return 3", "raise", "return -4", "raise"]
        assert [getattr(outcome, "reward", None) for outcome in pool.score_all([(text, {}) for text in texts])] == [
            -2.0, 3.0, -2.0, -4.0, -4.0,
        ]  # fmt: skip


def test_a_setting_for_such_answers_that_means_nothing_is_refused() -> None:
    for wrong in ("zero", 1.5, float("-inf"), True):
        with pytest.raises(TaskError, match="answer_fault"):
            Task("t", [], (Reward(scorers.one),), answer_fault=wrong)  # type: ignore[arg-type]
    made = tasks.make("arithmetic", {"answer_fault": -1.0})
    assert made.answer_fault == -1.0 and (made.evaluation is None or made.evaluation.answer_fault == -1.0)


def test_a_policy_cannot_stop_the_pool_with_such_answers() -> None:
    with ScoringPool([Reward(scorers.act)], workers=1, limit=FailureLimit(0.1, window=20, least=5)) as pool:
        outcomes = pool.score_all([("raise", {})] * 30)
        assert outcomes == [Score(0.0, {"unscorable.crash": 0.0})] * 30
        assert pool.report().answer_faults == {"crash": 30} and pool.report().unscorable == {}
