"""A paused run saves a checkpoint, waits for a person, and ends after its deadline."""

import asyncio
from dataclasses import replace

import pytest

from offbeat.events import EventKind
from offbeat.run.health import Action, Health, Rule
from tests.fixtures.simulation import virtual_time
from tests.fixtures.simulation.world import FaultRates, World, build


class Person:
    """Releases the run after some time."""

    def __init__(self, after: float) -> None:
        self._after, self.paused_at = after, -1.0

    def pause(self) -> None:
        self.paused_at = asyncio.get_running_loop().time()

    def is_released(self) -> bool:
        return asyncio.get_running_loop().time() >= self.paused_at + self._after


def paused(after: float) -> tuple[World, Person]:
    calm = FaultRates()
    world, person = World(20_001), Person(after)
    world.faults = calm

    async def drive() -> None:
        loop = build(world)
        loop.pause_control, loop.health = (
            person,
            Health([Rule("reward_mean", below=0.6, action=Action.PAUSE, advice="look")]),
        )
        loop.plan = replace(loop.plan, pause_seconds=3600.0)
        await loop.run()

    virtual_time.run(drive())
    return world, person


def test_a_paused_run_saves_waits_and_continues_when_released() -> None:
    world, person = paused(after=600)
    assert person.paused_at >= 0
    kinds = [event["kind"] for event in world.journal.events]
    kinds.remove(EventKind.SAVED)  # that of step 0
    assert kinds.index(EventKind.ALARM) < kinds.index(EventKind.SAVED) < kinds.index(EventKind.RELEASED)
    assert world.journal.events[-1]["step"] == world.steps


@pytest.mark.parametrize("after", [1e9])
def test_a_paused_run_that_is_not_released_ends_with_its_reason(after: float) -> None:
    world, _ = paused(after)
    end = world.journal.events[-1]
    assert end["kind"] == EventKind.ENDED and "paused for 3600 s: reward_mean below 0.6" in str(end["why"])
    assert end["step"] == 1 == world.saved_step
