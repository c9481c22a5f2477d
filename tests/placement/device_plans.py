"""Random device plans: what is accepted fits, and what is refused names something that does."""

from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

from offbeat.config import Config, examine
from offbeat.errors import CannotPlace
from offbeat.placement.hardware import GIB, Hardware
from offbeat.placement.nearest import Nearest, changed, find_nearest, plan_devices
from offbeat.placement.plan import DevicePlan
from offbeat.placement.shape import ModelShape

SHAPES = st.builds(
    lambda heads, ratio, size, layers, inner, vocabulary, tied: ModelShape(
        vocabulary=vocabulary,
        hidden=heads * size,
        inner=inner * heads * size,
        layers=layers,
        heads=heads,
        kv_heads=max(1, heads // ratio),
        head_size=size,
        tied=tied,
        context=32768,
    ),
    st.sampled_from([8, 9, 14, 16, 32, 40, 64]),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([64, 128]),
    st.integers(4, 80),
    st.integers(2, 5),
    st.sampled_from([32_000, 151_936]),
    st.booleans(),
)
HARDWARE = st.builds(Hardware, st.integers(1, 8), st.integers(1, 8), st.sampled_from([8, 16, 24, 40, 48, 80, 141]))
SETTINGS: st.SearchStrategy[dict[str, Any]] = st.fixed_dictionaries(
    {
        "trainer": st.fixed_dictionaries(
            {
                "ranks": st.sampled_from([1, 2, 3, 4, 8, 16, 32]),
                "token_budget": st.sampled_from([2048, 4096, 16384, 34816]),
                "checkpoint_activations": st.booleans(),
            }
        ),
        "workers": st.fixed_dictionaries({"count": st.integers(0, 8)}),
        "engine": st.fixed_dictionaries({"tensor_parallel": st.sampled_from([1, 2, 3, 4, 8])}),
        "run": st.fixed_dictionaries(
            {"place": st.sampled_from(["local", "ray"]), "mode": st.sampled_from(["lockstep", "concurrent"])}
        ),
    }
)


def valid(data: dict[str, Any]) -> Config:
    examined = examine(data)
    assume(not examined.problems)
    return examined.config


def check_plan(data: dict[str, Any], model: ModelShape, hardware: Hardware) -> str:
    """Plan one case and check the result; return what happened."""
    config = valid(data)
    try:
        plan = plan_devices(config, model, hardware)
    except CannotPlace as refused:
        nearest = refused.nearest
        assert isinstance(nearest, Nearest) and str(nearest) in str(refused)
        other = changed(config, nearest.settings)
        assert not examine(other.model_dump(mode="json")).problems, "what is suggested is a valid configuration"
        fits(plan_devices(other, model, nearest.hardware or hardware), other)
        return "refused"
    fits(plan, config)
    assert find_nearest(config, model, hardware) == Nearest({}, None), "a plan that fits needs no change"
    return "in turns" if any(one.sleeps for one in plan.engines) else "shared" if plan.shared else "apart"


def fits(plan: DevicePlan, config: Config) -> None:
    """Assert that every part has its devices, that no GPU is used twice without turns, and that memory suffices."""
    total = plan.hardware.memory_gib * GIB
    assert len(plan.ranks) == len(set(plan.ranks)) == config.trainer.ranks
    assert len(plan.engines) == config.workers.count
    engines = [(engine.node, device) for engine in plan.engines for device in engine.devices]
    assert len(engines) == len(set(engines)) == config.workers.count * config.engine.tensor_parallel
    everywhere = {(node, gpu) for node in range(plan.hardware.nodes) for gpu in range(plan.hardware.gpus)}
    assert {*plan.ranks, *engines} <= everywhere
    if config.run.place == "local":
        assert {node for node, _ in (*plan.ranks, *engines)} == {0}
    both = set(engines) & set(plan.ranks)
    assert not both or (plan.hardware.gpus == 1 and plan.shared)
    assert plan.replicas * plan.shards == len(plan.ranks)
    for where, size in plan.used():
        assert size <= total, f"{where} holds {size / GIB:.1f} of {total / GIB:.1f} GiB"
    if plan.engine is not None and plan.engines:
        assert plan.engine.least <= plan.engines[0].share * total
