"""Who caused it that a completion could not be scored: the answer, which then has a score, or the grader."""

import itertools
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from lab.attacks import dodges
from offbeat.errors import InvalidReward, TaskError
from offbeat.run.health import Health
from offbeat.sandbox.meter import Usage
from offbeat.scoring import process
from offbeat.scoring.blame import MOST, FailureShare, find_cause
from offbeat.scoring.pool import ScoringPool
from offbeat.scoring.tally import FailureLimit
from offbeat.tasks import task as tasks
from offbeat.tasks.rewards import FOR_EVALUATION, Answers, Reward
from offbeat.tasks.task import Task, make
from offbeat.types import Json, Score, Unscorable
from tests.fixtures.attacks.dodgeable_rewards import (
    FAILING_FORMS,
    FAILS_ON_RIGHT,
    GRADERS,
    RIGHT_FORMS,
    WRONG_FORMS,
    Grader,
    judge_server,
)
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
        ("kill", "crash"),
        ("unsafe", "sandbox"),
        ("offline", "crash"),
        ("late 0.4", "crash"),
        ("sleep 60", "timeout"),
        ("none", "invalid"),
        ("return 5", "invalid"),
        ("string", "invalid"),
    ],
)
def test_a_failure_that_looks_like_the_machines_is_tried_on_controls_as_well(
    pool: ScoringPool, text: str, reason: str
) -> None:
    pool.score("return 0.5", {}).result(timeout=WAIT)
    assert pool.score(text, {}).result(timeout=WAIT) == Score(0.25, {f"unscorable.{reason}": 0.25})


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


def confidence(text: str, columns: Mapping[str, Json]) -> float:
    """Return the number in the answer, which nobody clips."""
    return float(text) / 42


def five_if_right(text: str, columns: Mapping[str, Json]) -> float:
    return 5.0 * (text == columns["answer"])


def test_a_policy_cannot_end_a_run_by_a_number_out_of_range() -> None:
    with ScoringPool([Reward(confidence)], workers=1) as pool:
        texts = ["42", "0", "1e300", "-7", "inf", "nan", "a\0b", "21"]
        outcomes = pool.score_all([(text, {"answer": "42"}) for text in texts])
    assert [one.reward for one in outcomes if isinstance(one, Score)] == [1.0, *[0.0] * 6, 0.5]


def test_a_range_that_is_wrong_for_right_answers_still_ends_the_run() -> None:
    with ScoringPool([Reward(five_if_right)], workers=1) as pool, pytest.raises(InvalidReward, match="reward 5"):
        pool.score_all([(text, {"answer": "42"}) for text in ("41", "40", "42")])


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5])
def test_a_grader_that_fails_at_random_seldom_punishes_honest_answers_or_lets_others_get_away(share: float) -> None:
    punished, away, most = dodges.simulated(share, honest=4_000, hostile=1_000, seed=1)
    assert punished <= 4 and away <= 2 and most <= 2 * MOST + 1


def test_a_grader_that_never_fails_at_random_needs_two_tries_and_one_at_30_percent_seven() -> None:
    def tries(share: FailureShare) -> int:
        asked = iter(range(1, 100))
        assert find_cause(lambda: not next(asked), lambda: True, share, lambda: True) == "answer"
        return next(asked)

    assert [tries(FailureShare(200, failures)) for failures in (0, 60)] == [2, 7]
    assert tries(FailureShare()) == 6


def test_a_service_that_is_down_costs_few_tries_and_then_one_control_each() -> None:
    asked = iter(range(1, 100))
    assert find_cause(lambda: not next(asked), lambda: not next(asked), FailureShare(200, 0), lambda: True) == "grader"
    assert next(asked) <= 4
    with ScoringPool([Reward(scorers.act)], workers=1, limit=FailureLimit(share=1.0)) as pool:
        pool.score_all([("return 1", {})] * 100)
        first, second = pool.score_all([(f"return 0.{i}", {"broken": True}) for i in (1, 2)])
        assert isinstance(first, Unscorable) and isinstance(second, Unscorable) and pool.report().restarts <= 2


@pytest.mark.parametrize("grader", [GRADERS[i] for i in (1, 5, 6, 20, 24, 40)], ids=lambda one: one.name)
def test_reward_functions_that_people_write_are_not_dodged(grader: Grader) -> None:
    with judge_server() as port:
        rows = dodges.attacked(grader, port, ("a" * 5_000, "a\0b", "nan", "1e300", "9**9**9**9"), before=4)
    assert all(row["good"] for row in rows), [row for row in rows if not row["good"]]


@pytest.mark.parametrize("at", [0, 3, 5])
def test_a_right_answer_that_makes_its_grader_fail_is_left_out_and_told_apart_from_a_dodge(at: int) -> None:
    function, columns = FAILS_ON_RIGHT[at]
    with ScoringPool([Reward(function)], (-math.inf, math.inf), workers=1) as pool:
        pool.score_all([(text, columns) for text in WRONG_FORMS])
        right = pool.score_all([(text, columns) for text in RIGHT_FORMS])
        wrong = pool.score_all([(text, columns) for text in FAILING_FORMS])
        assert [getattr(one, "blame", "") for one in right] == ["right"] * len(RIGHT_FORMS)
        assert "the answer: 'The answer is 42'" in str(right[1]) and all(isinstance(one, Score) for one in wrong)
        assert not pool.report().unscorable


def test_right_answers_that_make_the_grader_fail_are_an_alarm_at_once() -> None:
    [alarm] = Health().check({"right_unscorable_share": 0.01}, [], {})
    assert "fails on right answers" in str(alarm)


COMPARING = {
    "normalized in the group": """
import statistics
def reward(completions, answer, **kw):
    v = [-abs(float(c) - float(a)) for c, a in zip(completions, answer)]
    return [(x - statistics.mean(v)) / statistics.stdev(v) for x in v]
""",
    "a share of the sum": """
def reward(completions, **kw):
    v = [float(c) for c in completions]
    assert abs(sum(v)) > 1
    return [x / sum(v) for x in v]
""",
}


@pytest.mark.parametrize("kind", COMPARING)
@pytest.mark.parametrize("hostile", [["x"], ["x", "y"]])
def test_in_a_group_that_is_compared_only_the_answer_that_made_it_fail_is_punished(
    tmp_path: Path, kind: str, hostile: list[str]
) -> None:
    file = tmp_path / "comparing.py"
    rows = 'examples = [{"prompt": str(i), "answer": "2"} for i in range(30)]\nreward_range = (-10, 10)\n'
    file.write_text(rows + COMPARING[kind])
    task = make("custom", {"path": str(file)})
    with ScoringPool.of(task, workers=1) as pool:
        for example in task.examples:  # so many groups would end the run if the grader were blamed
            answers = Answers(["1", "2", "7", *hostile], example.record)
            scores = pool.score_group(answers).result(timeout=60)
            assert [isinstance(one, Score) and not one.fault for one in scores] == [True] * 3 + [False] * len(hostile)
            assert all(isinstance(one, Score) and one.reward == -10 for one in scores[3:])


def test_others_of_a_group_are_compared_again_without_an_answer_that_made_its_scoring_fail(tmp_path: Path) -> None:
    file = tmp_path / "comparing.py"
    file.write_text("""
examples = [{"prompt": "q", "answer": "4"}]
def reward(completions, answer, **kw):
    v = [abs(float(c) - float(a)) for c, a in zip(completions, answer)]
    return [1 - x / max(v) for x in v]
""")
    task = make("custom", {"path": str(file)})
    with ScoringPool.of(task, workers=1) as pool:
        for text in ("8", "inf"):  # the distance of `inf` would make every other answer look right
            scores = pool.score_group(Answers(["4", "5", "6", text], task.examples[0].record)).result(timeout=60)
        assert [one.reward for one in scores[:3] if isinstance(one, Score)] == [1.0, 0.5, 0.0]
