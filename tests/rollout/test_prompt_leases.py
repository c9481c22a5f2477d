"""Every leased prompt is answered once, even if workers die."""

import asyncio

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from offbeat.rollout.prompt_leases import LocalPrompts, PerVersion, PromptLease, PromptLeases
from offbeat.types import Prompt


def prompt_at(place: int) -> Prompt:
    return Prompt(f"p{place}", [place], "t")


def test_a_prompt_that_comes_back_keeps_its_group_and_its_seed() -> None:
    leases = PromptLeases(prompt_at, name="r", seed=3, seconds=10)
    [first] = leases.take(1, 0.0, "a", 0)
    leases.give_back([first.group_id])
    [again] = leases.take(1, 5.0, "b", 0)
    assert (again.group_id, again.seed, again.prompt) == (first.group_id, first.seed, first.prompt)
    assert (again.by, again.deadline) == ("b", 15.0)


def test_restored_leases_repeat_unanswered_prompts_and_continue_from_there() -> None:
    leases = PromptLeases(prompt_at, name="r", seed=3, seconds=10)
    first = leases.take(5, 0.0, "a", 0)
    leases.finish(["r-1", "r-3"])
    again = PromptLeases(prompt_at, name="r", seed=3, seconds=10)
    again.restore(leases.state())
    leases = again.take(4, 0.0, "a", 0)
    assert [lease.group_id for lease in leases] == ["r-0", "r-2", "r-4", "r-5"]
    assert leases[:3] == [first[0], first[2], first[4]]


def test_a_late_finish_removes_the_prompt_from_the_queue() -> None:
    leases = PromptLeases(prompt_at, name="r", seed=0, seconds=10)
    leases.take(1, 0.0, "slow", 0)
    assert [late.by for late in leases.expire(11.0)] == ["slow"]
    leases.finish(["r-0"])
    assert [lease.group_id for lease in leases.take(1, 12.0, "b", 0)] == ["r-1"]


def test_a_renewed_lease_lasts_and_one_that_went_to_another_worker_is_reported() -> None:
    leases = PromptLeases(prompt_at, name="r", seed=0, seconds=10)
    leases.take(2, 0.0, "slow", 0)
    assert leases.renew(["r-0"], 8.0, "slow") == []
    assert [late.group_id for late in leases.expire(12.0)] == ["r-1"]
    leases.take(1, 12.0, "other", 0)
    assert leases.renew(["r-0", "r-1"], 17.0, "slow") == ["r-1"]
    assert {lease.group_id: lease.deadline for lease in leases.out} == {"r-0": 27.0, "r-1": 22.0}
    assert leases.renew(["r-0"], 30.0, "slow") == ["r-0"], "too late"


class LeaseMachine(RuleBasedStateMachine):
    """At any time, a prompt is leased, queued, or answered."""

    def __init__(self) -> None:
        super().__init__()
        self.leases, self.now = PromptLeases(prompt_at, name="r", seed=0, seconds=5), 0.0
        self.held: dict[str, PromptLease] = {}
        self.answered: set[str] = set()
        self.seen: set[str] = set()

    @rule(count=st.integers(0, 4), by=st.sampled_from("abc"))
    def take(self, count: int, by: str) -> None:
        self.drop_overdue()
        for lease in self.leases.take(count, self.now, by, None):
            assert lease.group_id not in self.held and lease.group_id not in self.answered
            self.held[lease.group_id] = lease
            self.seen.add(lease.group_id)

    @rule(which=st.data())
    def finish(self, which: st.DataObject) -> None:
        if self.seen:
            group_id = which.draw(st.sampled_from(sorted(self.seen)))
            self.leases.finish([group_id])
            self.held.pop(group_id, None)
            self.answered.add(group_id)

    @rule(which=st.data())
    def give_back(self, which: st.DataObject) -> None:
        if self.seen:
            group_id = which.draw(st.sampled_from(sorted(self.seen)))
            self.leases.give_back([group_id])
            self.held.pop(group_id, None)

    @rule(by=st.sampled_from("abc"))
    def renew(self, by: str) -> None:
        self.drop_overdue()
        mine = [key for key, lease in self.held.items() if lease.by == by]
        assert self.leases.renew(mine, self.now, by) == []
        self.held |= {lease.group_id: lease for lease in self.leases.out if lease.group_id in mine}
        assert all(self.held[key].deadline == self.now + 5 for key in mine)

    @rule(seconds=st.floats(0, 4))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    def drop_overdue(self) -> None:
        self.held = {key: lease for key, lease in self.held.items() if lease.deadline >= self.now}

    @invariant()
    def none_is_lost(self) -> None:
        assert {lease.group_id for lease in self.leases.out} >= self.held.keys()
        waiting = {f"r-{place}" for place in self.leases._returned}
        assert self.seen - self.answered <= waiting | {lease.group_id for lease in self.leases.out}


LeaseMachine.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestLeases = LeaseMachine.TestCase


def test_prompts_whose_groups_are_logged_already_are_not_leased_again() -> None:
    leases = PromptLeases(prompt_at, name="r", seed=0, seconds=10)
    leases.restore({"next": 4, "unanswered": [1, 3]})
    logged = {f"r-{i}" for i in (0, 3, 5, 6, 2000)}
    leases.skip_logged(lambda ids: [one in logged for one in ids])
    taken = [lease.group_id for lease in leases.take(5, 0.0, "w", 0)]
    assert taken == ["r-1", "r-4", "r-7", "r-8", "r-9"]
    leases.finish(taken)
    assert leases.state() == {"next": 10, "unanswered": []}
    assert "r-2000" not in [lease.group_id for lease in leases.take(2000, 0.0, "w", 0)]


def test_a_worker_on_its_own_takes_a_limited_number_of_prompts_per_version() -> None:
    leases = LocalPrompts(PromptLeases(prompt_at, name="r", seed=0, seconds=10))
    prompts = PerVersion(leases, 3)

    async def go() -> list[int]:
        await prompts.serving("w", 0)
        taken = [len(await prompts.take(2, "w")) for _ in range(3)]
        await prompts.give_back(["r-2"])
        taken.append(len(await prompts.take(2, "w")))
        await prompts.serving("w", 4)
        return [*taken, len(await prompts.take(2, "w"))]

    assert asyncio.run(go()) == [2, 1, 0, 1, 2]
