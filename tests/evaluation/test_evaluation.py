"""Evaluation: estimators agree with brute force, intervals cover, unscorable completions are left out and counted."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.evaluation import Attempts, evaluate, maj_at_k, majority, pass_at_k


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_pass_at_k_is_the_mean_over_all_draws_of_k(correct: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(correct)))
    draws = [any(draw) for draw in itertools.combinations(correct, k)]
    assert math.isclose(pass_at_k(len(correct), sum(correct), k), sum(draws) / len(draws), abs_tol=1e-12)


def test_pass_at_k_is_unbiased() -> None:
    rng = np.random.default_rng(0)
    chance, k = 0.3, 3
    estimates = [pass_at_k(8, int(rng.binomial(8, chance)), k) for _ in range(20_000)]
    assert abs(np.mean(estimates) - (1 - (1 - chance) ** k)) < 0.006  # three standard errors


@pytest.mark.parametrize("numbers", [(3, 4, 1), (3, 1, 4), (3, 1, 0), (0, 0, 1)])
def test_pass_at_k_of_too_few_completions_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="is not defined"):
        pass_at_k(*numbers)


def test_the_majority_decides_and_ties_share() -> None:
    assert majority(["7", "8", "8", None, None, None], [True, False, False, False, False, False]) == 0.0
    assert majority(["7", "7", "8", "8", "9"], [True, True, False, False, False]) == 0.5
    assert majority([None, None], [False, False]) == 0.0


def test_maj_at_k_is_exact_with_few_draws_and_close_with_many() -> None:
    answers, correct = ["7"] * 9 + ["8"] * 7, [True] * 9 + [False] * 7
    exact = np.mean(
        [
            majority([answers[i] for i in draw], [correct[i] for i in draw])
            for draw in itertools.combinations(range(16), 5)
        ]
    )
    assert abs(maj_at_k(answers, correct, 5) - exact) < 0.08  # 256 draws: a standard error of 0.03
    assert maj_at_k(answers, correct, 5) == maj_at_k(answers, correct, 5)
    assert maj_at_k(answers[:1], correct[:1], 1) == 1.0


def test_intervals_are_over_prompts_not_over_completions() -> None:
    few_prompts = [Attempts(f"p{n}", "all", [float(n % 2)] * 50) for n in range(10)]
    many_prompts = [Attempts(f"p{n}", "all", [float(n % 2)]) for n in range(500)]
    wide, narrow = (evaluate(attempts)[0].estimates["pass@1"] for attempts in (few_prompts, many_prompts))
    assert wide.value == narrow.value == 0.5
    assert wide.high - wide.low > 4 * (narrow.high - narrow.low)


def test_an_unscorable_completion_is_neither_right_nor_wrong() -> None:
    [row] = evaluate(
        [Attempts("a", "x", [1.0, None, None]), Attempts("b", "x", [None]), Attempts("c", "x", [0.0, 0.5])]
    )
    assert (row.prompts, row.completions, row.unscorable) == (3, 6, 3)
    assert row.estimates["pass@1"].value == 0.5 and row.estimates["pass@1"].prompts == 2
    assert row.estimates["mean reward"].value == 0.625


def test_prompts_with_fewer_than_k_scores_do_not_count_towards_at_k() -> None:
    attempts = [
        Attempts("a", "x", [1.0, 0.0, None], ["7", "8", "9"]),
        Attempts("b", "x", [0.0, None, None], ["7", "7", "7"]),
    ]
    [row] = evaluate(attempts, ks=[2, 5])
    assert row.estimates["pass@2"].prompts == row.estimates["maj@2"].prompts == 1
    assert row.estimates["maj@2"].value == 0.5 and "pass@5" not in row.estimates


def test_without_answers_there_is_no_majority() -> None:
    assert set(evaluate([Attempts("a", "x", [1.0, 0.0])], ks=[2])[0].estimates) == {"mean reward", "pass@1", "pass@2"}


def test_slices_have_their_own_rows_and_sum_to_the_first_row() -> None:
    table = evaluate([Attempts(f"p{n}", "even" if n % 2 == 0 else "odd", [float(n < 4)]) for n in range(10)])
    assert [row.slice for row in table] == ["all", "even", "odd"]
    assert table[0].prompts == sum(row.prompts for row in table[1:])
    assert table[0].estimates["pass@1"].value == 0.4


def test_before_and_after_are_paired_by_prompt_and_greedy_stands_beside_sampled() -> None:
    before = [Attempts(f"p{n}", "all", [0.0, float(n % 2)], greedy=0.0) for n in range(20)]
    after = [Attempts(f"p{n}", "all", [1.0, float(n % 2)], greedy=1.0) for n in reversed(range(20))]
    [row] = evaluate(after, ks=[2], before=before, held_out=True)
    assert list(row.estimates) == ["mean reward", "pass@1", "pass@2", "greedy pass@1"] and row.held_out
    assert (row.before["pass@1"].value, row.estimates["pass@1"].value) == (0.25, 0.75)
    assert row.difference["pass@1"].value == 0.5 and 0 < row.difference["pass@1"].low < 0.5
    assert row.difference["greedy pass@1"].value == 1.0 and row.difference["greedy pass@1"].prompts == 20
