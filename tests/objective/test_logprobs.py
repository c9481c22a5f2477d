"""Chunked log-probs and entropies equal those of full logits, with a fraction of the memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offbeat.objective.logprobs import token_stats
from tests.fixtures.logprob_memory import largest_differences, peak_ratio


def full_logits(
    hidden: Tensor, head: Tensor, bias: Tensor | None, ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    logits = hidden @ head.T
    logits = (logits if bias is None else logits + bias) / temperature
    log_p = torch.log_softmax(logits, -1)
    return log_p.gather(-1, ids[..., None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 3),
    tokens=st.integers(1, 9),
    vocabulary=st.integers(2, 40),
    chunk=st.integers(1, 12),
    temperature=st.sampled_from([1.0, 0.6, 1.7]),
    with_bias=st.booleans(),
    keep=st.booleans(),
)
def test_chunks_equal_full_logits_exactly_in_double_precision(
    seed: int, rows: int, tokens: int, vocabulary: int, chunk: int, temperature: float, with_bias: bool, keep: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    hidden, head = normal(rows, tokens, 8).requires_grad_(), normal(vocabulary, 8).requires_grad_()
    bias = normal(vocabulary).requires_grad_() if with_bias else None
    ids = torch.randint(0, vocabulary, (rows, tokens), generator=generator)
    weights = normal(2, rows, tokens)
    leaves = [x for x in (hidden, head, bias) if x is not None]

    logprobs, entropies = full_logits(hidden, head, bias, ids, temperature)
    expected = torch.autograd.grad((weights[0] * logprobs + weights[1] * entropies).sum(), leaves)
    found = token_stats(hidden, head, ids, bias=bias, temperature=temperature, chunk_tokens=chunk, keep_logits=keep)
    gradients = torch.autograd.grad((weights[0] * found.logprobs + weights[1] * found.entropies).sum(), leaves)

    assert torch.allclose(found.logprobs, logprobs, rtol=1e-13, atol=1e-13)
    assert torch.allclose(found.entropies, entropies, rtol=1e-12, atol=1e-12)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-10, atol=1e-12)


def test_kept_logits_give_the_same_gradient_as_computed_ones_and_also_the_second_time() -> None:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(40, 16, generator=generator).bfloat16().requires_grad_()
    head = torch.randn(90, 16, generator=generator).bfloat16().requires_grad_()
    ids = torch.randint(0, 90, (40,), generator=generator)
    computed, kept = (token_stats(hidden, head, ids, chunk_tokens=40, keep_logits=keep) for keep in (False, True))
    assert torch.equal(computed.logprobs, kept.logprobs) and torch.equal(computed.entropies, kept.entropies)
    expected = torch.autograd.grad(computed.logprobs.sum(), (hidden, head))
    for _ in range(2):
        found = torch.autograd.grad(kept.logprobs.sum(), (hidden, head), retain_graph=True)
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_equal_to_full_logits_in_float32_at_a_real_vocabulary() -> None:
    forward, backward = largest_differences(vocabulary=49_152, tokens=128, hidden_size=64)
    assert forward <= 1e-6
    assert backward <= 1e-6


def test_double_precision_gradients_pass_gradcheck() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(5, 4, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.randn(7, 4, generator=generator, dtype=torch.float64).requires_grad_()
    ids = torch.tensor([0, 6, 3, 3, 1])
    assert torch.autograd.gradcheck(
        lambda h, w: token_stats(h, w, ids, chunk_tokens=2, temperature=0.8), (hidden, head)
    )


def test_bfloat16_states_give_float32_logprobs_and_bfloat16_gradients() -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(600, 16, generator=generator).bfloat16().requires_grad_()
    head = torch.randn(50, 16, generator=generator).bfloat16().requires_grad_()
    ids = torch.randint(0, 50, (600,), generator=generator)
    stats = token_stats(hidden, head, ids)
    assert stats.logprobs.dtype == torch.float32
    gradients = torch.autograd.grad(stats.logprobs.sum(), (hidden, head))
    logprobs, _ = full_logits(hidden.float(), head.float(), None, ids, 1.0)
    exact = torch.autograd.grad(logprobs.sum(), (hidden, head))
    assert (stats.logprobs - logprobs).abs().mean() < 0.02
    for ours, theirs in zip(gradients, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - theirs.float()).norm() < 0.02 * theirs.float().norm()


def test_a_token_of_probability_zero_leaves_entropy_and_gradient_finite() -> None:
    hidden, head = torch.ones(1, 1, requires_grad=True), torch.tensor([[200.0], [-200.0]], requires_grad=True)
    stats = token_stats(hidden, head, torch.tensor([0]))
    (stats.logprobs + stats.entropies).sum().backward()
    assert stats.entropies.isfinite().all() and hidden.grad is not None and hidden.grad.isfinite().all()


def test_a_masked_token_leaves_every_block_of_the_backward_pass_finite() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(6, 4, generator=generator, dtype=torch.float64).requires_grad_()
    head = torch.randn(9, 4, generator=generator, dtype=torch.float64).requires_grad_()
    bias = torch.zeros(9, dtype=torch.float64)
    bias[[0, 7, 8]] = -torch.inf
    ids = torch.tensor([1, 2, 3, 4, 5, 6])
    expected, found = [], []
    for chunk, gradients in ((6, expected), (1, found)):
        stats = token_stats(hidden, head, ids, bias=bias, chunk_tokens=chunk)
        gradients += torch.autograd.grad((stats.logprobs + stats.entropies).sum(), (hidden, head))
    for one, other in zip(expected, found, strict=True):
        assert one.isfinite().all() and torch.allclose(one, other, rtol=1e-12, atol=1e-14)


def test_shapes_that_do_not_match_are_refused() -> None:
    with pytest.raises(ValueError, match="do not match token ids"):
        token_stats(torch.zeros(3, 4), torch.zeros(5, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match=r"is not \[vocabulary, 4\]"):
        token_stats(torch.zeros(3, 4), torch.zeros(5, 6), torch.zeros(3, dtype=torch.long))


@pytest.mark.engine
def test_peak_memory_stays_below_a_quarter_of_full_logits() -> None:
    assert peak_ratio(vocabulary=16_384, tokens=4_096, hidden=64) < 0.25
