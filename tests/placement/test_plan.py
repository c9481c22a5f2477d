"""Device plans: what is accepted fits, and what is refused names something that does."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings

from offbeat.config import parse
from offbeat.errors import CannotPlace, ConfigError
from offbeat.placement.hardware import Hardware
from offbeat.placement.nearest import plan_devices
from offbeat.placement.plan import DevicePlan, place
from offbeat.placement.shape import ModelShape
from tests.placement.device_plans import HARDWARE, SETTINGS, SHAPES, check_plan

MODELS = Path(__file__).parent / "models"
PARAMETERS = {"qwen2.5-0.5b": 494_032_768, "qwen3-8b": 8_190_735_360, "qwen3-32b": 32_762_123_264}
"""As published with the models."""


def shape(name: str) -> ModelShape:
    return ModelShape.from_config(json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_shape_counts_every_parameter(name: str) -> None:
    assert shape(name).parameters == PARAMETERS[name]


def test_half_a_billion_parameters_and_their_engine_share_a_gpu_of_24_gib() -> None:
    plan = plan_devices(parse({}), shape("qwen2.5-0.5b"), Hardware.parse("1x24"))
    assert plan.shared and plan.ranks == ((0, 0),)
    [engine] = plan.engines
    assert engine.devices == (0,) and 0.1 < engine.share < 0.9


def test_with_an_adapter_eight_billion_parameters_fit_where_full_training_does_not() -> None:
    settings = {"sampling": {"max_tokens": 1024}, "trainer": {"checkpoint_activations": True}}
    whole, adapted = (parse(settings | change) for change in ({}, {"adapter": {"rank": 8}}))
    with pytest.raises(CannotPlace):
        plan_devices(whole, shape("qwen3-8b"), Hardware.parse("1x48"))
    plan = plan_devices(adapted, shape("qwen3-8b"), Hardware.parse("1x48"))
    assert plan.shared and plan.rank.held["AdamW"] < 1 << 30
    assert plan.rank.held["frozen weights"] == 2 * PARAMETERS["qwen3-8b"]


def test_engines_get_gpus_of_their_own() -> None:
    config = parse({"workers": {"count": 3}})
    plan = plan_devices(config, shape("qwen2.5-0.5b"), Hardware.parse("4x24"))
    assert [engine.devices for engine in plan.engines] == [(1,), (2,), (3,)]
    assert not plan.shared and not any(engine.sleeps for engine in plan.engines)


def test_an_engine_stays_within_a_node() -> None:
    config = parse(
        {"run": {"place": "ray"}, "trainer": {"ranks": 2}, "engine": {"tensor_parallel": 2}, "workers": {"count": 3}}
    )
    plan = plan_devices(config, shape("qwen2.5-0.5b"), Hardware.parse("2x4x80"))
    assert [(engine.node, engine.devices) for engine in plan.engines] == [(0, (2, 3)), (1, (0, 1)), (1, (2, 3))]


def test_in_concurrent_mode_nobody_sleeps() -> None:
    config = parse({"run": {"mode": "concurrent", "max_lag": 2}})
    plan = place(config, shape("qwen2.5-0.5b"), Hardware.parse("1x80"))
    assert isinstance(plan, DevicePlan) and not plan.engines[0].sleeps


def test_a_refusal_says_what_is_too_large_and_what_fits() -> None:
    with pytest.raises(CannotPlace, match=r"AdamW.*nearest that fits: .*checkpoint_activations = true"):
        plan_devices(parse({"trainer": {"token_budget": 16384}}), shape("qwen2.5-0.5b"), Hardware.parse("1x24"))


def test_heads_that_cannot_be_split_name_the_nearest_value() -> None:
    config = parse({"engine": {"tensor_parallel": 4}})
    with pytest.raises(CannotPlace, match=r"14 heads, 2 key-value heads .* set engine\.tensor_parallel = 2"):
        plan_devices(config, shape("qwen2.5-0.5b"), Hardware.parse("8x80"))


@pytest.mark.parametrize("text", ["", "8", "x80", "0x80", "8x0", "8*80", "4x8x80x2", "8x80GB", "-1x80"])
def test_hardware_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="8x80"):
        Hardware.parse(text)


def test_a_mixture_of_experts_is_not_estimated() -> None:
    config = json.loads((MODELS / "qwen3-8b.json").read_text(encoding="utf-8"))
    with pytest.raises(ValueError, match="mixture of experts"):
        ModelShape.from_config({**config, "num_experts": 128})


@settings(max_examples=60, deadline=None)
@given(SETTINGS, SHAPES, HARDWARE)
def test_every_accepted_plan_fits_and_every_refusal_names_one_that_does(
    data: dict[str, Any], model: ModelShape, hardware: Hardware
) -> None:
    check_plan(data, model, hardware)
