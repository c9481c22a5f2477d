from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.experience.index import NO_VERSION, Columns
from offbeat.experience.modes import Candidates, Offline, Replay, uniforms
from offbeat.experience.sampler import SamplerLimits


class TestSettings:
    @pytest.mark.parametrize(
        ("make", "words"),
        [
            (lambda: SamplerLimits(batch=0), "batch = 0"),
            (lambda: SamplerLimits(batch=1, max_lag=-1), "max_lag = -1"),
            (lambda: Replay(share=0.0), "share = 0.0"),
            (lambda: Replay(share=1.5), "share = 1.5"),
            (lambda: Replay(reuse_budget=1), "reuse_budget = 1"),
            (lambda: Replay(cooldown=-1), "cooldown = -1"),
            (lambda: Offline(epochs=0), "epochs = 0"),
            (lambda: Offline(cooldown=-1), "cooldown = -1"),
        ],
    )
    def test_invalid_settings_are_named_in_the_error(self, make: Callable[[], object], words: str):
        with pytest.raises(ValueError, match=words):
            make()


def candidates(versions: list[int], stds: list[float], uses: list[int], seed: int, k: int) -> Candidates:
    n = len(versions)
    columns = Columns(range(n), versions, *([one] * n for one in (0, 1, True, 8, 8, 0.5)), stds, [9] * n)
    none, all_ = np.zeros(n, np.bool_), np.ones(n, np.bool_)
    return Candidates(k, n, seed, columns, np.array(uses, np.int32), none, all_, none)


class TestWeights:
    @pytest.mark.parametrize(
        ("versions", "stds", "uses", "expected"),
        [
            ([3, 3, 3, 3], [0.1, 0.2, 0.4, 0.3], [1, 1, 1, 1], [0.1, 0.2, 0.4, 0.3]),
            ([0, 10, 20, 30], [0.5] * 4, [1] * 4, np.exp([-3.0, -2.0, -1.0, 0.0])),
            ([3, 3, 3, 3], [0.5] * 4, [1, 1, 2, 3], np.exp([-1.0, -1.0, -2.0, -3.0])),
            ([10, 10, NO_VERSION, NO_VERSION], [0.5] * 4, [1, 1, 1, 0], np.exp([-3.0, -3.0, -1.0, 0.0])),
        ],
        ids=["contrast", "recency", "reuse", "without a version"],
    )
    def test_past_groups_are_drawn_in_proportion_to_them(
        self, versions: list[int], stds: list[float], uses: list[int], expected: list[float]
    ):
        n = 4000
        draws = [candidates(versions, stds, uses, seed, k=30).sample_past(2) for seed in range(n)]
        first = np.bincount([draw[0] for draw in draws], minlength=4) / n
        share = np.array(expected) / np.sum(expected)
        error = 5 * np.sqrt(share * (1 - share) / n)
        assert (np.abs(first - share) < error).all()
        # The second is drawn from the remaining ones.
        likeliest = int(np.argmax(share))
        after = np.array([draw[1] for draw in draws if draw[0] == likeliest])
        left = np.where(np.arange(4) == likeliest, 0, share) / (1 - share[likeliest])
        found = np.bincount(after, minlength=4) / len(after)
        assert (np.abs(found - left) <= 5 * np.sqrt(left * (1 - left) / len(after))).all()

    @settings(deadline=None)
    @given(st.integers(0, 2**31), st.lists(st.integers(-1, 10**5), min_size=1, max_size=50), st.data())
    def test_no_group_is_drawn_twice(self, seed: int, versions: list[int], data: st.DataObject):
        n = len(versions)
        count = data.draw(st.integers(0, n))
        chosen = candidates(versions, [0.0] * n, [3] * n, seed, k=10**5).sample_past(count)
        assert len(chosen) == len(set(chosen)) == count and all(0 <= ordinal < n for ordinal in chosen)


class TestUniforms:
    def test_are_uniform_and_independent_between_keys(self):
        a, b = uniforms(1, np.arange(100_000)), uniforms(2, np.arange(100_000))
        counts, _ = np.histogram(a, bins=20, range=(0, 1))
        assert np.abs(counts - 5000).max() < 5 * 5000**0.5
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.02 and abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.02
