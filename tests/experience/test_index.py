from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.experience.index import Columns, Index


def rows(first: int, versions: list[int]) -> Columns:
    n = len(versions)
    return Columns(
        ordinal=range(first, first + n),
        oldest_version=versions,
        task=[0] * n,
        sources=[1] * n,
        ripe=[True] * n,
        completions=[8] * n,
        scored=[8] * n,
        reward_mean=[0.5] * n,
        reward_std=[0.5] * n,
        tokens=[100] * n,
    )


class TestIndex:
    def test_refuses_gaps_and_columns_of_unequal_length(self):
        index = Index()
        index.feed(rows(0, [0, 0]))
        with pytest.raises(ValueError, match="ordinals from 2 on without a gap"):
            index.feed(rows(3, [0]))
        with pytest.raises(ValueError, match="equally long"):
            replace(rows(0, [0, 0]), ripe=[True])
        with pytest.raises(ValueError, match="counts from 0; found -1"):
            index.feed(rows(-1, [0]))
        assert len(index) == 2

    def test_replaces_the_values_of_a_group_whose_feedback_changed(self):
        index = Index()
        index.feed(rows(0, [3, 3, 3]))
        index.feed(replace(rows(1, [3, 4]), ordinal=[1, 3], reward_mean=[0.25, 0.75]))
        assert index.columns.reward_mean.tolist() == [0.5, 0.25, 0.5, 0.75]
        assert len(index) == 4

    @settings(deadline=None)
    @given(st.lists(st.integers(0, 3000), max_size=6))
    def test_keeps_what_it_was_fed_for_any_sizes_of_feeds(self, sizes: list[int]):
        index, expected = Index(), []
        for size in sizes:
            versions = list(range(len(expected), len(expected) + size))
            index.feed(rows(len(expected), versions))
            expected += versions
        assert index.columns.oldest_version.tolist() == expected == index.columns.ordinal.tolist()
