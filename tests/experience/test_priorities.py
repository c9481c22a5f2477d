import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.experience.index import NO_VERSION
from offbeat.experience.pools import LogWeights, WeightedGroups, WeightTree
from offbeat.experience.priority import Priority, uniforms
from offbeat.seeds import derive

VERSIONS = np.array([0, 1, 2, 3])


def four_groups(priority: Priority, versions: np.ndarray = VERSIONS) -> WeightedGroups:
    groups = WeightedGroups(priority)
    uses, mean, std = np.array([1, 1, 2, 3]), np.array([0.0, 0.5, 1.0, 1.0]), np.array([0.1, 0.2, 0.4, 0.3])
    groups.set(np.arange(4), versions, uses, mean, std)
    return groups


class TestWeightedGroups:
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
        n = 4000
        draws = [four_groups(priority).take(2, k=3, key=derive(5, "replay", k)) for k in range(n)]
        first = np.bincount([draw[0] for draw in draws], minlength=4) / n
        share = np.array(expected) / np.sum(expected)
        error = 5 * np.sqrt(share * (1 - share) / n)
        assert (np.abs(first - share) < error).all()
        # The second is drawn from the remaining ones.
        after_0 = np.array([draw[1] for draw in draws if draw[0] == 0])
        left = np.where(np.arange(4) == 0, 0, share) / (1 - share[0])
        found = np.bincount(after_0, minlength=4) / len(after_0)
        assert (np.abs(found - left) <= 5 * np.sqrt(left * (1 - left) / len(after_0))).all()

    def test_groups_with_a_version_fall_behind_those_without_as_the_run_goes_on(self):
        versions = np.array([0, 0, NO_VERSION, NO_VERSION])
        for k, share in ((0, 0.5), (4, 1 / (1 + np.exp(2.0)))):
            draws = [
                four_groups(Priority(0.5, 0, 0, 0), versions).take(1, k=k, key=derive(7, k, at)) for at in range(2000)
            ]
            found = np.mean([one < 2 for [one] in draws])
            assert abs(found - share) < 5 * np.sqrt(share * (1 - share) / 2000)

    @settings(deadline=None)
    @given(st.integers(0, 2**63 - 1), st.integers(1, 50), st.data())
    def test_draws_without_repetition_and_whatever_the_weights_are(self, key: int, n: int, data: st.DataObject):
        groups, versions = (
            WeightedGroups(Priority()),
            np.array(data.draw(st.lists(st.integers(-1, 10**5), min_size=n, max_size=n))),
        )
        groups.set(np.arange(n) + 100, versions, np.ones(n), np.zeros(n), np.ones(n))
        count = data.draw(st.integers(0, n))
        chosen = groups.take(count, k=10**5, key=key)
        assert len(chosen) == len(set(chosen)) == count and all(100 <= ordinal < 100 + n for ordinal in chosen)
        left = groups.take(n - count, k=10**5, key=key + 1)
        assert sorted([*chosen, *left]) == list(range(100, 100 + n)), "what was taken out is not drawn again"


class TestWeightTree:
    @settings(deadline=None)
    @given(st.lists(st.tuples(st.integers(0, 70), st.floats(0, 1e6)), max_size=60), st.floats(0, 1, exclude_max=True))
    def test_finds_what_a_cumulative_sum_finds(self, changes: list[tuple[int, float]], number: float):
        tree, weights = WeightTree(), np.zeros(71)
        for ordinal, weight in changes:
            tree.set(np.array([ordinal]), np.array([weight]))
            weights[ordinal] = weight
        assert tree.total == pytest.approx(weights.sum())
        if tree.total > 1e-9:
            [found] = tree.find(np.array([number]))
            before, tolerance = weights[:found].sum(), 1e-9 * tree.total
            assert (
                weights[found] > 0 and before - tolerance <= number * tree.total <= before + weights[found] + tolerance
            )

    def test_weights_that_all_underflow_are_drawn_by_their_ratio(self):
        weights = LogWeights()
        weights.set(np.array([0, 1, 2]), np.array([0.0, -5000.0, -5000.0 + np.log(3.0)]))
        weights.set(np.array([0]), np.array([-np.inf]))
        assert weights.log_total == pytest.approx(-5000.0 + np.log(4.0))
        found = weights.find(uniforms(3, np.arange(4000)))
        assert set(found.tolist()) == {1, 2} and abs(np.mean(found == 2) - 0.75) < 0.04


class TestUniforms:
    def test_are_uniform_and_independent_between_keys(self):
        a, b = uniforms(1, np.arange(100_000)), uniforms(2, np.arange(100_000))
        counts, _ = np.histogram(a, bins=20, range=(0, 1))
        assert np.abs(counts - 5000).max() < 5 * 5000**0.5
        assert abs(np.corrcoef(a, b)[0, 1]) < 0.02 and abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.02
