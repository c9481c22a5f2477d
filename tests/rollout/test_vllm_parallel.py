"""vLLM split over two processes, on CPU, and what is refused before it starts."""

import asyncio
import json
from pathlib import Path

import pytest

from offbeat.errors import ConfigError
from offbeat.rollout.vllm import VllmEngine
from offbeat.rollout.vllm_settings import VllmSettings, pinned
from tests.fixtures.engine_runs import (
    SHARDED,
    MisSharded,
    broken_loads,
    engine_for,
    load_while_generating,
    sync_rounds,
)
from tests.fixtures.engine_runs import judge as judge_run
from tests.fixtures.tiny_model import save_llama


@pytest.mark.parametrize(
    ("heads", "shared", "width", "size", "nearest"),
    [(9, 3, 1536, 2, 1), (9, 3, 1536, 4, 3), (32, 8, 11008, 16, None), (14, 2, 4864, 4, 2), (12, 4, 100, 3, 2)],
)
def test_a_size_that_does_not_divide_the_model_is_refused_with_the_nearest_one(
    tmp_path: Path, heads: int, shared: int, width: int, size: int, nearest: int | None
) -> None:
    config = {"num_attention_heads": heads, "num_key_value_heads": shared, "intermediate_size": width}
    config |= {"hidden_size": 64 * heads, "num_hidden_layers": 1, "vocab_size": 16}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    if nearest is None:
        VllmSettings(max_model_len=64, max_num_seqs=4, tensor_parallel=size).check(tmp_path)
        return
    with pytest.raises(
        ConfigError, match=rf"engine.tensor_parallel = {size}: .* set engine.tensor_parallel = {nearest}$"
    ):
        VllmSettings(max_model_len=64, max_num_seqs=4, tensor_parallel=size).check(tmp_path)


def test_what_cannot_start_is_refused_before_vllm_is_imported(tmp_path: Path) -> None:
    save_llama(tmp_path, tied=True, heads=4)

    def start(**settings: object) -> None:
        asyncio.run(VllmEngine.start(tmp_path, VllmSettings(max_model_len=64, max_num_seqs=4, **settings)))  # type: ignore[arg-type]

    with pytest.raises(ConfigError, match="sleep mode exists only on GPU"):
        start(sleeps=True)
    with pytest.raises(ConfigError, match="tensor_parallel = 2, but 1 devices were given"):
        start(tensor_parallel=2, devices=[0])
    with pytest.raises(ConfigError, match=r"set engine\.tensor_parallel = 2"):
        start(tensor_parallel=3)


def test_pinned_devices_are_counted_among_the_visible_ones() -> None:
    assert pinned([2, 0], "5,6,7") == "7,5"
    with pytest.raises(ConfigError, match="GPU 3 does not exist here: CUDA_VISIBLE_DEVICES is '5,6,7'"):
        pinned([3], "5,6,7")


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_a_split_engine_serves_every_version_exactly(tmp_path: Path) -> None:
    model = save_llama(tmp_path, tied=True, heads=4, bias=True)

    async def go() -> None:
        async with engine_for(tmp_path, tensor_parallel=2) as engine:
            rounds = await sync_rounds(engine, model, 5)
            assert all(rounds.passed) and max(rounds.means) < 1e-5 and min(rounds.before) > 0.1
            run = await load_while_generating(engine, model, 3, after=5)
        found = judge_run(run, model)
        assert found.faults == 0 and found.unloaded == 0 and found.whole + found.spanning == len(run.completions)
        assert max(found.whole_gap, found.first_gap) < 1e-4

    asyncio.run(go())


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_weights_split_wrongly_are_noticed_by_the_probe(tmp_path: Path) -> None:
    model = save_llama(tmp_path, tied=False, heads=4, bias=True)

    async def go() -> dict[str, bool]:
        async with engine_for(tmp_path, worker_part=MisSharded, tensor_parallel=2) as engine:
            return await broken_loads(engine, model, list(SHARDED))

    assert asyncio.run(go()) == dict.fromkeys(SHARDED, True)


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_an_unknown_engine_argument_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    save_llama(tmp_path, tied=True)
    settings = VllmSettings(max_model_len=64, max_num_seqs=4, extra={"max_num_batched_token": 64})
    start = VllmEngine.start(tmp_path, settings)
    with pytest.raises(
        ConfigError, match=r"extra.max_num_batched_token is not .*did you mean 'max_num_batched_tokens'"
    ):
        asyncio.run(start)


@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_every_argument_that_may_be_set_or_has_a_setting_exists_in_vllm() -> None:
    from dataclasses import fields

    from vllm import AsyncEngineArgs

    from offbeat.config.sections import ARGUMENT_SETTINGS, ENGINE_ARGUMENTS

    known = {field.name for field in fields(AsyncEngineArgs)}
    assert not {*ENGINE_ARGUMENTS, *ARGUMENT_SETTINGS} - known
