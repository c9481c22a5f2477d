"""A sampler that cannot draw what it promises is refused, and the plan says how much comes from the past."""

import json
import re
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
        ({"sampler": {"share": 0.9, "reuse_budget": 2}}, "promises 29 past groups a step, but about 16 can be drawn"),
        (
            {"sampler": {"cooldown": 30}, "objective": {"preset": "grpo"}},
            "again after 31 steps at the earliest, and until it is 20 steps old",
        ),
        ({"sampler": {"cooldown": 5}, "steps": 3}, "set sampler.cooldown = 0"),
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


@pytest.mark.parametrize(
    "settings",
    [
        {"sampler": {"mode": "replay"}, "objective": {"preset": "gspo"}, "sync": {"every": 10}},
        {"sampler": {"mode": "replay", "retire_age": 5}, "sync": {"every": 10}},
        {"sampler": {"mode": "replay", "share": 0.9, "reuse_budget": 2}},
        {"sampler": {"mode": "replay", "cooldown": 30}, "objective": {"preset": "grpo"}},
    ],
)
def test_every_fix_that_a_refusal_suggests_works(settings: dict[str, Any]) -> None:
    [problem] = examine(settings).problems
    fixes = re.findall(r"set ([a-z_.]+) = ([\w.]+)", problem)
    assert fixes
    for key, value in fixes:
        table, _, name = key.rpartition(".")
        changed = {name: json.loads(value)}
        asked = {**settings, table: {**settings.get(table, {}), **changed}} if table else {**settings, **changed}
        assert examine(asked).problems == [], key
