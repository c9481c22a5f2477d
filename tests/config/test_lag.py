"""Which lag a configuration allows: fresh groups, replayed ones, several updates, offline data."""

import tomllib
from collections.abc import Callable
from itertools import product
from math import inf
from typing import Any

import pytest

from offbeat.cli.init import recipes
from offbeat.config import examine, parse
from offbeat.config.known import LagEvidence
from offbeat.objective.presets import PRESETS


def problem(data: dict[str, Any]) -> str:
    (found,) = examine(data).problems
    return found


def replay(**sampler: object) -> dict[str, Any]:
    return {"sampler": {"mode": "replay", **sampler}}


def test_max_lag_bounds_fresh_groups_and_retire_age_bounds_replayed_ones() -> None:
    config = parse({**replay(retire_age=50), "sync": {"every": 4}})
    assert (config.fresh_lag, config.retire_age, config.largest_lag) == (3, 50, 50)
    assert parse({**replay(), "sync": {"every": 4}, "run": {"max_lag": 6}}).fresh_lag == 6


def test_open_versions_are_those_that_a_waiting_group_may_have() -> None:
    assert parse({"sync": {"every": 10}}).open_versions == 1
    assert parse({"sync": {"every": 1, "offset": 24}}).open_versions == 25
    assert parse({"sync": {"every": 2}, "run": {"mode": "concurrent", "max_lag": 6}}).open_versions == 4


@pytest.mark.parametrize(("preset", "age"), [("rec-oneside-nois", 200), ("grpo", 20), ("decoupled-ppo", 8)])
def test_a_group_retires_at_the_reported_lag_of_its_preset_and_at_most_after_200_steps(preset: str, age: int) -> None:
    assert parse({**replay(), "objective": {"preset": preset}}).retire_age == age


@pytest.mark.parametrize(("every", "updates", "lag"), [(1, 1, 0), (10, 1, 9), (1, 10, 9), (4, 2, 7)])
def test_an_update_counts_as_a_step_of_lag(every: int, updates: int, lag: int) -> None:
    assert parse({"sync": {"every": every}, "updates_per_batch": updates}).largest_lag == lag


def test_offline_recipes_use_an_objective_that_is_reported_for_data_of_any_age() -> None:
    found = {name: parse(tomllib.loads(text)) for name, text in recipes().items()}
    offline = {name for name, config in found.items() if config.run.mode == "offline"}
    assert offline == {"offline", "late-feedback", "supervised-first"}
    for name in [*offline, "offline-then-online"]:
        preset = PRESETS[found[name].objective.preset]
        assert preset.reported_lag == inf and not preset.objective.needs


LAGGING: dict[str, Callable[[int], dict[str, Any]]] = {
    "lockstep": lambda lag: {"sync": {"every": lag + 1}},
    "offset": lambda lag: {"sync": {"offset": lag}},
    "drift": lambda lag: {"sync": {"every": lag + 1, "drift_budget": 0.05}},
    "concurrent": lambda lag: {"run": {"mode": "concurrent", "max_lag": lag}},
    "replay": lambda lag: replay(share=0.1, retire_age=lag),
}


def test_something_is_said_of_every_preset_beyond_its_reported_lag_and_of_none_within() -> None:
    wrong, judged = [], 0
    for (preset, facts), (mode, settings), updates in product(PRESETS.items(), LAGGING.items(), (1, 4)):
        most = max(1, int(min(facts.reported_lag, 400) // updates))
        for steps in (most, most + 1):
            asked = {"prompts_per_step": 32, "updates_per_batch": updates, "objective": {"preset": preset}}
            examined = examine(asked | settings(steps))
            if not examined.problems:
                judged += 1
                silent = LagEvidence(examined.config).finding() is None
                if silent != (steps * updates + updates - 1 <= facts.reported_lag):
                    wrong.append((preset, mode, updates, steps))
    assert wrong == [] and judged > 10 * len(PRESETS)


def test_an_offset_adds_a_fixed_lag_in_lockstep_only() -> None:
    assert parse({"sync": {"every": 1, "offset": 10}}).plan.endswith("sync every step: lag 10 after the first 10 steps")
    assert parse({"sync": {"every": 4, "offset": 10}}).fresh_lag == 13
    assert "needs run.mode = 'lockstep'" in problem({"sync": {"offset": 10}, "run": {"mode": "concurrent"}})


@pytest.mark.parametrize(
    ("settings", "slots"),
    [
        ({}, 2),
        ({"sync": {"every": 10}}, 2),
        ({"sync": {"every": 4}, "run": {"mode": "concurrent", "max_lag": 8}}, 4),
        ({"sync": {"drift_budget": 0.05, "at_least": 2, "every": 4}}, 3),
        ({"sync": {"every": 1}, "run": {"mode": "concurrent", "max_lag": 100}}, 8),
    ],
    ids=["every step", "every ten steps", "concurrent", "by drift", "no more than 8"],
)
def test_an_engine_has_slots_for_the_adapters_of_fresh_groups_and_one_more(
    settings: dict[str, Any], slots: int
) -> None:
    """Lag 0 to 8 with a publish every 4 steps: versions k − 8, k − 4 and k generate, and the next one is checked."""
    assert parse(settings).adapter_slots == slots
