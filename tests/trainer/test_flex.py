"""A micro-batch packed into one row for flex_attention gives the log-probs of plain rows, on the path of a GPU."""

import logging
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import a_group, a_llama, a_trainer, logprobs, moved, some_groups

from offbeat.errors import UnfusedAttention
from offbeat.objective.presets import PRESETS
from offbeat.trainer import flex
from offbeat.trainer.batch import BLOCK, PADDING, PROMPT, MicroBatch, build_micro_batch, plan_micro_batches
from offbeat.trainer.forward import PolicyModel, check_model, sequence_logprobs, to_model_inputs
from offbeat.trainer.trainer import Trained, Trainer
from offbeat.trainer.worst_case import StepShape, check_worst_case, worst_micro_batch
from offbeat.types import Group
from tests.fixtures.small_trainer import digest_of

CPU = torch.device("cpu")


def packed(groups: list[Group], *, shared: bool = True, budget: int = 1 << 20) -> Iterator[MicroBatch]:
    for plan in plan_micro_batches(groups, budget, shared_prefix=shared, packed=True):
        yield build_micro_batch(plan, groups)


def packing_trainer(preset: str = "grpo", *, reference: bool = False, budget: int = 512) -> Trainer:
    trainer = a_trainer(
        PRESETS[preset].objective,
        reference=PolicyModel(a_llama(seed=1), packed=True) if reference else None,
        policy_model=PolicyModel(a_llama(), packed=True),
        token_budget=budget,
    )
    assert trainer.check.packed and trainer.policy_model.model.config._attn_implementation == flex.NAME
    return trainer


def test_a_trainer_that_packs_computes_its_worst_case_and_takes_a_step() -> None:
    trainer, shape = packing_trainer(), StepShape(prompt=8, completion=8, group=4)
    before = digest_of(trainer)
    assert check_worst_case(trainer, shape) > 0 and digest_of(trainer) == before
    assert worst_micro_batch(trainer, shape).token_ids_RL.size == 512
    assert isinstance(trainer.train(some_groups(1)), Trained)


@pytest.mark.parametrize("preset", ["grpo", "red-drop", "dapo"])
def test_a_step_on_packed_rows_moves_the_policy_as_plain_rows_do(preset: str) -> None:
    groups = some_groups(3, count=5)
    expected = moved(a_trainer(PRESETS[preset].objective, token_budget=512), groups)
    found = moved(packing_trainer(preset), groups)
    assert float((found - expected).norm()) < 0.02 * float(expected.norm())


def visible(micro: MicroBatch) -> np.ndarray:
    """The mask by its definition, one query after another."""
    segments, positions = micro.segment_ids_RL[0], micro.position_ids_RL[0]
    rows = np.cumsum((segments == PROMPT) & (positions == 0))
    query, key = np.arange(len(segments))[:, None], np.arange(len(segments))
    own_row = (rows[:, None] == rows) & (segments != PADDING) & (segments[:, None] != PADDING)
    own = (segments[:, None] == segments) | (segments == PROMPT)
    padding = (segments[:, None] == PADDING) & (segments == PADDING)
    return (key <= query) & ((own_row & own) | padding)


layouts = st.lists(
    st.tuples(st.integers(1, 400), st.lists(st.integers(0, 300), min_size=1, max_size=6).filter(any)),
    min_size=1,
    max_size=5,
)


@settings(max_examples=25, deadline=None)
@given(layouts, st.booleans())
def test_the_block_lists_show_exactly_what_the_mask_shows(shapes: list[tuple[int, list[int]]], shared: bool) -> None:
    rng = np.random.default_rng(0)
    groups = [a_group(f"g{i}", rng, prompt, sizes) for i, (prompt, sizes) in enumerate(shapes)]
    for micro in packed(groups, shared=shared):
        blocks = flex.packed_mask(micro, CPU).blocks
        expected = visible(micro)
        assert np.array_equal(flex.dense_mask(blocks).numpy(), expected)
        count = len(expected) // BLOCK
        scores = expected.reshape(count, BLOCK, count, BLOCK).sum((1, 3))
        full = scores == BLOCK * BLOCK
        by_query = [(blocks.kv_num_blocks, blocks.kv_indices), (blocks.full_kv_num_blocks, blocks.full_kv_indices)]
        by_key = [(blocks.q_num_blocks, blocks.q_indices), (blocks.full_q_num_blocks, blocks.full_q_indices)]
        for lists, transposed in ((by_query, False), (by_key, True)):
            for (counts, indices), wanted in zip(lists, (~full & (scores > 0), full), strict=True):
                listed = flex._listed(counts, indices, count).numpy()
                assert np.array_equal(listed.T if transposed else listed, wanted)


def test_lists_for_a_gpu_are_as_long_as_the_longest() -> None:
    rng = np.random.default_rng(0)
    groups = [a_group(f"g{i}", rng, 100, [100] * 4) for i in range(32)]
    [micro] = packed(groups)
    keys, lists = flex.find_blocks(micro.segment_ids_RL[0], micro.position_ids_RL[0])
    mask = flex.to_block_mask(keys, lists, torch.device("meta"))
    assert mask.kv_indices.shape[-2] == len(keys.own_L) // BLOCK and mask.kv_indices.shape[-1] < 8


@settings(max_examples=20, deadline=None)
@given(layouts, st.integers(800, 2000), st.booleans())
def test_any_packing_gives_the_log_probs_of_plain_rows(
    shapes: list[tuple[int, list[int]]], budget: int, shared: bool
) -> None:
    rng = np.random.default_rng(0)
    groups = [a_group(f"g{i}", rng, min(prompt, 150), [n // 3 for n in s]) for i, (prompt, s) in enumerate(shapes)]
    groups = [group for group in groups if any(len(c.token_ids) for c in group.completions)]
    policy_model = PolicyModel(a_llama(), packed=True)
    expected = [token for one in logprobs(policy_model, groups) for token in one.tolist()]
    assert check_model(policy_model, 512).packed
    found = {}
    for micro in packed(groups, shared=shared, budget=budget):
        assert micro.plan.cost <= budget and micro.token_ids_RL.shape[0] == 1
        with torch.no_grad():
            stats = policy_model(to_model_inputs(micro, shared_prefix=shared, device=CPU))
        sizes = [len(groups[g].completions[c].token_ids) for g, c in micro.plan.completions]
        found |= dict(zip(micro.plan.completions, stats.logprobs.split(sizes), strict=True))
    ours = [x for g, group in enumerate(groups) for c in range(len(group.completions)) for x in found[g, c].tolist()]
    assert np.allclose(ours, expected, rtol=0, atol=1e-5)


def test_whole_sequences_still_go_through_plain_attention() -> None:
    policy_model = PolicyModel(a_llama(), packed=True)
    sequences = [[1, 2, 3, 4, 5], [6, 7, 8]]
    expected = sequence_logprobs(policy_model, sequences)
    assert check_model(policy_model, 64).packed
    for found, one in zip(sequence_logprobs(policy_model, sequences), expected, strict=True):
        assert np.array_equal(found, one)


def test_every_pass_over_a_micro_batch_uses_the_same_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    make = flex.packed_mask
    trainer = packing_trainer("grpo", reference=False)
    object.__setattr__(trainer.settings, "updates_per_batch", 3)
    monkeypatch.setattr(flex, "packed_mask", lambda *args, **kw: made.append(1) or make(*args, **kw))
    done = trainer.train(some_groups(1))
    assert isinstance(done, Trained) and done.updates == 3 and len(made) == 1


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of torch, when it loads its own compiler
class TestFused:
    """The compiled kernel: on CPU its forward pass."""

    @pytest.mark.engine  # a C++ compiler runs
    def test_one_graph_serves_every_shape_and_gives_the_log_probs_of_plain_rows(self) -> None:
        policy_model = PolicyModel(a_llama(hidden_size=64), packed=True)
        rng = np.random.default_rng(0)
        before = sum(flex.graphs_compiled().values())
        for prompt, sizes, count in ((100, [50] * 2, 1), (7, [90, 30, 200], 4), (300, [1, 2, 3], 2), (3, [1], 1)):
            groups = [a_group(f"g{i}", rng, prompt, sizes) for i in range(count)]
            policy_model.model.set_attn_implementation("sdpa")
            expected = logprobs(policy_model, groups)
            policy_model.model.set_attn_implementation(flex.NAME)
            [micro] = packed(groups)
            with torch.no_grad():
                found = policy_model(to_model_inputs(micro, shared_prefix=True, device=CPU, fused=True)).logprobs
            order = [groups[g].completions[c].id for g, c in micro.plan.completions]
            assert order == [c.id for group in groups for c in group.completions]
            assert torch.allclose(found, torch.cat(expected), rtol=0, atol=1e-5)
        assert sum(flex.graphs_compiled().values()) - before == 1

    def test_a_kernel_that_torch_would_not_compile_is_an_error(self) -> None:
        query = torch.zeros(1, 2, 256, 16)
        [micro] = packed(some_groups(0))
        mask = flex.packed_mask(micro, CPU, fused=True).blocks
        with torch.compiler.set_stance("force_eager"), pytest.raises(UnfusedAttention, match="TORCHDYNAMO_DISABLE"):
            flex.FUSED(query, query, query, mask)

    def test_a_kernel_that_torch_gives_up_on_is_an_error(self) -> None:
        attention = flex.FusedAttention("eager")
        [micro] = packed(some_groups(0))
        mask = flex.packed_mask(micro, CPU, fused=True).blocks
        torch._dynamo.reset()
        with torch._dynamo.config.patch(recompile_limit=1), torch.no_grad():
            attention(*[torch.zeros(1, 2, 256, 16)] * 3, mask)
            with pytest.raises(UnfusedAttention, match=r"after 1 graphs \(.*2 heads of 16"):
                attention(*[torch.zeros(1, 2, 256, 32)] * 3, mask)
        torch._dynamo.reset()

    def test_a_kernel_compiled_again_and_again_is_a_warning(self, caplog: pytest.LogCaptureFixture) -> None:
        attention = flex.FusedAttention("eager")
        [micro] = packed(some_groups(0))
        mask = flex.packed_mask(micro, CPU, fused=True).blocks
        query = torch.zeros(1, 2, 256, 16)
        with caplog.at_level(logging.WARNING), torch.no_grad():
            for _ in range(4):
                attention(query, query, query, mask)
                torch._dynamo.reset()
        assert caplog.text.count("compiled 3 times for one model") == 1 and max(attention.graphs.values()) == 4
