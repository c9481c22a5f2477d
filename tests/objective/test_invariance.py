"""The loss does not depend on micro-batches, padding or order, and never becomes NaN."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from batches import Batch
from hypothesis import given, settings
from hypothesis import strategies as st
from naive import Case
from torch import Tensor

from offbeat.objective.credit import assign_credit
from offbeat.objective.gates import gate_batch
from offbeat.objective.losses import Streams, counts, policy_loss
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import KL, Aggregate, KLEstimator, Level, Objective, SquaredLogRatio
from offbeat.types import UNKNOWN

presets = st.sampled_from(sorted(PRESETS))
seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(2, 6)
examples = settings(max_examples=200, deadline=None)


def gradient(batch: Batch, objective: Objective) -> tuple[Tensor, Tensor]:
    loss = batch.loss(objective)
    return loss.detach(), torch.autograd.grad(loss, batch.policy)[0]


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-10, atol=1e-14)


@examples
@given(name=presets, seed=seeds, size=sizes, cuts=st.lists(st.integers(0, 17), max_size=4))
def test_micro_batches_add_up_to_the_batch(name: str, seed: int, size: int, cuts: list[int]) -> None:
    objective = PRESETS[name].objective
    batch = Batch.of(objective, Case.random(seed, 3, size))
    loss, whole = gradient(batch, objective)
    edges = sorted({0, len(batch.policy), *(min(c, len(batch.policy)) for c in cuts)})
    parts = [slice(a, b) for a, b in pairwise(edges)]
    losses = [batch.loss(objective, part) for part in parts]
    summed = torch.stack(losses).sum()
    assert close(summed.detach(), loss)
    assert close(torch.autograd.grad(summed, batch.policy)[0], whole)


@examples
@given(name=presets, seed=seeds, size=sizes, padding=st.integers(1, 7), fill=st.sampled_from([0.0, -1e9, float("nan")]))
def test_padding_changes_nothing(name: str, seed: int, size: int, padding: int, fill: float) -> None:
    objective, case = PRESETS[name].objective, Case.random(seed, 2, size)
    bare, padded = Batch.of(objective, case), Batch.of(objective, case, padding=padding, fill=fill)
    loss, expected = gradient(bare, objective)
    loss_padded, found = gradient(padded, objective)
    width = bare.policy.shape[1]
    assert close(loss, loss_padded)
    assert close(expected, found[:, :width])
    assert (found[:, width:] == 0).all()


@examples
@given(name=presets, seed=seeds, size=sizes, order=st.randoms(use_true_random=False))
def test_the_order_of_completions_changes_nothing(name: str, seed: int, size: int, order: object) -> None:
    objective = PRESETS[name].objective
    batch = Batch.of(objective, Case.random(seed, 3, size))
    loss, expected = gradient(batch, objective)
    rows = list(range(len(batch.policy)))
    order.shuffle(rows)  # type: ignore[attr-defined]
    permuted = batch.loss(objective, torch.tensor(rows))
    assert close(permuted.detach(), loss)
    assert close(torch.autograd.grad(permuted, batch.policy)[0], expected)


@examples
@given(name=presets, seed=seeds, size=sizes, order=st.permutations(range(3)))
def test_the_order_of_groups_changes_nothing(name: str, seed: int, size: int, order: list[int]) -> None:
    objective, case = PRESETS[name].objective, Case.random(seed, 3, size)
    shuffled = Case(*([stream[g] for g in order] for stream in (case.rewards, case.policy, case.behavior)),
                    [case.proximal[g] for g in order], [case.seeds[g] for g in order])  # fmt: skip
    loss, expected = gradient(Batch.of(objective, case), objective)
    loss_shuffled, found = gradient(Batch.of(objective, shuffled), objective)
    assert close(loss, loss_shuffled)
    back = torch.cat([torch.arange(size) + order.index(g) * size for g in range(3)])
    assert close(expected, found[back])


@examples
@given(name=presets, seed=seeds, size=sizes, where=st.integers(0, 5))
def test_an_unscorable_completion_changes_nothing(name: str, seed: int, size: int, where: int) -> None:
    objective = PRESETS[name].objective
    batch = Batch.of(objective, case := Case.random(seed, 2, size))
    loss, expected = gradient(batch, objective)
    where = min(where, size)

    def insert(rows: Tensor, value: float) -> Tensor:
        groups = rows.detach().reshape(2, size, -1)
        extra = torch.full_like(groups[:, :1], value)
        return torch.cat([groups[:, :where], extra, groups[:, where:]], 1).flatten(0, 1)

    rewards = insert(torch.tensor(case.rewards, dtype=torch.float64).reshape(-1, 1), float("nan")).reshape(2, -1)
    scored = ~rewards.isnan()
    mask = insert(batch.mask.double(), 1.0).bool()
    credit = assign_credit(objective, rewards, scored, mask.sum(-1).view(2, -1), group_seeds=case.seeds)
    wider = Batch(insert(batch.policy, -5.0).requires_grad_(), insert(batch.behavior, -1.0),
                  insert(batch.proximal, -2.0), mask, credit)  # fmt: skip
    loss_wider, found = gradient(wider, objective)
    present = scored.reshape(-1)
    assert close(loss, loss_wider)
    assert close(expected, found[present])
    assert (found[~present] == 0).all()


@examples
@given(name=presets, seed=seeds, size=sizes)
def test_masked_tokens_change_nothing_even_if_they_are_nan(name: str, seed: int, size: int) -> None:
    objective = PRESETS[name].objective
    batch = Batch.of(objective, Case.random(seed, 2, size))
    mask = batch.mask & (torch.rand(batch.mask.shape, generator=torch.Generator().manual_seed(seed)) < 0.7)
    batch = replace(batch, mask=mask)
    loss, expected = gradient(batch, objective)
    for junk in (float("nan"), float("-inf"), 1e30):
        spoilt = replace(
            batch,
            policy=torch.where(mask, batch.policy.detach(), junk).requires_grad_(),
            behavior=torch.where(mask, batch.behavior, junk),
            proximal=torch.where(mask, batch.proximal, junk),
        )
        loss_spoilt, found = gradient(spoilt, objective)
        assert close(loss, loss_spoilt)
        assert close(expected, found)
        assert (found[~mask] == 0).all()


extremes = st.sampled_from([0.0, 1e-8, -1e-8, 19.9, -19.9, 20.1, -20.1, 88.0, -88.0, 1e3, -1e3, 1e4, -1e4])


@examples
@given(
    name=presets,
    size=st.integers(2, 64),
    tokens=st.integers(1, 4),
    log_ratios=st.lists(extremes, min_size=8, max_size=8),
    rewards=st.one_of(st.just([0.0]), st.just([1.0]), st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5)),
    penalty=st.sampled_from([None, *KLEstimator]),
)
def test_nothing_becomes_nan_or_infinite(
    name: str, size: int, tokens: int, log_ratios: list[float], rewards: list[float], penalty: KLEstimator | None
) -> None:
    objective = PRESETS[name].objective
    if penalty is not None:
        objective = replace(objective, regularizers=(*objective.regularizers, KL(0.1, penalty, weighted=True)))
    rewards_BG = torch.tensor([[rewards[g % len(rewards)] for g in range(size)]])
    mask = torch.ones(size, tokens, dtype=torch.bool)
    credit = assign_credit(
        objective, rewards_BG, torch.ones(1, size, dtype=torch.bool), mask.sum(-1)[None], group_seeds=[3]
    )
    offsets = torch.tensor([[log_ratios[(n + t) % 4] for t in range(tokens)] for n in range(size)])
    further = torch.tensor([[log_ratios[4 + (n * t) % 4] for t in range(tokens)] for n in range(size)])
    policy = torch.full((size, tokens), -1e4).requires_grad_()
    streams = Streams(policy, policy.detach() - offsets, policy.detach() + further, policy.detach() + offsets,
                      credit.advantages_BG[0], credit.weights_BG[0], mask & credit.trained_BG[0, :, None])  # fmt: skip
    gate = None
    if objective.needs_first_look:
        gate = gate_batch(objective, offsets, credit.advantages_BG[0], streams.mask_NT, group_size=size)
    loss = policy_loss(objective, streams, counts(streams.mask_NT), length_limit=8, gate_NT=gate).total
    loss.backward()
    assert policy.grad is not None
    assert loss.isfinite() and policy.grad.isfinite().all()


@pytest.mark.parametrize("kind", Aggregate)
@pytest.mark.parametrize("regularizer", [KL(0.3, k, w) for k in KLEstimator for w in (False, True)]
                         + [SquaredLogRatio(0.2, level) for level in (Level.TOKEN, Level.SEQUENCE)])  # fmt: skip
@settings(max_examples=20, deadline=None)
@given(seed=seeds)
def test_regularizers_add_up_over_micro_batches(kind: Aggregate, regularizer: KL | SquaredLogRatio, seed: int) -> None:
    objective = Objective(regularizers=(regularizer,), aggregate=kind)
    batch = Batch.of(objective, Case.random(seed, 2, 4))
    streams = batch.streams(objective)
    streams = replace(streams, reference_NT=batch.proximal, behavior_NT=batch.behavior)

    def rows(part: slice) -> Streams:
        return Streams(*(x if x is UNKNOWN else x[part] for x in vars(streams).values()))

    parts = [slice(0, 3), slice(3, 8)]
    whole = policy_loss(objective, streams, batch.counts(), length_limit=9).total
    pieces = sum(policy_loss(objective, rows(p), batch.counts(), length_limit=9).total for p in parts)
    assert close(whole.detach(), torch.as_tensor(pieces).detach())


def test_a_far_reference_still_pulls_back_under_k3() -> None:
    """A clamped k3 would have the wrong sign where exp overflows: π far below π_ref must be pushed up."""
    policy, mask = torch.full((1, 1), -1e3, requires_grad=True), torch.ones(1, 1, dtype=torch.bool)
    streams = Streams(policy, UNKNOWN, UNKNOWN, torch.full((1, 1), -1.0), torch.zeros(1), torch.ones(1), mask)
    policy_loss(Objective(regularizers=(KL(1.0),)), streams, counts(mask)).total.backward()
    assert policy.grad is not None and float(policy.grad) < 0


def test_an_unknown_stream_that_is_needed_is_named_in_the_error() -> None:
    logprobs, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    streams = Streams(logprobs, UNKNOWN, UNKNOWN, UNKNOWN, torch.ones(2), torch.ones(2), mask)
    with pytest.raises(ValueError, match="needs behavior log-probs"):
        policy_loss(PRESETS["grpo"].objective, streams, counts(mask))


def test_streams_of_different_shapes_are_refused() -> None:
    logprobs, mask = torch.zeros(2, 3), torch.ones(2, 3, dtype=torch.bool)
    with pytest.raises(ValueError, match="behavior_NT is"):
        Streams(logprobs, logprobs[:, :2], UNKNOWN, UNKNOWN, torch.ones(2), torch.ones(2), mask)
    with pytest.raises(ValueError, match="advantages_N is"):
        Streams(logprobs, UNKNOWN, UNKNOWN, UNKNOWN, torch.ones(3), torch.ones(2), mask)


def test_a_group_with_fewer_than_two_scores_is_too_small_to_compare() -> None:
    rewards, scored = torch.ones(2, 3), torch.tensor([[True, False, False], [True, True, False]])
    credit = assign_credit(Objective(), rewards, scored, torch.ones(2, 3), group_seeds=[0, 1])
    assert credit.too_small_B.tolist() == [True, False]
    assert credit.trained_BG.tolist() == [[False] * 3, [True, True, False]]
