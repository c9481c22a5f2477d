"""What a reward function has to look like."""

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
