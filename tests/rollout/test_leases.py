"""Prompts on loan: each is answered once, whoever dies."""

import itertools

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from offbeat.rollout.leases import Lease, LeaseDesk
from offbeat.types import Prompt


def endless(start: int = 0):
    return (Prompt(f"p{i}", [i], "t") for i in itertools.count(start))


def test_a_prompt_that_comes_back_keeps_its_group_and_its_seed() -> None:
    desk = LeaseDesk(endless(), name="r", seed=3, seconds=10)
    [first] = desk.take(1, 0.0, "a")
    desk.give_back([first.group_id])
    [again] = desk.take(1, 5.0, "b")
    assert (again.group_id, again.seed, again.prompt) == (first.group_id, first.seed, first.prompt)
    assert (again.by, again.deadline) == ("b", 15.0)


def test_a_desk_that_starts_later_gives_the_same_leases_from_there() -> None:
    whole = LeaseDesk(endless(), name="r", seed=3, seconds=10).take(5, 0.0, "a")
    rest = LeaseDesk(endless(3), name="r", seed=3, seconds=10, start=3).take(2, 0.0, "a")
    assert rest == whole[3:]


def test_a_late_finish_takes_the_prompt_out_of_the_line() -> None:
    desk = LeaseDesk(endless(), name="r", seed=0, seconds=10)
    desk.take(1, 0.0, "slow")
    assert [late.by for late in desk.expire(11.0)] == ["slow"]
    desk.finish(["r-0"])
    assert [lease.group_id for lease in desk.take(1, 12.0, "b")] == ["r-1"]


class Desk(RuleBasedStateMachine):
    """Whatever workers do, a prompt is with one of them, in the line, or answered."""

    def __init__(self) -> None:
        super().__init__()
        self.desk, self.now = LeaseDesk(endless(), name="r", seed=0, seconds=5), 0.0
        self.held: dict[str, Lease] = {}
        self.answered: set[str] = set()
        self.seen: set[str] = set()

    @rule(count=st.integers(0, 4), by=st.sampled_from("abc"))
    def take(self, count: int, by: str) -> None:
        self.drop_overdue()
        for lease in self.desk.take(count, self.now, by):
            assert lease.group_id not in self.held and lease.group_id not in self.answered
            self.held[lease.group_id] = lease
            self.seen.add(lease.group_id)

    @rule(which=st.data())
    def finish(self, which: st.DataObject) -> None:
        if self.seen:
            group_id = which.draw(st.sampled_from(sorted(self.seen)))
            self.desk.finish([group_id])
            self.held.pop(group_id, None)
            self.answered.add(group_id)

    @rule(which=st.data())
    def give_back(self, which: st.DataObject) -> None:
        if self.seen:
            group_id = which.draw(st.sampled_from(sorted(self.seen)))
            self.desk.give_back([group_id])
            self.held.pop(group_id, None)

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def drop_overdue(self) -> None:
        self.held = {key: lease for key, lease in self.held.items() if lease.deadline >= self.now}

    @invariant()
    def none_is_lost(self) -> None:
        assert {lease.group_id for lease in self.desk.out} >= self.held.keys()
        waiting = {lease.group_id for lease in self.desk._returned}
        assert self.seen - self.answered <= waiting | {lease.group_id for lease in self.desk.out}


Desk.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestDesk = Desk.TestCase
