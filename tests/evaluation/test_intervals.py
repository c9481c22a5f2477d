"""Intervals over prompts cover what they promise, and keep a width where every answer agrees."""

import numpy as np
import pytest

from offbeat.evaluation import paired_difference, rate_interval


@pytest.mark.parametrize(
    ("right", "of", "low", "high"),
    [(0, 20, 0.0, 0.1684), (20, 20, 0.8316, 1.0), (5, 20, 0.0866, 0.4910), (1, 10, 0.0025, 0.4450)],
)
def test_with_one_completion_per_prompt_it_is_the_exact_interval_of_clopper_and_pearson(
    right: int, of: int, low: float, high: float
) -> None:
    found = rate_interval([1.0] * right + [0.0] * (of - right))
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-4)  # published tables


def test_rewards_outside_0_to_1_get_students_interval() -> None:
    found = rate_interval([-1.0, 1.0, 0.0, 2.0])
    assert (found.value, found.high) == pytest.approx((0.5, 0.5 + 3.1824 * np.std([-1, 1, 0, 2], ddof=1) / 2), abs=1e-3)


def test_more_completions_narrow_the_interval_only_if_prompts_are_alike() -> None:
    alike, different = [0.5, 0.25, 0.75, 0.5] * 10, [0.0, 0.0, 1.0, 1.0] * 10
    narrow, wide = (rate_interval(values, completions=400) for values in (alike, different))
    assert narrow.value == wide.value and narrow.high - narrow.low < 0.6 * (wide.high - wide.low)
    assert wide == rate_interval(different), "attempts that agree carry no more than one would"


@pytest.mark.parametrize(("a", "b", "samples"), [(0.1, 0.9, 8), (4.0, 0.2, 4), (9.0, 9.0, 1)])
def test_the_interval_of_20_prompts_covers_the_true_rate(a: float, b: float, samples: int) -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for _ in range(200):
        values = rng.binomial(samples, rng.beta(a, b, 20)) / samples
        found = rate_interval(values.tolist(), 20 * samples)
        covered += found.low <= a / (a + b) <= found.high
    assert covered >= 182  # 93 % of 200 is 186, give or take 2 standard errors


def test_a_difference_is_paired_and_has_a_width_if_nothing_changed() -> None:
    hard_and_easy = [0.0, 1.0] * 20
    same = paired_difference(hard_and_easy, hard_and_easy)
    assert same.value == 0 and -0.08 < same.low < 0 < same.high < 0.08
    unpaired = paired_difference(hard_and_easy, hard_and_easy[::-1])
    assert unpaired.high - unpaired.low > 3 * (same.high - same.low)
    perfect = paired_difference([1.0] * 20, [1.0] * 20)
    assert perfect.low < -0.1 and perfect.high > 0.1, "20 right answers do not prove that there is no difference"
