"""Shared prefixes change only the time, and models that do not support them are detected."""

import logging
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small import VOCABULARY, a_group, a_llama, logprobs, some_groups
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from offbeat.errors import UnsupportedModel
from offbeat.trainer.batch import build_micro_batch, plan_micro_batches
from offbeat.trainer.forward import PolicyModel, check_model, to_model_inputs
from offbeat.types import Group

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}


def computed(policy_model: PolicyModel, groups: list[Group], *, shared: bool, budget: int = 1 << 20) -> dict:
    """Log-probs by completion id, and gradients of a weighted sum of them by parameter."""
    found, total = {}, torch.zeros(())
    for part in plan_micro_batches(groups, budget, shared_prefix=shared):
        stats = policy_model(
            to_model_inputs(build_micro_batch(part, groups), shared_prefix=shared, device=policy_model.device)
        )
        answers = [groups[g].completions[c] for g, c in part.completions]
        pieces = stats.logprobs.split([len(answer.token_ids) for answer in answers])
        for answer, piece in zip(answers, pieces, strict=True):
            found[answer.id] = piece.detach()
            # Any weights work if a completion has the same ones in every row.
            total = total + (piece * torch.cos(torch.arange(len(piece)) + len(answer.id))).sum()
    gradients = torch.autograd.grad(total, list(policy_model.parameters()))
    names = [name for name, _ in policy_model.named_parameters()]
    return found | dict(zip(names, gradients, strict=True))


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        if name.startswith("model."):
            # A gradient that is zero up to rounding, as for a query with a single key, has no relative error.
            assert float((value - other[name]).norm()) < 1e-4 * float(other[name].norm()) + 1e-5, name
        else:
            assert torch.allclose(value, other[name], rtol=0, atol=1e-5), name


@pytest.mark.parametrize(
    "model",
    [
        lambda: a_llama(),
        lambda: a_llama(tie_word_embeddings=True, num_key_value_heads=1),
        lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
        lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES)),
        lambda: GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256)),
    ],
    ids=["llama", "llama-tied", "qwen2", "qwen3", "gpt2"],
)
def test_a_shared_prefix_gives_the_log_probs_and_gradients_of_plain_rows(model) -> None:
    torch.manual_seed(0)
    policy_model, groups = PolicyModel(model()), some_groups(3)
    expected = computed(policy_model, groups, shared=False)
    check = check_model(policy_model, 256)
    assert check.shared_prefix, check.message
    assert_same(computed(policy_model, groups, shared=True), expected)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any)),
        min_size=1,
        max_size=4,
    ),
    st.integers(20, 90),
    st.booleans(),
)
def test_any_shape_of_groups_and_any_budget_gives_the_same_results(shapes, budget, fused) -> None:
    rng = np.random.default_rng(0)
    groups = [a_group(f"g{i}", rng, prompt, sizes) for i, (prompt, sizes) in enumerate(shapes)]
    policy_model = PolicyModel(a_llama())
    expected = computed(policy_model, groups, shared=False)
    assert check_model(policy_model, 64).shared_prefix
    with pytest.MonkeyPatch.context() as patch:
        if fused:
            patch.setattr("offbeat.trainer.attention.EXPLICIT_SCORES", 0)
        assert_same(computed(policy_model, groups, shared=True, budget=budget), expected)


@pytest.mark.parametrize("shared", [True, False])
def test_recomputing_activations_changes_no_gradient(shared: bool) -> None:
    groups = some_groups(1)
    kept, recomputed = (PolicyModel(a_llama(), checkpoint_activations=on) for on in (False, True))
    for policy_model in (kept, recomputed):
        check_model(policy_model, 64)
    expected, found = (computed(policy_model, groups, shared=shared) for policy_model in (kept, recomputed))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_recomputing_activations_keeps_fewer_of_them() -> None:
    def kept_bytes(checkpoint: bool) -> int:
        policy_model, groups, sizes = PolicyModel(a_llama(), checkpoint_activations=checkpoint), some_groups(1), []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(tensor.numel() * tensor.element_size())
            return tensor

        [part] = plan_micro_batches(groups, 1 << 20, shared_prefix=False)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            policy_model(
                to_model_inputs(build_micro_batch(part, groups), shared_prefix=False, device=policy_model.device)
            )
        return sum(sizes)

    assert kept_bytes(True) < kept_bytes(False) / 3


def test_dropout_is_off() -> None:
    model = a_llama(attention_dropout=0.5).train()
    policy_model = PolicyModel(model)
    first, second = (logprobs(policy_model, some_groups(0)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


class TestFallback:
    def test_a_state_space_model_gets_plain_rows_and_a_message(self, caplog: pytest.LogCaptureFixture) -> None:
        torch.manual_seed(0)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
        policy_model = PolicyModel(MambaForCausalLM(MambaConfig(**sizes, use_mambapy=False, initializer_range=0.5)))
        with caplog.at_level(logging.WARNING):
            check = check_model(policy_model, 64)
        assert not check.shared_prefix
        assert "MambaForCausalLM does not allow a shared prefix" in caplog.text
        assert_plain_rows_are_right(policy_model)

    def test_an_attention_window_shorter_than_the_budget_is_detected(self) -> None:
        policy_model = PolicyModel(windowed(8))
        check = check_model(policy_model, 64)
        assert not check.shared_prefix and "differ by" in check.message
        assert_plain_rows_are_right(policy_model)

    def test_an_attention_window_longer_than_the_budget_does_no_harm(self) -> None:
        policy_model, groups = PolicyModel(windowed(64)), some_groups(5)
        expected = computed(policy_model, groups, shared=False)
        assert check_model(policy_model, 64).shared_prefix
        assert_same(computed(policy_model, groups, shared=True), expected)

    def test_a_model_that_caps_its_logits_is_refused(self) -> None:
        torch.manual_seed(0)
        policy_model = PolicyModel(Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=1.0)))
        with pytest.raises(UnsupportedModel, match="Gemma2ForCausalLM changes its logits"):
            check_model(policy_model, 64)


def windowed(window: int) -> MistralForCausalLM:
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=window, attn_implementation="sdpa"))


def assert_plain_rows_are_right(policy_model: PolicyModel) -> None:
    """After the check, the model's log-probs are unchanged."""
    groups = some_groups(4, count=2)
    found = iter(logprobs(policy_model, groups))
    for group, answer in chain.from_iterable([(g, c) for c in g.completions] for g in groups):
        ids = torch.tensor([*group.prompt.token_ids.tolist(), *answer.token_ids.tolist()])[None]
        logits = policy_model.model(ids).logits.detach()[0, len(group.prompt.token_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, ids[0, -len(answer.token_ids) :, None])[:, 0]
        assert torch.allclose(next(found), expected, atol=1e-5)


@pytest.mark.engine
def test_smollm2_shares_prefixes_and_splits_batches_up_to_rounding() -> None:
    from lab.bench.training_arms import Shape, load
    from lab.parity.training_exactness import compare_paths

    groups = Shape(prompt=16, completion=8, size=4, groups=1, together=1).make_groups()
    # In float64, because float32 rounds differently on every processor and with every thread count. The optimizer's
    # float32 master weights and gradients round at 1e-7.
    found = compare_paths(lambda: load(torch.float64), groups, [100, 40])
    assert found.logprobs <= 1e-6 and found.split_loss <= 1e-8, found
    assert found.shared_gradients <= 1e-5 and found.split_parameters <= 1e-6, found
