"""No stored reward is 0 without the reward function having said 0, unless `offbeat view` says whose fault it is."""

from pathlib import Path

import pytest

from offbeat.errors import InvalidReward, TaskError
from offbeat.reports.groups import describe_score
from offbeat.scoring.pool import Outcome
from offbeat.tasks.rewards import Answers, Reward, examine, reward_of
from offbeat.tasks.task import Task
from offbeat.types import Score, Unscorable
from tests.fixtures.attacks.odd_rewards import ANSWERS, COLUMNS, ODD, OTHERS, Odd
from tests.scoring import silent_zeros

IN_THIS_PROCESS = [odd for odd in [*ODD, *OTHERS] if "process" not in odd.name]


@pytest.mark.parametrize("odd", IN_THIS_PROCESS, ids=lambda odd: odd.name)
def test_an_odd_reward_function_never_says_zero_by_accident(odd: Odd) -> None:
    """As a worker examines it, before the pool finds out who is to blame for a failure."""
    rewards = [one if isinstance(one, Reward) else reward_of(one) for one in odd.rewards]
    found: list[Outcome] | str
    try:
        Task("odd", [], tuple(rewards), odd.reward_range)
        found = [*examine(rewards, odd.reward_range, Answers(ANSWERS, COLUMNS))]
    except (InvalidReward, TaskError) as error:
        found = str(error)
    if isinstance(odd.expected, str) or isinstance(found, str):
        assert isinstance(found, str) and found.startswith(str(odd.expected))
        return
    for outcome, expected, fault in zip(found, odd.expected, odd.faults, strict=True):
        if fault or expected is None or isinstance(outcome, Unscorable):
            assert isinstance(outcome, Unscorable)
        else:
            assert outcome.reward == expected


@pytest.mark.parametrize("name", silent_zeros.ELSEWHERE)
def test_no_zero_comes_from_elsewhere(name: str, tmp_path: Path) -> None:
    assert silent_zeros.ELSEWHERE[name](tmp_path)


@pytest.mark.parametrize(
    "odd", [one for one in OTHERS if "exit" in one.name or "group" in one.name], ids=lambda o: o.name
)
def test_the_pool_marks_what_is_the_answers_fault(odd: Odd) -> None:
    found = silent_zeros.scored(odd)
    assert silent_zeros.came_to(odd, found), found
    assert silent_zeros.verdict(found, True) == (silent_zeros.VISIBLE if any(odd.faults) else silent_zeros.CLOSED)


def test_a_zero_by_fault_says_so_where_people_look() -> None:
    assert describe_score(Score(0.0, {"unscorable.crash": 0.0})) == "0 (the answer's fault: its scoring failed, crash)"
    assert describe_score(Score(0.0, {"correct": 0.0})) == "0"


def test_a_zero_that_is_neither_closed_nor_visible_is_noticed() -> None:
    zeros: list[Outcome] = [Score(1.0), Score(0.0)]
    odd = next(one for one in ODD if one.name == "None for some")
    assert silent_zeros.verdict(zeros, silent_zeros.came_to(odd, zeros)) == silent_zeros.SILENT
