"""The real vLLM, on CPU, against transformers: sampling, loads, and shutdown."""

import asyncio
import inspect
import os
import signal
import time
from collections.abc import Coroutine, Iterable, Iterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from offbeat.errors import ConfigError, EngineAsleep, EngineDead
from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.parity import Prober
from offbeat.rollout.vllm import VllmEngine
from offbeat.rollout.vllm_settings import VllmSettings, environment
from offbeat.rollout.vllm_versions import FullWeights
from offbeat.types import Completion, Finish
from tests.fixtures.engine_runs import (
    PROMPT,
    Unrepaired,
    engine_for,
    expected,
    judge,
    load_while_generating,
    perturb,
    probe_of,
    prompts,
    span_faults,
    sync_rounds,
)
from tests.fixtures.tiny_model import save_llama
from tests.rollout.family import descendants, eventually_gone

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]  # vLLM's own imports emit warnings

END = 1
T = TypeVar("T")


@dataclass
class Served:
    """An engine, the same model in transformers, and the engine's event loop."""

    engine: VllmEngine
    model: LlamaForCausalLM
    runner: asyncio.Runner
    version: int = 0

    def run(self, work: Coroutine[None, None, T]) -> T:
        return self.runner.run(work)

    def generate(self, request: Request) -> tuple[Completion, ...]:
        [group] = self.run(self.engine.generate([request]))
        return group

    def next_version(self) -> int:
        """Perturb the model and load it into the engine."""
        self.version += 1
        weights = perturb(self.model, seed=self.version)
        self.run(self.engine.load(self.version, weights.items()))
        return self.version


def served(model: LlamaForCausalLM, opening: AbstractAsyncContextManager[VllmEngine]) -> Iterator[Served]:
    with asyncio.Runner() as runner:
        yield Served(runner.run(opening.__aenter__()), model, runner)
        runner.run(opening.__aexit__(None, None, None))


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("tied")
    yield from served(save_llama(directory, tied=True), engine_for(directory))


@pytest.fixture(scope="module")
def draining(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("untied")
    yield from served(save_llama(directory, tied=False), engine_for(directory, on_update="drain"))


@pytest.fixture(scope="module")
def unrepaired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory = tmp_path_factory.mktemp("unrepaired")
    yield from served(save_llama(directory, tied=True), engine_for(directory, worker_part=Unrepaired))


def writing(engine: VllmEngine) -> Iterable[bool]:
    """Return of each running request whether its first token has arrived."""
    assert isinstance(engine._versions, FullWeights)
    return engine._versions._writing.values()


def request(seed: int = 5, size: int = 4, sampling: Sampling | None = None) -> Request:
    return Request(f"g{seed}", prompts(1, seed)[0], size, sampling or Sampling(20, ()), seed)


def test_the_parts_of_vllm_that_we_use_still_exist() -> None:
    from vllm import CompletionOutput, SamplingParams
    from vllm.inputs import tokens_input
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
    from vllm.model_executor.model_loader.reload.types import LayerReloadingInfo
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.worker.cpu_worker import CPUWorker
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    def takes(function: object, *names: str) -> bool:
        assert callable(function)
        return set(names) <= set(inspect.signature(function).parameters)

    assert takes(AsyncLLM.generate, "prompt", "sampling_params", "request_id") and takes(AsyncLLM.abort, "request_id")
    assert takes(AsyncLLM.collective_rpc, "method", "args") and takes(AsyncLLM.shutdown, "timeout")
    assert takes(AsyncLLM.update_weight_version, "new_version") and takes(AsyncLLM.resume_generation)
    assert takes(AsyncMPClient.pause_scheduler_async, "mode", "clear_cache")
    assert takes(tokens_input, "cache_salt") and takes(initialize_layerwise_reload, "model")
    assert callable(finalize_layerwise_reload) and callable(GPUModelRunner.get_model)
    assert {"weight_versions", "finish_reason"} <= set(CompletionOutput.__dataclass_fields__)
    assert {"stream_interval", "flat_logprobs", "skip_clone"} <= set(SamplingParams.__struct_fields__)
    assert {"restore_metadata", "restore_device"} <= set(LayerReloadingInfo.__dataclass_fields__)
    assert issubclass(ParallelLMHead, torch.nn.Module)
    taken = [name for name in dir(CPUWorker) if name.startswith("offbeat")]
    assert not taken, "offbeat's names must not collide with the worker's"


def test_the_environment_of_the_caller_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
    before = dict(os.environ)
    with environment(VllmSettings(max_model_len=64, max_num_seqs=4, threads=2)):
        assert os.environ["OMP_NUM_THREADS"] == "2" and os.environ["VLLM_NO_USAGE_STATS"] == "1"
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    "sampling",
    [Sampling(20, ()), Sampling(20, (), temperature=0.7), Sampling(20, (), temperature=1.4, top_p=0.8, top_k=12)],
    ids=["plain", "temperature", "truncated"],
)
def test_behavior_logprobs_are_of_the_distribution_sampled_from(keeping: Served, sampling: Sampling) -> None:
    asked = request(sampling=sampling)
    for completion in keeping.generate(asked):
        ids = [*asked.prompt_ids.tolist(), *completion.token_ids.tolist()]
        with torch.inference_mode():
            logits_TV = keeping.model(torch.tensor([ids])).logits[0, PROMPT - 1 : -1] / sampling.temperature
        for logits_V, token, logprob in zip(
            logits_TV.tolist(), completion.token_ids, completion.behavior_logprobs, strict=True
        ):
            assert logprob == pytest.approx(by_hand(logits_V, int(token), sampling), abs=1e-4)


def by_hand(logits: list[float], token: int, sampling: Sampling) -> float:
    """Rank, keep the first k, of these the fewest with a share of p, and renormalize."""
    ranked = sorted(range(len(logits)), key=lambda i: -logits[i])[: sampling.top_k or None]
    chances = {i: np.exp(logits[i]) for i in ranked}
    whole = sum(chances.values())
    kept: dict[int, float] = {}
    for i in ranked:
        if sum(kept.values()) < sampling.top_p * whole:
            kept[i] = chances[i]
    return float(np.log(kept[token] / sum(kept.values())))


def test_only_the_given_stop_tokens_end_a_completion(keeping: Served) -> None:
    endless = keeping.generate(request(size=32, sampling=Sampling(60, ())))
    assert all(len(one.token_ids) == 60 and one.finish is Finish.LENGTH for one in endless)
    assert any(END in one.token_ids[:-1] for one in endless), "this test needs the model's own end token to occur"
    ending = keeping.generate(request(size=32, sampling=Sampling(60, (END, 9))))
    stopped = [one for one in ending if one.finish is Finish.STOP]
    assert stopped and all(one.token_ids[-1] in (END, 9) for one in stopped)
    assert not any(set(one.token_ids[:-1]) & {END, 9} for one in ending)


def test_no_stop_token_is_sampled_before_the_minimum_and_log_probs_leave_it_out(keeping: Served) -> None:
    stops = (END, 5, 6, 7, 8, 9)
    answers = keeping.generate(request(size=32, sampling=Sampling(60, stops, min_tokens=6)))
    assert min(len(one.token_ids) for one in answers) >= 7
    assert min(len(one.token_ids) for one in answers) < 60, "this test needs completions that stop"
    one, prompt = answers[0], prompts(1, 5)[0]
    with torch.no_grad():
        logits = keeping.model(torch.tensor([[*prompt, *one.token_ids.tolist()]])).logits[0, len(prompt) - 1 : -1]
    logits[:6, list(stops)] = -torch.inf
    expected_logprobs = logits.log_softmax(-1)[range(len(logits)), one.token_ids.tolist()]
    np.testing.assert_allclose(one.behavior_logprobs, expected_logprobs, atol=2e-5)


def test_the_same_request_gives_the_same_group_and_its_completions_differ(keeping: Served) -> None:
    one, other = keeping.generate(request()), keeping.generate(request())
    assert [c.token_ids.tolist() for c in one] == [c.token_ids.tolist() for c in other]
    assert len({tuple(c.token_ids.tolist()) for c in one}) == len(one)
    assert [c.id for c in one] == ["g5/0", "g5/1", "g5/2", "g5/3"]
    changed = keeping.generate(replace_seed(request(), 6))
    assert changed[0].token_ids.tolist() != one[0].token_ids.tolist()


def replace_seed(asked: Request, seed: int) -> Request:
    return Request(asked.id, asked.prompt_ids, asked.size, asked.sampling, seed)


def test_a_request_that_is_too_long_or_has_too_low_a_temperature_is_refused(keeping: Served) -> None:
    with pytest.raises(ValueError, match="max_model_len is 256"):
        keeping.generate(request(sampling=Sampling(256 - PROMPT + 1, ())))
    with pytest.raises(ValueError, match="max_model_len is 256"):
        keeping.run(keeping.engine.logprobs([[5] * 256]))
    with pytest.raises(ValueError, match=r"temperature 0\.001"):
        keeping.generate(request(sampling=Sampling(8, (), temperature=0.001)))
    assert len(keeping.run(keeping.engine.logprobs([[5] * 255]))[0]) == 254


def test_after_each_sync_a_tied_model_is_served_exactly(keeping: Served) -> None:
    keeping.version = 3
    found = keeping.run(sync_rounds(keeping.engine, keeping.model, 3))
    assert max(found.after) < 1e-4 and min(found.before) > 0.1 and all(found.passed)
    assert keeping.engine.version == 3 and keeping.engine.last_pause is not None


def test_after_each_sync_an_untied_model_is_served_exactly(draining: Served) -> None:
    draining.version = 3
    found = draining.run(sync_rounds(draining.engine, draining.model, 3))
    assert max(found.after) < 1e-4 and min(found.before) > 0.1 and all(found.passed)


def test_a_prompt_repeated_after_a_load_finds_no_keys_and_values_of_the_previous_version(keeping: Served) -> None:
    async def cached_tokens(salt: int) -> int:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input

        prompt = tokens_input(prompts(1, 5)[0], cache_salt=str(salt))
        *_, output = [
            one async for one in keeping.engine._llm.generate(prompt, SamplingParams(max_tokens=1), f"bare-{salt}")
        ]
        assert output.num_cached_tokens is not None
        return output.num_cached_tokens

    keeping.generate(request())
    assert keeping.run(cached_tokens(keeping.engine._versions.salt)) == 64, "two blocks of the prompt are in the cache"
    version = keeping.next_version()
    assert keeping.run(cached_tokens(keeping.engine._versions.salt)) == 0
    for completion in keeping.generate(request()):
        values = expected(keeping.model, [*prompts(1, 5)[0], *completion.token_ids.tolist()])[PROMPT - 1 :]
        assert np.abs(values - completion.behavior_logprobs).max() < 1e-4
        assert [span.version for span in completion.versions] == [version]


def test_versions_of_loads_during_generation_are_exact_token_by_token(keeping: Served) -> None:
    start = keeping.version
    watched = keeping.run(load_while_generating(keeping.engine, keeping.model, 5, after=start))
    found = judge(watched, keeping.model)
    keeping.version = start + 5
    assert found.faults == 0 and found.unloaded == 0
    assert found.spanning > 0 and found.first_gap < 1e-4
    assert found.whole > 0 and found.whole_gap < 1e-4
    keeping.model.load_state_dict(watched.states[keeping.version])


def test_a_drained_completion_has_one_version(draining: Served) -> None:
    start = draining.version
    watched = draining.run(load_while_generating(draining.engine, draining.model, 4, after=start))
    found = judge(watched, draining.model)
    draining.version = start + 4
    assert found.faults == 0 and found.unloaded == 0 and found.spanning == 0
    assert found.whole > 0 and found.whole_gap < 1e-4
    assert len({completion.versions[0].version for _, completion in watched.completions}) > 1


def test_running_completions_of_a_version_that_is_loaded_again_start_over(keeping: Served) -> None:
    async def load_again() -> tuple[Completion, ...]:
        generating = asyncio.create_task(keeping.engine.generate([request(sampling=Sampling(150, ()))]))
        while not any(writing(keeping.engine)):
            await asyncio.sleep(0.01)
        weights = perturb(keeping.model, seed=77)
        await keeping.engine.load(keeping.version, weights.items())
        assert not generating.done(), "the load came too late for this test"
        return (await generating)[0]

    for completion in keeping.run(load_again()):
        assert not span_faults(completion)
        values = expected(keeping.model, [*prompts(1, 5)[0], *completion.token_ids.tolist()])[PROMPT - 1 :]
        assert np.abs(values - completion.behavior_logprobs).max() < 1e-4


def test_a_cancelled_generation_also_ends_in_the_engine(keeping: Served) -> None:
    async def cancel() -> int:
        generating = asyncio.create_task(keeping.engine.generate([request(sampling=Sampling(170, ()))]))
        while not any(writing(keeping.engine)):
            await asyncio.sleep(0.01)
        generating.cancel()
        with pytest.raises(asyncio.CancelledError):
            await generating
        await asyncio.sleep(0.1)
        return keeping.engine._llm.get_num_unfinished_requests()

    assert keeping.run(cancel()) == 0
    assert len(keeping.generate(request())) == 4


def test_without_the_repair_of_tied_heads_the_probe_fails(unrepaired: Served) -> None:
    prober = unrepaired.run(Prober.calibrated(unrepaired.engine, probe_of(unrepaired.model)))
    unrepaired.next_version()
    verdict = unrepaired.run(prober.check(unrepaired.engine, probe_of(unrepaired.model)))
    assert not verdict.passed and verdict.gap > 0.01


def test_a_sleeping_engine_refuses_work_answers_health_and_keeps_its_version(draining: Served) -> None:
    """The CPU build accepts vLLM's sleep calls without freeing anything, so this runs the real sequence."""
    engine = draining.engine
    with pytest.raises(ConfigError, match="start it with sleeps=True"):
        draining.run(engine.sleep())
    before, loads, engine._sleeps = draining.generate(request()), engine._versions.salt, True

    async def sleep_during_generation() -> tuple[Completion, ...]:
        generating = asyncio.create_task(engine.generate([request()]))
        await asyncio.sleep(0)
        await engine.sleep()
        assert generating.done(), "a sleep waits for running calls"
        return (await generating)[0]

    assert [c.token_ids.tolist() for c in draining.run(sleep_during_generation())] == [
        c.token_ids.tolist() for c in before
    ]
    draining.run(engine.sleep())
    draining.run(engine.health())
    for call in (engine.generate([request()]), engine.logprobs([[5, 6]]), engine.load(9, [])):
        with pytest.raises(EngineAsleep, match=r"call wake\(\)"):
            draining.run(call)
    version = engine.version
    draining.run(engine.wake())
    assert engine.version == version and engine._versions.salt == loads + 1
    assert [c.token_ids.tolist() for c in draining.generate(request())] == [c.token_ids.tolist() for c in before]
    engine._sleeps = False


def test_weights_that_do_not_fit_kill_the_engine_and_every_later_call_reports_it(draining: Served) -> None:
    weights = draining.model.state_dict()
    del weights["model.layers.1.self_attn.v_proj.weight"]  # vLLM itself would keep the loaded one
    with pytest.raises(EngineDead, match=r"missing: model\.layers\.1\.self_attn\.v_proj\.weight"):
        draining.run(draining.engine.load(9, weights.items()))
    for call in (
        draining.engine.generate([request()]),
        draining.engine.logprobs([[5, 6]]),
        draining.engine.load(10, draining.model.state_dict().items()),
        draining.engine.health(),
    ):
        with pytest.raises(EngineDead, match="loading version 9 failed"):
            draining.run(call)


def test_a_killed_engine_core_is_detected_and_leaves_no_process_behind(unrepaired: Served) -> None:
    engine = unrepaired.engine
    unrepaired.run(engine.health())
    [core] = [process.pid for process in engine._llm.engine_core.resources.engine_manager.processes]
    below = [core, *descendants(core)]
    assert len(below) == 1, "an engine core on CPU computes by itself"

    async def killed() -> float:
        generating = asyncio.create_task(engine.generate([request(sampling=Sampling(170, ()))]))
        while not any(writing(engine)):
            await asyncio.sleep(0.01)
        os.kill(core, signal.SIGKILL)
        start = time.monotonic()
        with pytest.raises(EngineDead, match="engine core has died"):
            await generating
        return time.monotonic() - start

    assert unrepaired.run(killed()) < 5
    for call in (engine.generate([request()]), engine.logprobs([[5, 6]]), engine.health(), engine.load(9, [])):
        with pytest.raises(EngineDead):
            unrepaired.run(call)
    unrepaired.run(engine.close())
    assert eventually_gone(below)
