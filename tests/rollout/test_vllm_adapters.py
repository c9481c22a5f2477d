"""The real vLLM with adapters: several versions at once, each computed with its own tensors."""

import asyncio
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest

from offbeat.errors import ConfigError, EngineDead
from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.vllm import VllmEngine
from offbeat.rollout.vllm_settings import _RANKS, adapter_settings
from offbeat.weights.adapter import AdapterSpec
from offbeat.weights.probe import probe_sequences
from tests.fixtures.adapted_model import AdaptedModel
from tests.fixtures.adapter_faults import KINDS, FaultyAdapters
from tests.fixtures.adapter_runs import adapter_engine, faults_noticed, versions_in_one_batch
from tests.fixtures.engine_runs import VOCABULARY, prompts
from tests.fixtures.tiny_model import save_llama

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]  # vLLM's own imports emit warnings

T = TypeVar("T")
SEQUENCES = probe_sequences([list(range(3, 30)), list(range(40, 10, -1))], VOCABULARY, seed=0)
SLOTS = 3


@dataclass
class Adapting:
    """An engine, its base in transformers, and the engine's event loop."""

    engine: VllmEngine
    adapted: AdaptedModel
    runner: asyncio.Runner

    def run(self, work: Coroutine[None, None, T]) -> T:
        return self.runner.run(work)

    def gap(self) -> float:
        """Return the largest |Δlogp| on the probe to the newest version with merged weights."""
        measured = self.run(self.engine.logprobs(SEQUENCES))
        values = [self.adapted.merged_logprobs(self.adapted.adapter, one) for one in SEQUENCES]
        return float(np.abs(np.concatenate(measured) - np.concatenate(values)).max())

    def load_next(self) -> int:
        version = (self.engine.version or 0) + 1
        self.run(self.engine.load(version, self.adapted.move(version + 100, 0.02).items()))
        return version


@pytest.fixture(scope="module")
def adapting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapting]:
    directory = tmp_path_factory.mktemp("base")
    save_llama(directory, tied=True)
    adapted = AdaptedModel.open(directory)
    opening = adapter_engine(directory, adapted, slots=SLOTS)
    with asyncio.Runner() as runner:
        yield Adapting(runner.run(opening.__aenter__()), adapted, runner)
        runner.run(opening.__aexit__(None, None, None))


def request(tokens: int, seed: int = 5) -> Request:
    return Request(f"g{seed}", prompts(1, seed)[0], 2, Sampling(tokens, ()), seed)


def test_the_parts_of_vllm_for_adapters_still_exist() -> None:
    from typing import get_args

    from vllm.config.lora import MaxLoRARanks
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.model_manager import LRUCacheLoRAModelManager
    from vllm.lora.peft_helper import PEFTHelper
    from vllm.lora.request import LoRARequest

    assert get_args(MaxLoRARanks) == _RANKS
    assert callable(LoRAModel.from_lora_tensors) and callable(PEFTHelper.from_dict)
    assert callable(LRUCacheLoRAModelManager.add_adapter) and callable(LRUCacheLoRAModelManager.remove_adapter)
    assert {"lora_name", "lora_int_id", "lora_path"} <= set(LoRARequest.__struct_fields__)


def test_the_base_and_as_many_versions_as_there_are_slots_run_in_one_batch(adapting: Adapting) -> None:
    """All slots are full: vLLM's own code for CPU would compute the base with the adapter in the last one."""
    batch = versions_in_one_batch(
        adapting.engine, adapting.adapted, prompts(2, seed=3), versions=SLOTS + 1, tokens=150, size=0.02
    )
    written = adapting.run(batch)
    assert [one.completion.versions[0].version for one in written] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(len(one.completion.versions) == 1 for one in written)
    assert max(one.gap(adapting.adapted) for one in written) < 1e-4
    texts = {tuple(one.completion.token_ids.tolist()) for one in written}
    assert len(texts) == len(written), "this test needs versions that differ"


def test_a_version_generates_only_after_serve_and_its_log_probs_can_be_checked_before(adapting: Adapting) -> None:
    before = adapting.engine.version
    version = adapting.load_next()
    [[one, _]] = adapting.run(adapting.engine.generate([request(8)]))
    assert adapting.engine.version == before == one.versions[0].version
    assert adapting.gap() < 1e-4
    adapting.engine.serve()
    [[one, _]] = adapting.run(adapting.engine.generate([request(8)]))
    assert adapting.engine.version == version == one.versions[0].version


def test_a_version_that_is_loaded_again_with_other_values_is_computed_with_these(adapting: Adapting) -> None:
    """The prompts are the same, so keys and values of the first load are in the cache."""
    adapting.load_next()
    assert adapting.gap() < 1e-4
    version = adapting.load_next()
    assert adapting.gap() < 1e-4
    adapting.engine.serve()
    assert adapting.engine.version == version


def test_with_no_slot_free_a_load_waits_for_one(adapting: Adapting) -> None:
    engine = adapting.engine

    async def fill() -> None:
        generating = []
        for number in range(SLOTS):
            version = (engine.version or 0) + 1
            await engine.load(version, adapting.adapted.move(number, 0.02).items())
            engine.serve()
            generating.append(asyncio.create_task(engine.generate([request(170 if number == 0 else 100, number)])))
            await asyncio.sleep(0)
        loading = asyncio.create_task(engine.load(version + 1, adapting.adapted.move(9, 0.02).items()))
        await asyncio.sleep(0.05)
        assert not loading.done() and not any(task.done() for task in generating)
        await loading
        assert any(task.done() for task in generating)
        for task in generating:
            [[one, _]] = await task
            assert len(one.versions) == 1
        engine.serve()

    adapting.run(fill())
    assert adapting.gap() < 1e-4


def test_a_stale_id_a_doubled_scale_and_a_missing_layer_fail_their_probes(tmp_path: Path) -> None:
    save_llama(tmp_path, tied=False)
    adapted = AdaptedModel.open(tmp_path)

    async def noticed() -> dict[str, int]:
        async with adapter_engine(tmp_path, adapted, worker_part=FaultyAdapters) as engine:
            return await faults_noticed(engine, adapted, SEQUENCES, each=2, size=0.005)

    assert asyncio.run(noticed()) == dict.fromkeys(KINDS, 2)


def test_settings_that_vllm_would_refuse_late_or_serve_wrongly_are_refused() -> None:
    spec = AdapterSpec(8, 16.0, ("q_proj",), "")
    assert adapter_settings(spec, 2)["max_loras"] == adapter_settings(spec, 2)["max_cpu_loras"] == 2
    with pytest.raises(ConfigError, match="slots = 1: an engine needs 2"):
        adapter_settings(spec, 1)
    with pytest.raises(ConfigError, match=r"adapter\.targets has lm_head"):
        adapter_settings(AdapterSpec(8, 16.0, ("q_proj", "lm_head"), ""), 2)
    with pytest.raises(ConfigError, match="at most 512"):
        adapter_settings(AdapterSpec(513, 16.0, ("q_proj",), ""), 2)


def test_an_adapter_without_a_layer_is_refused(adapting: Adapting) -> None:
    adapter = dict(adapting.adapted.adapter)
    for matrix in "AB":
        del adapter[f"base_model.model.model.layers.1.self_attn.v_proj.lora_{matrix}.weight"]
    with pytest.raises(EngineDead, match=r"missing: base_model\.model\.model\.layers\.1\.self_attn\.v_proj"):
        adapting.run(adapting.engine.load(99, adapter.items()))
