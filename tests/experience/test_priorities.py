import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.experience.modes import Priority, uniforms, weighted_draw
from offbeat.seeds import derive


class TestWeightedDraw:
    @pytest.mark.parametrize(
        ("priority", "expected"),
        [
            (Priority(0, 0, 1, 0), [0.1, 0.2, 0.4, 0.3]),
            (Priority(0, 0, 0, 2), np.exp([0.0, -1.0, -2.0, -2.0])),
            (Priority(0.5, 0, 0, 0), np.exp([-1.5, -1.0, -0.5, 0.0])),
            (Priority(0, 1.0, 0, 0), np.exp([-1.0, -1.0, -2.0, -3.0])),
            (Priority(0, 0, 0, 0), [1, 1, 1, 1]),
        ],
        ids=["advantage", "difficulty", "recency", "reuse", "uniform"],
    )
    def test_draws_in_proportion_to_the_weights(self, priority: Priority, expected: list[float]):
        log_weights = priority.log_weights(
            lag=np.array([3, 2, 1, 0]),
            uses=np.array([1, 1, 2, 3]),
            reward_mean=np.array([0.0, 0.5, 1.0, 1.0]),
            reward_std=np.array([0.1, 0.2, 0.4, 0.3]),
        )
        n = 4000
        draws = [weighted_draw(derive(5, "replay", k), np.arange(4), log_weights, 2) for k in range(n)]
        first = np.bincount([draw[0] for draw in draws], minlength=4) / n
        share = np.array(expected) / np.sum(expected)
        error = 5 * np.sqrt(share * (1 - share) / n)
        assert (np.abs(first - share) < error).all()
        # The second is drawn from the remaining ones.
        after_0 = np.array([draw[1] for draw in draws if draw[0] == 0])
        left = np.where(np.arange(4) == 0, 0, share) / (1 - share[0])
        found = np.bincount(after_0, minlength=4) / len(after_0)
        assert (np.abs(found - left) <= 5 * np.sqrt(left * (1 - left) / len(after_0))).all()

    @settings(deadline=None)
    @given(st.integers(0, 2**63 - 1), st.integers(0, 50), st.integers(0, 60))
    def test_draws_without_repetition(self, key: int, n: int, count: int):
        chosen = weighted_draw(key, np.arange(n) + 100, np.zeros(n), count).tolist()
        assert len(chosen) == len(set(chosen)) == min(n, count)
        assert all(100 <= ordinal < 100 + n for ordinal in chosen)


class TestUniforms:
    def test_are_uniform_and_independent_between_keys(self):
        a, b = uniforms(1, np.arange(100_000)), uniforms(2, np.arange(100_000))
        counts, _ = np.histogram(a, bins=20, range=(0, 1))
        assert np.abs(counts - 5000).max() < 5 * 5000**0.5
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.02 and abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.02
