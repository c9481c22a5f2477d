"""The transformers engine: the same bits for the same call, true behavior log-probs, whole versions or nothing."""

import asyncio
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig, LlamaForCausalLM

from offbeat.errors import EngineAsleep, EngineDead
from offbeat.rollout.engine import Request, Sampling
from offbeat.rollout.hf import HfEngine, draw, sampled_from
from offbeat.tasks.tokenizer import read_generation_config, stop_tokens
from offbeat.types import Completion, Finish
from tests.fixtures import tiny_model
from tests.fixtures.adapted_model import AdaptedModel

PROMPTS = ([5, 6, 7], [9], [4, 4, 8, 3, 11])


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("model")
    tiny_model.save_model(place)
    return place


def requests(sampling: Sampling, size: int = 4, seed: int = 0) -> list[Request]:
    return [Request(f"g{i}", prompt, size, sampling, seed + i) for i, prompt in enumerate(PROMPTS)]


def generated(directory: Path, asked: list[Request]) -> list[tuple[Completion, ...]]:
    return asyncio.run(HfEngine.start(directory).generate(asked))


def moved(directory: Path, seed: int = 1) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    state = LlamaForCausalLM.from_pretrained(directory).state_dict()
    return {name: tensor + 0.05 * torch.randn_like(tensor) for name, tensor in state.items()}


def test_the_same_call_gives_the_same_bits(directory: Path) -> None:
    asked = requests(Sampling(12, (1,)))
    assert generated(directory, asked) == generated(directory, asked)


def test_other_seeds_give_other_completions_and_completions_of_a_group_differ(directory: Path) -> None:
    sampling = Sampling(12, (1,))
    first, other = generated(directory, requests(sampling)), generated(directory, requests(sampling, seed=100))
    assert first != other
    assert len({one.token_ids.tobytes() for one in first[0]}) > 1


@pytest.mark.parametrize("sampling", [Sampling(10, (1,), temperature=0.7), Sampling(10, (1,), 1.3, 0.8, 9)])
def test_behavior_log_probs_are_of_the_distribution_sampled_from(directory: Path, sampling: Sampling) -> None:
    """Recompute them from plain logits, without cache, padding or batching."""
    model = LlamaForCausalLM.from_pretrained(directory).eval()
    for request, answers in zip(requests(sampling), generated(directory, requests(sampling)), strict=True):
        for one in answers:
            ids = torch.tensor([[*request.prompt_ids.tolist(), *one.token_ids.tolist()]])
            with torch.no_grad():
                logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1] / sampling.temperature
            if sampling.top_k:
                logits[logits < logits.topk(sampling.top_k).values[:, -1:]] = -torch.inf
            if sampling.top_p < 1:
                for row in logits:
                    p, order = row.softmax(-1).sort(descending=True)
                    kept = int((p.cumsum(-1) < sampling.top_p).sum()) + 1
                    row[order[kept:]] = -torch.inf
            expected = logits.log_softmax(-1)[range(len(one.token_ids)), one.token_ids.tolist()]
            np.testing.assert_allclose(one.behavior_logprobs, expected, atol=2e-6)


def test_tokens_are_sampled_with_their_probability() -> None:
    logprobs = torch.tensor([[0.5, 0.0, 0.2, 0.3, 0.0]]).log()
    uniform = torch.rand(40_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    counts = torch.bincount(draw(logprobs.expand(40_000, 5), uniform), minlength=5) / 40_000
    np.testing.assert_allclose(counts, [0.5, 0, 0.2, 0.3, 0], atol=0.01)
    assert draw(logprobs, torch.tensor([0.0])).item() == 0
    assert draw(torch.tensor([[0.0, 1.0, 0.0]]).log(), torch.tensor([1 - 1e-16])).item() == 1


def test_top_p_keeps_the_token_that_crosses_it() -> None:
    logits = torch.tensor([[0.1, 0.5, 0.4]]).log()
    assert sampled_from(logits, 1.0, 0.6, 0).exp()[0].tolist() == pytest.approx([0, 5 / 9, 4 / 9])
    assert sampled_from(logits, 1.0, 1e-9, 0).exp()[0].tolist() == [0, 1, 0]


def test_a_completion_ends_with_its_first_stop_token_or_at_the_limit(directory: Path) -> None:
    answers = [one for group in generated(directory, requests(Sampling(40, (7, 8, 9)), size=8)) for one in group]
    stopped = [one for one in answers if one.finish is Finish.STOP]
    assert stopped and all(one.token_ids[-1] in (7, 8, 9) for one in stopped)
    assert not any({7, 8, 9} & set(one.token_ids[:-1].tolist()) for one in answers)
    cut = [one for group in generated(directory, requests(Sampling(3, ()))) for one in group]
    assert all(one.finish is Finish.LENGTH and len(one.token_ids) == 3 for one in cut)


def test_no_stop_token_is_sampled_before_the_minimum_and_log_probs_leave_it_out(directory: Path) -> None:
    model, stops = LlamaForCausalLM.from_pretrained(directory).eval(), [7, 8, 9]
    asked = requests(Sampling(40, (7, 8, 9), min_tokens=6), size=8)
    groups = generated(directory, asked)
    lengths = [len(one.token_ids) for group in groups for one in group]
    assert min(lengths) >= 7, "the stop token itself comes after the minimum"
    assert min(lengths) < 40, "this test needs completions that stop"
    ids = torch.tensor([[*asked[0].prompt_ids.tolist(), *groups[0][0].token_ids.tolist()]])
    with torch.no_grad():
        logits = model(ids).logits[0, len(asked[0].prompt_ids) - 1 : -1]
    logits[:6, stops] = -torch.inf
    expected = logits.log_softmax(-1)[range(len(logits)), groups[0][0].token_ids.tolist()]
    np.testing.assert_allclose(groups[0][0].behavior_logprobs, expected, atol=2e-6)


def test_requests_of_one_call_may_have_different_sampling(directory: Path) -> None:
    asked = [Request("a", [5], 2, Sampling(3, ()), 0), Request("b", [6, 7], 3, Sampling(5, (), 0.5), 1)]
    a, b = generated(directory, asked)
    assert [len(one.token_ids) for one in a] == [3, 3] and [len(one.token_ids) for one in b] == [5, 5, 5]


def test_log_probs_are_those_of_the_model(directory: Path) -> None:
    sequences = [[5, 6, 7, 8], [9, 3], [1, 2, 3]]
    model = LlamaForCausalLM.from_pretrained(directory).eval()
    for one, found in zip(sequences, asyncio.run(HfEngine.start(directory).logprobs(sequences)), strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([one])).logits[0, :-1].log_softmax(-1)
        np.testing.assert_allclose(found, logits[range(len(one) - 1), one[1:]], atol=2e-6)


@pytest.mark.parametrize("without", [(), ("lm_head.weight",)])
def test_a_load_changes_log_probs_and_version(directory: Path, without: tuple[str, ...]) -> None:
    async def go() -> None:
        tied = LlamaForCausalLM.from_pretrained(directory)
        tied.config.tie_word_embeddings = bool(without)
        if without:
            tied.tie_weights()
        engine = HfEngine(tied)
        before = await engine.logprobs(PROMPTS[::2])
        weights = moved(directory)
        await engine.load(7, [(name, tensor) for name, tensor in weights.items() if name not in without])
        expected = LlamaForCausalLM.from_pretrained(directory)
        expected.load_state_dict(weights)
        if without:
            expected.lm_head.weight = expected.model.embed_tokens.weight
        after = await engine.logprobs(PROMPTS[::2])
        assert all(
            np.array_equal(a, b) for a, b in zip(after, await HfEngine(expected).logprobs(PROMPTS[::2]), strict=True)
        )
        assert not any(np.array_equal(a, b) for a, b in zip(after, before, strict=True))
        [answers] = await engine.generate([Request("g", [5], 2, Sampling(4, ()), 0)])
        assert engine.version == 7 and {span.version for one in answers for span in one.versions} == {7}

    asyncio.run(go())


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda w: w.pop("model.norm.weight"), "missing: model.norm.weight"),
        (lambda w: w.update(extra=torch.zeros(1)), "no weights called extra"),
        (lambda w: w.update({"model.norm.weight": torch.zeros(3)}), r"has shape \[32\], but \[3\] was given"),
    ],
)
def test_weights_that_do_not_fit_kill_the_engine(directory: Path, spoil: object, message: str) -> None:
    async def go() -> None:
        engine, weights = HfEngine.start(directory), moved(directory)
        spoil(weights)  # type: ignore[operator]
        with pytest.raises(EngineDead, match=message):
            await engine.load(1, weights.items())
        with pytest.raises(EngineDead, match=message):
            await engine.generate(requests(Sampling(2, ())))

    asyncio.run(go())


def test_a_load_waits_for_running_generations(directory: Path) -> None:
    async def go() -> None:
        engine = HfEngine.start(directory)
        writing = asyncio.create_task(engine.generate(requests(Sampling(30, ()))))
        await asyncio.sleep(0.01)
        await engine.load(1, moved(directory).items())
        assert writing.done()
        assert {span.version for group in await writing for one in group for span in one.versions} == {0}

    asyncio.run(go())


def test_a_cancelled_call_frees_the_engine(directory: Path) -> None:
    async def go() -> None:
        engine = HfEngine.start(directory)
        writing = asyncio.create_task(engine.generate(requests(Sampling(60, ()), size=64)))
        await asyncio.sleep(0.01)
        writing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        async with asyncio.timeout(5):
            assert len(await engine.generate(requests(Sampling(2, ())))) == 3

    asyncio.run(go())


@pytest.mark.parametrize("tied", [False, True])
def test_a_sleeping_engine_has_no_weights_and_wakes_with_the_same_version(directory: Path, tied: bool) -> None:
    async def go() -> None:
        model = LlamaForCausalLM.from_pretrained(directory)
        model.config.tie_word_embeddings = tied
        if tied:
            model.tie_weights()
        engine, weights = HfEngine(model), moved(directory)
        await engine.load(3, weights.items())
        asked = requests(Sampling(4, ()))
        before = await engine.generate(asked)
        generating = asyncio.create_task(engine.generate(asked))
        await asyncio.sleep(0.001)
        await engine.sleep()
        assert generating.done(), "a sleep waits for running calls"
        await engine.sleep()
        assert engine.version == 3 and not any(parameter.numel() for parameter in model.parameters())
        await engine.health()
        for call in (engine.generate(asked), engine.logprobs([[5, 6]]), engine.load(4, weights.items())):
            with pytest.raises(EngineAsleep, match=r"call wake\(\)"):
                await call
        await engine.wake()
        await engine.wake()
        assert engine.version == 3 and await engine.generate(asked) == before
        await engine.load(4, moved(directory, seed=2).items())
        assert await engine.generate(asked) != before

    asyncio.run(go())


def test_a_completion_stops_at_every_token_that_the_generation_config_lists(tmp_path: Path) -> None:
    tiny_model.save_model(tmp_path)
    settings = GenerationConfig.from_pretrained(tmp_path)
    settings.eos_token_id = [7, 8]
    settings.save_pretrained(tmp_path)
    stops = stop_tokens(read_generation_config(tmp_path), tiny_model.load_tokenizer(tmp_path))
    assert stops == (7, 8, 1), "the listed ones, and the tokenizer's own"
    answers = [one for group in generated(tmp_path, requests(Sampling(40, stops), size=16)) for one in group]
    second = [one for one in answers if one.token_ids[-1] == 8]
    assert second and all(one.finish is Finish.STOP and len(one.token_ids) < 40 for one in second)


def test_stop_tokens_without_a_generation_config_come_from_the_model_config(directory: Path, tmp_path: Path) -> None:
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink()
    tokenizer = tiny_model.load_tokenizer(tmp_path)
    assert stop_tokens(read_generation_config(tmp_path), tokenizer) == (1,)
    assert stop_tokens(None, tokenizer) == (1,)


def test_each_adapter_replaces_the_previous_one_and_computes_as_if_merged(directory: Path) -> None:
    adapted = AdaptedModel.open(directory, rank=2)
    engine = HfEngine.start(directory, adapter=adapted.spec)
    sequence = [5, 6, 7, 8, 9, 10]
    values = [adapted.merged_logprobs(adapted.adapter, sequence)]

    async def go() -> None:
        for version in (1, 2, 3):
            before = values[-1]
            await engine.load(version, adapted.move(version, 0.1).items())
            values.append(adapted.merged_logprobs(adapted.adapter, sequence))
            [measured] = await engine.logprobs([sequence])
            np.testing.assert_allclose(measured, values[-1], atol=1e-5)
            assert np.abs(measured - before).max() > 0.01 and engine.version == version
        for wake in (engine.sleep, engine.wake):
            await wake()
        zero = {name: torch.zeros_like(tensor) for name, tensor in adapted.adapter.items()}
        await engine.load(4, zero.items())
        np.testing.assert_array_equal((await engine.logprobs([sequence]))[0], base)

    [base] = asyncio.run(HfEngine.start(directory).logprobs([sequence]))
    asyncio.run(go())


def test_an_adapter_without_a_layer_is_refused(directory: Path) -> None:
    adapted = AdaptedModel.open(directory, rank=2)
    lacking = {name: tensor for name, tensor in adapted.adapter.items() if "k_proj" not in name}
    engine = HfEngine.start(directory, adapter=adapted.spec)
    with pytest.raises(EngineDead, match=r"weights are missing: base_model.*k_proj"):
        asyncio.run(engine.load(1, lacking.items()))
