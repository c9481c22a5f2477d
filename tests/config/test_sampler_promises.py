"""A sampler that cannot draw what it promises is refused, and the plan says how much comes from the past."""

from typing import Any

import pytest

from offbeat.config import examine, parse


def test_the_plan_says_how_much_of_a_batch_comes_from_the_past() -> None:
    config = parse({"prompts_per_step": 32, "sampler": {"mode": "replay", "share": 0.25}})
    assert config.fresh == 24
    assert "8 of the 32 are groups from the past, used up to 4 times and at most 200 steps old" in config.plan
    assert "(on average 25% of a batch)" in config.plan and config.plan.endswith("fresh groups lag 0")
    assert "past" not in parse({}).plan


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"sampler": {"share": 0.9, "reuse_budget": 2}}, "promises 29 past groups a step, but only 16 can be drawn"),
        ({"sampler": {"cooldown": 30}, "objective": {"preset": "grpo"}}, "drawn again after 31 steps and is retired"),
        ({"sampler": {"cooldown": 5}, "steps": 3}, "the run ends after 3 steps"),
        ({"sampler": {"share": 1.0}}, "leaves no room for fresh groups"),
    ],
)
def test_a_sampler_that_cannot_draw_what_it_promises_is_refused(settings: dict[str, Any], says: str) -> None:
    (found,) = examine({**settings, "sampler": {"mode": "replay", **settings["sampler"]}}).problems
    assert says in found
    if settings["sampler"].get("share") != 1.0:
        assert not examine(
            {**settings, "sampler": {"mode": "replay", **settings["sampler"]}, "run": {"experience": "log"}}
        ).problems, "groups of an existing log come on top"
