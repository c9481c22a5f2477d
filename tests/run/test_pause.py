"""A paused run has a checkpoint, waits for a person, and gives up after its deadline."""

import asyncio
from dataclasses import replace

import pytest

from lab.simulation import run as simulate_run
from lab.simulation import virtual_time
from offbeat.run.health import Action, Health, Rule


class Person:
    """Opens the gate after some time."""

    def __init__(self, after: float) -> None:
        self._after, self.shut_at = after, -1.0

    def shut(self) -> None:
        self.shut_at = asyncio.get_running_loop().time()

    def is_open(self) -> bool:
        return asyncio.get_running_loop().time() >= self.shut_at + self._after


def paused(after: float) -> tuple[simulate_run.World, Person]:
    calm = simulate_run.Weather(*[0.0] * 9)
    world, person = simulate_run.World(20_001), Person(after)
    world.weather = calm

    async def drive() -> None:
        loop = simulate_run.build(world)
        loop.gate, loop.health = person, Health([Rule("reward_mean", below=0.6, action=Action.PAUSE, advice="look")])
        loop.plan = replace(loop.plan, pause_seconds=3600.0)
        await loop.run()

    virtual_time.run(drive())
    return world, person


def test_it_saves_waits_and_goes_on_when_let() -> None:
    world, person = paused(after=600)
    assert person.shut_at >= 0
    kinds = [event["kind"] for event in world.journal.events]
    assert kinds.index("alarm") < kinds.index("saved") < kinds.index("released")
    assert world.journal.events[-1]["step"] == world.steps


@pytest.mark.parametrize("after", [1e9])
def test_nobody_comes_and_the_run_ends_with_its_reason(after: float) -> None:
    world, _ = paused(after)
    end = world.journal.events[-1]
    assert end["kind"] == "ended" and "paused for 3600 s: reward_mean below 0.6" in str(end["why"])
    assert end["step"] == 1 == world.saved_step
