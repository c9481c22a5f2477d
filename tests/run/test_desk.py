"""The desk grants requests first come, first served, and loses no lease."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from offbeat.rollout.prompt_leases import PromptLease, PromptLeases
from offbeat.run.admission import ConcurrentAdmission
from offbeat.run.desk import Desk
from offbeat.types import Prompt
from tests.fixtures.simulation import virtual_time


def on_desk(example: Callable[[Desk], Awaitable[None]], fresh: int = 2) -> None:
    """Run an example on a desk that has room for `fresh` groups of version 1, on a virtual clock."""

    async def go() -> None:
        leases = PromptLeases(lambda i: Prompt(f"p{i}", [i], "t"), name="g", seed=0, seconds=10)
        desk = Desk(leases, ConcurrentAdmission(max_lag=0, fresh=fresh), asyncio.get_running_loop().time)
        await desk.update(k=1, published=1, waiting=0, missing=0, finished=0)
        for name, version in (("a", 1), ("b", 1), ("late", 0), ("unproven", None)):
            await desk.serving(name, version)
        await example(desk)

    virtual_time.run(go())


async def finish_and_read(desk: Desk, lease: PromptLease) -> None:
    await desk.finish([lease.group_id])
    await desk.update(k=1, published=1, waiting=0, missing=0, finished=desk.finished)
    await asyncio.sleep(0)


def test_requests_are_granted_in_the_order_in_which_they_came_and_no_more_than_there_is_room() -> None:
    async def example(desk: Desk) -> None:
        names = ["late", "a", "unproven", "b", "a", "b"]
        asked = [asyncio.create_task(desk.take(1, name)) for name in names]
        await asyncio.sleep(0)
        assert [task.done() for task in asked] == [False, True, False, True, False, False]
        await finish_and_read(desk, asked[1].result()[0])
        assert [task.done() for task in asked] == [False, True, False, True, True, False]
        assert [lease.by for lease in desk.in_flight] == ["b", "a"] and desk.admitted == 3

    on_desk(example)


def test_a_worker_that_changes_its_version_keeps_its_place() -> None:
    async def example(desk: Desk) -> None:
        [first, second] = await desk.take(5, "a")
        early, later = asyncio.create_task(desk.take(1, "late")), asyncio.create_task(desk.take(1, "b"))
        await asyncio.sleep(0)
        await desk.serving("late", 1)
        await finish_and_read(desk, first)
        assert early.done() and not later.done()
        await finish_and_read(desk, second)
        assert later.done()

    on_desk(example)


def test_a_request_that_is_cancelled_after_its_grant_gives_its_prompts_back() -> None:
    async def example(desk: Desk) -> None:
        [first, _] = await desk.take(5, "a")
        waiting = asyncio.create_task(desk.take(1, "b"))
        await asyncio.sleep(0)
        await desk.finish([first.group_id])
        await desk.update(k=1, published=1, waiting=0, missing=0, finished=desk.finished)
        waiting.cancel()  # granted, but its task has not run again yet
        with pytest.raises(asyncio.CancelledError):
            await waiting
        [again] = await desk.take(5, "a")
        assert again.group_id == "g-2" and desk.progress.in_flight == 2

    on_desk(example)


def test_a_request_that_is_cancelled_while_it_waits_is_not_granted() -> None:
    async def example(desk: Desk) -> None:
        [first, _] = await desk.take(5, "a")
        gone, waits = asyncio.create_task(desk.take(1, "b")), asyncio.create_task(desk.take(1, "b"))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        await finish_and_read(desk, first)
        assert waits.done() and desk.admitted == 3

    on_desk(example)


def test_an_overdue_prompt_goes_to_the_request_that_waits() -> None:
    async def example(desk: Desk) -> None:
        now = asyncio.get_running_loop().time
        await desk.take(5, "a")
        await asyncio.sleep(4.0)
        assert await desk.renew(["g-1"], "a") == []
        [again] = await desk.take(5, "b")
        assert again.group_id == "g-0" and 10.0 <= now() < 10.1, "the lease that was renewed is not overdue"
        assert await desk.renew(["g-0"], "a") == ["g-0"]

    on_desk(example)


def test_a_listener_hears_of_a_change_and_of_nothing_else() -> None:
    async def example(desk: Desk) -> None:
        now = asyncio.get_running_loop().time
        await desk.wait_for_change(3.0)
        assert now() == pytest.approx(3.0)
        heard = asyncio.create_task(desk.wait_for_change(100.0))
        await asyncio.sleep(1.0)
        await desk.give_back([])
        await heard
        assert now() == pytest.approx(4.0)

    on_desk(example)


def test_a_wait_for_finished_groups_ends_with_the_last_one_and_earlier_if_none_is_generated() -> None:
    async def example(desk: Desk) -> None:
        now = asyncio.get_running_loop().time
        taken = [lease.group_id for lease in await desk.take(4, "a")]
        waiting = asyncio.create_task(desk.wait_for_finished(2, 5.0))
        await asyncio.sleep(1.0)
        await desk.finish(taken[:1])
        await asyncio.sleep(1.0)
        assert not waiting.done(), "one of two is not enough"
        await desk.finish(taken[1:2])
        await waiting
        assert now() == pytest.approx(2.0)
        await desk.wait_for_finished(4, 5.0)
        assert now() == pytest.approx(7.0), "at most so long"
        waiting = asyncio.create_task(desk.wait_for_finished(4, 5.0))
        await asyncio.sleep(1.0)
        await desk.give_back(taken[2:])
        await waiting
        assert now() == pytest.approx(8.0), "nothing is being generated"

    on_desk(example, fresh=4)
