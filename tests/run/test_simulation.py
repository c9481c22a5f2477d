"""The loop with crashes and lost messages, in virtual time: a short form of lab/simulation/run.py."""

import asyncio
from unittest.mock import patch

import numpy as np
import pytest

from lab.simulation.run import check_schedule, check_world
from offbeat.rollout.engine import Request
from offbeat.types import Completion, Group, Prompt, Score, StepContext, VersionSpan
from tests.fixtures.simulation import virtual_time
from tests.fixtures.simulation.faults import FaultRates
from tests.fixtures.simulation.world import Broken, Learner, Member, World, build


@pytest.mark.parametrize("seed", range(20_000, 20_016))
def test_after_any_crash_lag_is_bounded_the_ledger_balances_and_the_run_ends(seed: int) -> None:
    check_schedule(seed)


@pytest.mark.parametrize("seed", range(30_000, 30_006))
def test_a_batch_that_is_refused_after_an_update_counts_as_one_step(seed: int) -> None:
    happened = check_schedule(seed, refusing=True)[1]
    assert happened["refused"] > 0


def test_the_same_seed_gives_the_same_trace() -> None:
    assert check_schedule(20_003) == check_schedule(20_003)


@pytest.mark.parametrize("concurrent", [False, True])
def test_a_completion_ten_times_slower_than_its_lease_is_generated_once_and_costs_no_engine(concurrent: bool) -> None:
    world = World(20_002)
    world.concurrent = concurrent
    world.faults = FaultRates(slow=0.3)
    with patch.object(world.rng, "random", lambda: 0.2):  # every completion is slow, none hangs
        check_world(world)
    assert set(world.generated.values()) == {1}
    assert not world.journal.of("worker lost") and not world.journal.of("worker recovered")


def test_a_completion_that_hangs_is_cancelled_named_and_generated_again() -> None:
    world = World(20_002)
    world.faults = FaultRates()

    async def takes(member: Member, request: Request) -> None:
        world.generated[request.id] += 1
        await asyncio.sleep(1e6 if request.id == "r-1" and world.generated["r-1"] == 1 else 0.5)

    with patch.object(Member, "_takes", takes):
        check_world(world)
    [notice] = [str(event["why"]) for event in world.journal.of("worker recovered")]
    assert "waited 1000 s for r-" in notice and "r-1" in notice and "the engine answers and is kept" in notice
    assert world.generated["r-1"] == 2 and not world.journal.of("worker lost")


def test_a_program_that_waits_for_nothing_raises() -> None:
    async def forever() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(virtual_time.StandStill):
        virtual_time.run(forever())


def test_writing_the_last_checkpoint_counts_as_saving() -> None:
    world = World(20_001)
    world.faults = FaultRates()

    class Slow(Learner):
        async def finish(self) -> None:
            await asyncio.sleep(7)

    async def drive() -> None:
        loop = build(world)
        loop.learner = Slow(world)
        await loop.run()

    virtual_time.run(drive())
    spent = world.journal.events[-1]["seconds"]
    assert spent["saving"] == pytest.approx(7) and spent["the loop itself"] == 0


@pytest.mark.parametrize("seed", [4_493, 6_676, 8_009])
def test_feedback_for_other_groups_makes_no_group_of_the_run_expire(seed: int) -> None:
    check_schedule(seed)


def test_the_checks_of_the_simulation_can_fail() -> None:
    world = World(20_000)
    learner = Learner(world)
    learner.step = world.max_lag + 1
    answer = Completion("g/0", np.array([2]), np.array([-0.5]), (VersionSpan(0, 0, 1),), score=Score(1.0))
    with pytest.raises(Broken, match="of lag"):
        virtual_time.run(learner.train([Group("g", Prompt("p", np.array([1]), "t"), (answer,))], StepContext()))
