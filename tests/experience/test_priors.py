"""The history behind shrunk advantages: discounted, without the group itself, and exact after a resume."""

import json

import numpy as np
import pytest

from offbeat.experience.index import NO_VERSION, Columns
from offbeat.experience.priors import PromptPriors


def columns(versions: list[int], means: list[float], prompts: list[int], scored: int = 4) -> Columns:
    n = len(versions)
    same = ([0] * n, [1] * n, [True] * n, [scored] * n, [scored] * n)
    return Columns(np.arange(n), versions, *same, means, [0.5] * n, [9] * n, prompts)  # type: ignore[arg-type]


def drawn(priors: PromptPriors, k: int, rows: Columns, ordinals: list[int], first: bool = True) -> list:
    return priors.draw(k, rows, np.array(ordinals), np.full(len(ordinals), first))


def test_another_prompt_only_moves_the_mean_of_all_prompts() -> None:
    rows, priors = columns([0, 0], [1.0, 0.5], [7, 8]), PromptPriors(halflife=10)
    drawn(priors, 0, rows, [0])
    [prior] = drawn(priors, 0, rows, [1])
    assert prior == pytest.approx((2 * 5 / 6, 2 * 1 / 6))  # four right answers and one of each: 5 of 6


def test_the_groups_of_one_batch_do_not_see_each_other() -> None:
    rows, priors = columns([0, 0], [1.0, 0.0], [7, 7]), PromptPriors(halflife=10)
    assert drawn(priors, 0, rows, [0, 1]) == [(1.0, 1.0), (1.0, 1.0)]


def test_a_replayed_group_does_not_count_for_itself() -> None:
    rows, with_it, without_it = columns([0, 3], [1.0, 0.25], [7, 7]), PromptPriors(10), PromptPriors(10)
    drawn(with_it, 0, rows, [0])
    for priors in (with_it, without_it):
        drawn(priors, 3, rows, [1])
    [again], [expected] = (drawn(priors, 9, rows, [0], first=False) for priors in (with_it, without_it))
    # Only the group itself is missing from the second history: its prior is what the other group says.
    right, wrong = 0.5**0.6 * 1, 0.5**0.6 * 3
    mean = (right + 1) / (right + wrong + 2)
    assert again == pytest.approx((2 * mean + right, 2 * (1 - mean) + wrong), abs=1e-12)
    assert expected != again, "without the first draw, there is nothing to leave out"


def test_answers_of_other_models_say_nothing_about_this_policy() -> None:
    rows, priors = columns([NO_VERSION, 0], [1.0, 0.5], [7, 7]), PromptPriors(halflife=10)
    drawn(priors, 0, rows, [0])
    assert drawn(priors, 0, rows, [1]) == [(1.0, 1.0)]


def test_a_restored_history_gives_the_same_priors() -> None:
    rows, priors = columns(list(range(9)), [0.1 * i for i in range(9)], [i % 3 for i in range(9)]), PromptPriors(3.3)
    for k in range(8):
        drawn(priors, k, rows, [k])
    other = PromptPriors(3.3)
    other.restore(json.loads(json.dumps(priors.state())))
    assert drawn(other, 11, rows, [8]) == drawn(priors, 11, rows, [8])
