"""Admission begins only groups that can be trained in time, and as many of them as possible."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from offbeat.run.admission import ConcurrentAdmission, LockstepAdmission, Progress

numbers = st.integers(0, 20)


@given(max_lag=st.integers(0, 8), fresh=st.integers(1, 6), k=numbers, lag=st.integers(0, 10), waiting=numbers)
def test_as_many_groups_are_admitted_as_can_be_trained_in_time(
    max_lag: int, fresh: int, k: int, lag: int, waiting: int
) -> None:
    rule, version = ConcurrentAdmission(max_lag, fresh), k - lag
    room = rule.room(Progress(k, k, waiting=waiting, in_flight=0, missing=0), version)
    begun = waiting + room
    if room:
        assert rule.can_train_in_time(k, {version: begun})
        assert not rule.can_train_in_time(k, {version: begun + 1})


@given(steps=st.lists(st.tuples(st.booleans(), st.integers(1, 5)), max_size=40), max_lag=st.integers(0, 5))
def test_every_admitted_group_is_in_time_if_the_oldest_version_is_trained_first(
    steps: list[tuple[bool, int]], max_lag: int
) -> None:
    """For any sequence of publishes and requests: begin what admission allows, train the oldest, check the lag."""
    fresh, k, published = 3, 0, 0
    queue: list[int] = []
    for publish, requested in steps:
        published = k if publish or k - published >= max_lag else published
        rule = ConcurrentAdmission(max_lag, fresh)
        room = rule.room(Progress(k, published, waiting=len(queue), in_flight=0, missing=0), published)
        queue = sorted([*queue, *[published] * min(room, requested)])
        assert rule.can_train_in_time(k, Counter(queue))
        if len(queue) >= fresh:
            batch, queue = queue[:fresh], queue[fresh:]
            assert all(k - version <= max_lag for version in batch)
            k += 1


def test_lockstep_admits_what_is_missing_to_the_newest_version_only() -> None:
    now = Progress(k=5, published=4, waiting=0, in_flight=1, missing=3)
    assert LockstepAdmission().room(now, version=4) == 2 and LockstepAdmission().room(now, version=3) == 0
