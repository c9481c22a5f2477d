"""What a reward function has to look like."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from offbeat.tasks.rewards import Reward, from_trl


def test_a_function_with_other_parameters_is_refused_before_anything_starts() -> None:
    def length(text):
        return len(text)

    with pytest.raises(ValueError, match=r"too many positional arguments\); write length\(text, columns\)"):
        Reward(length)
    Reward(lambda *given: 1.0, name="any")
    Reward(min)  # written in C: it has no signature to look at
    from_trl(lambda completions, **columns: [1.0], name="as TRL calls it")


def test_a_trl_function_in_a_reward_of_its_own_is_told_how_to_become_one() -> None:
    def brief(completions, **columns):
        return [1.0 for _ in completions]

    with pytest.raises(ValueError, match=r"write from_trl\(brief\)"):
        Reward(brief, weight=0.5)


@pytest.mark.parametrize("weight", [np.float64(0.5), np.float32(0.5), Decimal("0.5"), Fraction(1, 2)])
def test_a_weight_of_another_type_of_number_becomes_a_float(weight: float) -> None:
    assert repr(Reward(lambda text, columns: 1.0, weight=weight).weight) == "0.5"


@pytest.mark.parametrize("weight", ["1", None, 10**400, math.nan, math.inf, Decimal("sNaN")])
def test_a_weight_that_is_no_finite_number_is_refused_with_a_sentence(weight: float) -> None:
    with pytest.raises(ValueError, match=r"reward 'short' has weight .*; a weight must be a finite number"):
        Reward(lambda text, columns: 1.0, name="short", weight=weight)
