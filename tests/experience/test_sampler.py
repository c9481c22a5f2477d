import itertools
import json
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offbeat.experience.index import NO_VERSION, Columns, Index
from offbeat.experience.modes import Fresh, Mode, Offline, Replay
from offbeat.experience.priors import PromptPriors
from offbeat.experience.sampler import Draw, Dropped, Retired, Sampler, SamplerLimits, Waiting
from offbeat.types import GroupDrift


def rows(first: int, versions: list[int], **columns: list[float]) -> Columns:
    n = len(versions)
    usual = {
        "task": [0] * n,
        "sources": [1] * n,
        "ripe": [True] * n,
        "completions": [8] * n,
        "scored": [8] * n,
        "reward_mean": [0.5] * n,
        "reward_std": [0.5] * n,
        "tokens": [100] * n,
    }
    return Columns(ordinal=range(first, first + n), oldest_version=versions, **(usual | columns))


def fed(mode: Mode, limits: SamplerLimits, columns: Columns, seed: int = 3) -> Sampler:
    sampler = Sampler(mode, limits, seed)
    sampler.feed(columns)
    return sampler


def batch(sampler: Sampler, k: int) -> tuple[int, ...]:
    draw = sampler.draw(k)
    assert isinstance(draw, Draw), draw
    return draw.ordinals


class TestFresh:
    def test_takes_each_group_once_and_the_oldest_first(self):
        sampler = fed(Fresh(), SamplerLimits(batch=3), rows(0, [0] * 7))
        assert batch(sampler, 0) == (0, 1, 2)
        assert batch(sampler, 1) == (3, 4, 5)
        assert sampler.draw(2) == Waiting(2, needed=2, cooling=0, dropped=())
        sampler.feed(rows(7, [2, 2]))
        assert batch(sampler, 2) == (6, 7, 8)

    def test_leaves_out_groups_without_feedback_until_it_arrives(self):
        sampler = fed(
            Fresh(), SamplerLimits(batch=2), rows(0, [0] * 4, ripe=[True, False, True, True], scored=[8, 0, 8, 8])
        )
        assert batch(sampler, 0) == (0, 2)
        sampler.feed(rows(1, [0]))
        assert batch(sampler, 1) == (1, 3)

    def test_expires_beyond_max_lag_and_reports_it_once(self):
        sampler = fed(Fresh(), SamplerLimits(batch=2, max_lag=2), rows(0, [0, 1, 2, 3, 3]))
        draw = sampler.draw(4)
        assert draw == Draw(
            4, (2, 3), (False, False), lags=(2, 1), dropped=(Dropped(0, "expired"), Dropped(1, "expired"))
        )
        assert sampler.draw(5) == Waiting(5, needed=1, cooling=0, dropped=())

    def test_expires_groups_whose_feedback_arrives_too_late(self):
        sampler = fed(Fresh(), SamplerLimits(batch=1, max_lag=1), rows(0, [0], ripe=[False], scored=[0]))
        assert sampler.draw(1).dropped == ()
        assert sampler.draw(2).dropped == (Dropped(0, "expired"),)
        sampler.feed(rows(0, [0]))
        assert sampler.draw(2) == Waiting(2, 1, 0, ())

    def test_never_expires_a_group_without_a_policy_version(self):
        sampler = fed(Fresh(), SamplerLimits(batch=1, max_lag=0), rows(0, [NO_VERSION]))
        assert sampler.draw(1000) == Draw(1000, (0,), (False,), (None,), ())

    def test_does_not_draw_groups_of_versions_that_are_not_reached_yet(self):
        # After a resume the log still has the groups that the lost steps generated.
        sampler = fed(Fresh(), SamplerLimits(batch=2, max_lag=3), rows(0, [0, 2, 2]))
        assert sampler.draw(0) == Waiting(0, needed=1, cooling=0, dropped=())
        assert batch(sampler, 2) == (0, 1)

    def test_drops_groups_that_are_too_small_and_on_request_those_with_equal_rewards(self):
        columns = rows(0, [0] * 4, scored=[1, 8, 0, 8], reward_std=[0.0, 0.0, 0.0, 0.4])
        assert fed(Fresh(), SamplerLimits(batch=2), columns).draw(0) == Draw(
            0, (1, 3), (False, False), (0, 0), (Dropped(0, "too-small"), Dropped(2, "too-small"))
        )
        strict = fed(Fresh(), SamplerLimits(batch=1, drop_zero_variance=True), columns).draw(0)
        assert strict.ordinals == (3,)
        assert strict.dropped == (Dropped(0, "too-small"), Dropped(1, "zero-variance"), Dropped(2, "too-small"))

    @settings(max_examples=100, deadline=None)
    @given(st.lists(st.integers(0, 12), min_size=1, max_size=60).map(sorted), st.lists(st.integers(0, 60), max_size=8))
    def test_draws_the_same_however_groups_in_order_of_version_arrive(self, versions: list[int], cuts: list[int]):
        whole = fed(Fresh(), SamplerLimits(batch=4, max_lag=5), rows(0, versions))
        piecewise = Sampler(Fresh(), SamplerLimits(batch=4, max_lag=5), seed=3)
        edges = sorted({0, len(versions), *(cut for cut in cuts if cut < len(versions))})
        pieces = [rows(a, versions[a:b]) for a, b in itertools.pairwise(edges)]
        for k in range(16):
            expected, found = whole.draw(k), piecewise.draw(k)
            while isinstance(found, Waiting) and pieces:
                piecewise.feed(pieces.pop(0))
                found = piecewise.draw(k)
            assert type(found) is type(expected)
            if isinstance(expected, Draw) and isinstance(found, Draw):
                assert found.ordinals == expected.ordinals


class TestReplay:
    def test_takes_its_share_from_the_past_and_fresh_groups_until_there_is_a_past(self):
        sampler = fed(Replay(share=0.5, reuse_budget=3), SamplerLimits(batch=4), rows(0, [0] * 12))
        first = sampler.draw(0)
        assert first.ordinals == (0, 1, 2, 3) and not any(first.replayed)
        second = sampler.draw(1)
        assert second.ordinals[:2] == (4, 5) and set(second.ordinals[2:]) <= {0, 1, 2, 3}
        assert second.replayed == (False, False, True, True)

    def test_counts_imported_groups_as_past_so_that_rollouts_do_not_queue_behind_them(self):
        sampler = fed(Replay(share=0.25), SamplerLimits(batch=4), rows(0, [NO_VERSION] * 5 + [0] * 3))
        draw = sampler.draw(0)
        assert draw.ordinals[:3] == (5, 6, 7) and draw.ordinals[3] < 5
        assert draw.lags[3] is None

    def test_waits_for_fresh_groups_rather_than_replaying_more(self):
        sampler = fed(Replay(share=0.5, reuse_budget=9), SamplerLimits(batch=4), rows(0, [0] * 5))
        batch(sampler, 0)
        assert sampler.draw(1) == Waiting(1, needed=1, cooling=0, dropped=())

    def test_fresh_groups_that_would_expire_come_before_past_groups(self):
        # The fresh groups were started while there were no past groups; then feedback arrived.
        columns = rows(0, [1] * 3 + [2] + [NO_VERSION] * 4)
        draw = fed(Replay(share=0.5), SamplerLimits(batch=4, max_lag=1), columns).draw(2)
        assert draw.ordinals[:3] == (0, 1, 2) and draw.replayed == (False, False, False, True)
        late = fed(Replay(share=0.5), SamplerLimits(batch=4, max_lag=2), columns).draw(2)
        assert late.replayed == (False, False, True, True)

    def test_does_not_draw_a_group_again_before_its_cooldown_has_passed(self):
        sampler = fed(Replay(share=0.5, reuse_budget=9, cooldown=2), SamplerLimits(batch=2), rows(0, [0] * 40))
        drawn: dict[int, int] = {}
        for k in range(12):
            for ordinal in batch(sampler, k):
                assert k - drawn.get(ordinal, -99) > 2
                drawn[ordinal] = k

    def test_draws_no_group_more_often_than_the_budget(self):
        sampler = fed(Replay(share=0.5, reuse_budget=2), SamplerLimits(batch=2), rows(0, [0] * 30))
        uses = Counter(ordinal for k in range(20) for ordinal in batch(sampler, k))
        assert max(uses.values()) == 2

    def test_closes_a_past_group_that_lags_too_far_without_calling_it_expired(self):
        limits = SamplerLimits(batch=2, max_lag=1, retire_age=1)
        sampler = fed(Replay(share=0.5, reuse_budget=99), limits, rows(0, [0, 0, 2, 2]))
        assert batch(sampler, 0) == (0, 1)
        draw = sampler.draw(2)
        assert draw.ordinals == (2, 3) and draw.dropped == ()
        assert draw.retired == (Retired(0, "age"), Retired(1, "age"))

    def test_the_lag_limit_is_for_fresh_groups_only(self):
        sampler = fed(Replay(share=0.5, reuse_budget=4), SamplerLimits(batch=2, max_lag=0), rows(0, [0, 0]))
        assert batch(sampler, 0) == (0, 1)
        for k in range(1, 4):
            sampler.feed(rows(k + 1, [k]))
            draw = sampler.draw(k)
            assert draw.ordinals[0] == k + 1 and draw.replayed == (False, True)

    def test_draws_differently_at_every_step(self):
        sampler = fed(Replay(share=1.0, reuse_budget=99), SamplerLimits(batch=1), rows(0, [NO_VERSION] * 1000))
        assert len({batch(sampler, k) for k in range(20)}) > 15

    def test_uses_the_current_values_of_the_index(self):
        # A group with equal rewards has 1/500 of the weight of one with a deviation of 0.5.
        favorite = rows(0, [NO_VERSION] * 5, reward_std=[0.0] * 4 + [0.5])
        drawn = Counter(batch(fed(Replay(share=1.0), SamplerLimits(batch=1), favorite, seed), 0) for seed in range(200))
        assert drawn[4,] > 190
        corrected = Counter()
        for seed in range(200):
            sampler = fed(Replay(share=1.0), SamplerLimits(batch=1), favorite, seed)
            sampler.feed(rows(4, [NO_VERSION], reward_std=[0.0]))
            sampler.feed(rows(2, [NO_VERSION], reward_std=[0.5]))
            corrected[batch(sampler, 0)] += 1
        assert corrected[2,] > 190


class TestOffline:
    def test_draws_every_group_once_in_each_epoch_in_another_order(self):
        sampler = fed(Offline(epochs=3), SamplerLimits(batch=5), rows(0, [0] * 20))
        epochs = [[o for k in range(4 * e, 4 * e + 4) for o in batch(sampler, k)] for e in range(3)]
        assert all(sorted(epoch) == list(range(20)) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2]
        assert sampler.draw(12) == Waiting(12, needed=5, cooling=0, dropped=())

    def test_spans_epochs_with_a_batch_that_has_no_group_twice(self):
        sampler = fed(Offline(), SamplerLimits(batch=5), rows(0, [0] * 7))
        drawn = [batch(sampler, k) for k in range(14)]
        assert all(len(set(ordinals)) == 5 for ordinals in drawn)
        assert set(Counter(o for ordinals in drawn for o in ordinals).values()) == {10}

    def test_reports_how_many_groups_the_cooldown_holds_back(self):
        sampler = fed(Offline(cooldown=1), SamplerLimits(batch=4), rows(0, [0] * 6))
        batch(sampler, 0)
        assert sampler.draw(1) == Waiting(1, needed=2, cooling=4, dropped=())

    @settings(max_examples=60, deadline=None)
    @given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 9), st.integers(0, 99))
    def test_keeps_the_cooldown_across_epochs_and_still_counts_evenly(self, size, cooldown, spare, seed):
        n = size * (cooldown + 1) + spare
        sampler = fed(Offline(cooldown=cooldown), SamplerLimits(batch=size), rows(0, [0] * n), seed)
        last: dict[int, int] = {}
        uses: Counter[int] = Counter()
        for k in range(40):
            ordinals = batch(sampler, k)
            assert len(set(ordinals)) == size
            for ordinal in ordinals:
                assert k - last.get(ordinal, -99) > cooldown
                last[ordinal] = k
            uses.update(ordinals)
        assert max(uses.values()) - min(uses[o] for o in range(n)) <= 2

    def test_loses_nothing_if_a_draw_comes_too_early(self):
        sampler = fed(Offline(epochs=1), SamplerLimits(batch=4), rows(0, [0] * 3))
        assert sampler.draw(0) == Waiting(0, needed=1, cooling=0, dropped=())
        sampler.feed(rows(3, [0] * 5))
        assert sorted(batch(sampler, 0) + batch(sampler, 1)) == list(range(8))

    def test_new_groups_join_the_next_epoch(self):
        sampler = fed(Offline(), SamplerLimits(batch=2), rows(0, [0] * 4))
        batch(sampler, 0)
        sampler.feed(rows(4, [0] * 2))
        assert set(batch(sampler, 1)) <= {0, 1, 2, 3}
        assert sorted(o for k in range(2, 5) for o in batch(sampler, k)) == list(range(6))

    def test_draws_a_late_group_as_often_as_the_others(self):
        sampler = fed(Offline(epochs=2), SamplerLimits(batch=2), rows(0, [0] * 4))
        uses = Counter(o for k in range(3) for o in batch(sampler, k))
        sampler.feed(rows(4, [0] * 2))
        uses.update(o for k in range(3, 6) for o in batch(sampler, k))
        assert uses == Counter(dict.fromkeys(range(6), 2))
        assert sampler.draw(6) == Waiting(6, needed=2, cooling=0, dropped=())

    def test_draws_groups_of_other_runs_whatever_their_versions_are(self):
        draw = fed(Offline(), SamplerLimits(batch=4), rows(0, [0, 3, 9, NO_VERSION])).draw(0)
        assert isinstance(draw, Draw) and sorted(draw.ordinals) == [0, 1, 2, 3]
        assert draw.lags == (None,) * 4, "versions of other runs say nothing about lag"

    def test_shuffles_by_the_seed(self):
        orders = {batch(fed(Offline(), SamplerLimits(batch=8), rows(0, [0] * 8), seed), 0) for seed in range(20)}
        assert len(orders) == 20


@dataclass
class Script:
    """Feeds and draws in a fixed order, as in a run."""

    mode: Mode
    limits: SamplerLimits
    feeds: list[Columns]

    def make(self) -> Sampler:
        return Sampler(self.mode, self.limits, seed=11, priors=PromptPriors(halflife=3))

    def play(self, kill_after: set[int]) -> list[Draw | Waiting]:
        """Draw once after each feed. After each step in `kill_after`, only the log and the JSON state survive."""
        sampler = self.make()
        seen = []
        for k, columns in enumerate(self.feeds):
            sampler.feed(columns)
            seen.append(sampler.draw(k))
            if isinstance(seen[-1], Draw):
                sampler.measured({one: GroupDrift((one * k) % 7 / 7, 1.0) for one in seen[-1].ordinals})
            if k in kill_after:
                state = json.dumps(sampler.state())
                sampler = self.make()
                for earlier in self.feeds[: k + 1]:
                    sampler.feed(earlier)
                sampler.restore(json.loads(state))
        return seen


modes = st.one_of(
    st.just(Fresh()),
    st.builds(Replay, st.sampled_from([0.25, 0.5, 1.0]), st.integers(2, 4), st.integers(0, 3)),
    st.builds(Offline, st.none() | st.integers(1, 3), st.integers(0, 2)),
)


@st.composite
def scripts(draw: st.DrawFn) -> Script:
    feeds, first = [], 0
    for k in range(draw(st.integers(1, 25))):
        n = draw(st.integers(0, 6))
        versions = draw(st.lists(st.sampled_from([NO_VERSION, k, k - 1, k - 2, 0]), min_size=n, max_size=n))
        ripe = draw(st.lists(st.booleans(), min_size=n, max_size=n))
        prompts = [one % 3 for one in range(n)]
        feed = rows(
            first, [max(v, NO_VERSION) for v in versions], ripe=ripe, scored=[8 * r for r in ripe], prompt=prompts
        )
        feeds.append(feed)
        first += n
        late = np.flatnonzero(~feed.ripe)
        if len(late) and draw(st.booleans()):
            columns = rows(int(feed.ordinal[late[0]]), [int(feed.oldest_version[late[0]])], reward_std=[0.2])
            feeds.append(columns)
    limits = SamplerLimits(
        draw(st.integers(1, 4)),
        draw(st.none() | st.integers(0, 4)),
        draw(st.booleans()),
        retire_drift=draw(st.none() | st.just(0.5)),
        retire_age=draw(st.none() | st.integers(0, 6)),
    )
    return Script(draw(modes), limits, feeds)


class TestResume:
    @settings(max_examples=300, deadline=None)
    @given(scripts(), st.sets(st.integers(0, 30)))
    def test_continues_with_the_identical_sequence_after_any_kills(self, script: Script, kills: set[int]):
        assert script.play(kills) == script.play(set())

    def test_refuses_a_state_of_another_mode_seed_or_log(self):
        state = fed(Fresh(), SamplerLimits(batch=1), rows(0, [0] * 3)).state()
        with pytest.raises(ValueError, match="mode = 'fresh', this sampler has 'offline'"):
            fed(Offline(), SamplerLimits(batch=1), rows(0, [0] * 3)).restore(state)
        with pytest.raises(ValueError, match="seed = 3, this sampler has 4"):
            fed(Fresh(), SamplerLimits(batch=1), rows(0, [0] * 3), seed=4).restore(state)
        with pytest.raises(ValueError, match="contains 3 groups, but only 2 were fed"):
            fed(Fresh(), SamplerLimits(batch=1), rows(0, [0] * 2)).restore(state)

    def test_refuses_to_draw_twice_for_one_step(self):
        sampler = fed(Fresh(), SamplerLimits(batch=1), rows(0, [0] * 3))
        batch(sampler, 5)
        with pytest.raises(ValueError, match="k = 5 is already drawn"):
            sampler.draw(5)

    def test_remembers_a_long_fresh_run_in_a_few_bytes(self):
        sampler = fed(Fresh(), SamplerLimits(batch=64), rows(0, [0] * 64_000))
        for k in range(900):
            batch(sampler, k)
        assert len(json.dumps(sampler.state())) < 200


class TestEveryMode:
    @settings(max_examples=300, deadline=None)
    @given(scripts())
    def test_exceeds_no_limit_and_loses_no_group(self, script: Script):
        sampler = Sampler(script.mode, script.limits, seed=5)
        index = Index()
        uses: Counter[int] = Counter()
        last: dict[int, int] = {}
        dropped: set[int] = set()
        for k, feed in enumerate(script.feeds):
            sampler.feed(feed)
            index.feed(feed)
            found = sampler.draw(k)
            fates = {drop.ordinal for drop in found.dropped}
            assert len(fates) == len(found.dropped) and not fates & (dropped | set(uses))
            dropped |= fates
            if isinstance(found, Waiting):
                ready = set(np.flatnonzero(index.columns.ripe).tolist()) - dropped - set(uses)
                assert not isinstance(script.mode, Fresh) or found.needed == script.limits.batch - len(ready)
                assert 0 < found.needed <= script.limits.batch
                continue
            assert len(set(found.ordinals)) == script.limits.batch
            for ordinal, lag in zip(found.ordinals, found.lags, strict=True):
                version = int(index.columns.oldest_version[ordinal])
                known = version != NO_VERSION and script.mode.own_versions
                assert lag == (k - version if known else None)
                fresh = ordinal not in uses
                assert not fresh or lag is None or script.limits.max_lag is None or lag <= script.limits.max_lag
                assert fresh or lag is None or script.limits.retire_age is None or lag <= script.limits.retire_age
                assert index.columns.ripe[ordinal] and ordinal not in dropped
                assert k - last.get(ordinal, -99) > script.mode.cooldown
                last[ordinal] = k
            uses.update(found.ordinals)
            assert script.mode.reuse_budget is None or max(uses.values()) <= script.mode.reuse_budget


class TestMemory:
    def test_is_well_below_200_bytes_a_group(self):
        sampler = Sampler(Offline(), SamplerLimits(batch=8), seed=0)
        for first in range(0, 50_000, 500):
            sampler.feed(rows(first, [0] * 500))
        batch(sampler, 0)
        assert sampler.nbytes / 50_000 < 100
