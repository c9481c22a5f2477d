"""Any batch leaves the policy finite, and every refusal has a reason."""

import math

import numpy as np
import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st

from offbeat.errors import NoGradient
from offbeat.objective.presets import PRESETS
from offbeat.objective.spec import Need
from offbeat.trainer.forward import PolicyModel
from offbeat.trainer.optimizer import MasterAdamW, OptimizerSettings, Schedule
from offbeat.trainer.trainer import RefusedBatch, StepSettings, Trained, Trainer
from offbeat.types import UNKNOWN, Completion, Group, Prompt, Score, StepContext, Unscorable, VersionSpan
from tests.trainer.small import VOCABULARY, a_llama

BUDGET = 48
pytestmark = pytest.mark.engine

finite = st.one_of(st.floats(-8, 0, width=32), st.sampled_from([0.0, -0.0, -1e-30, -700.0, -1e4, -1e30]))
logprobs = st.one_of(finite, st.sampled_from([math.nan, math.inf, -math.inf]))
rewards = st.one_of(
    st.sampled_from([0.0, 1.0]),
    st.floats(-1, 1),
    st.sampled_from([1e-30, 1e30, -1e30, math.nan, math.inf]),
)


@st.composite
def completions(draw: st.DrawFn, name: str, sane: bool) -> Completion:
    size = draw(st.sampled_from([0, 1, 1, 2, 5, 12]))
    tokens = draw(st.lists(st.integers(0, VOCABULARY - 1 if sane else VOCABULARY + 2), min_size=size, max_size=size))
    known = st.lists(finite if sane else logprobs, min_size=size, max_size=size)
    behavior = draw(known if sane else st.one_of(st.just(UNKNOWN), known))
    mask = draw(st.one_of(st.just([True] * size), st.lists(st.booleans(), min_size=size, max_size=size)))
    scores = st.builds(Score, st.sampled_from([0.0, 1.0, 0.5]) if sane else rewards)
    score = draw(scores if sane else st.one_of(scores, st.just(Unscorable("timeout")), st.none()))
    spans = (VersionSpan(0, 0, size),) if size else ()
    return Completion(name, np.array(tokens, np.int32), behavior, spans, np.array(mask, np.bool_), score=score)


@st.composite
def groups(draw: st.DrawFn, name: str, sane: bool) -> Group:
    prompt = draw(st.sampled_from([1, 3, BUDGET - 12] if sane else [0, 1, 3, BUDGET, BUDGET + 5]))
    size = draw(st.integers(2 if sane else 1, 4))
    answers = tuple(draw(completions(f"{name}/{i}", sane)) for i in range(size))
    return Group(name, Prompt(f"p-{name}", np.arange(prompt, dtype=np.int32) % VOCABULARY, "made-up"), answers)


@st.composite
def batches(draw: st.DrawFn) -> tuple[Group, ...]:
    """Most batches can be trained on, even with absurd ratios; the others may be broken in any way."""
    sane = draw(st.sampled_from([True, True, False]))
    return tuple(draw(groups(f"g{i}", sane)) for i in range(draw(st.integers(1, 4))))


presets = sorted(name for name, preset in PRESETS.items() if Need.REFERENCE not in preset.objective.needs)


@given(batch=batches(), preset=st.sampled_from(presets), updates=st.integers(1, 2))
def test_no_batch_breaks_the_policy(batch: tuple[Group, ...], preset: str, updates: int) -> None:
    policy_model = PolicyModel(a_llama())
    objective = PRESETS[preset].objective
    trainer = Trainer(
        policy_model,
        MasterAdamW(policy_model, OptimizerSettings(Schedule(1e-2))),
        StepSettings(objective, updates, BUDGET, length_limit=12),
    )
    context = StepContext(published=0, priors={group.id: (1.0, 1.0) for group in batch})
    try:
        outcome = trainer.train(list(batch), context)
    except NoGradient as nothing:
        assert "0 tokens had gradient" in str(nothing)
        outcome = None
    event(type(outcome).__name__)
    after = policy_model.model.state_dict()
    assert all(tensor.isfinite().all() for tensor in after.values())
    before = a_llama().state_dict()
    moved = any(not torch.equal(after[name], before[name]) for name in before)
    names = {group.id for group in batch}
    if isinstance(outcome, RefusedBatch):
        assert outcome.faults and outcome.faults.keys() <= names and all(outcome.faults.values())
        assert not moved and trainer.step == 0
    elif isinstance(outcome, Trained):
        assert moved and outcome.step == 1 and all(math.isfinite(value) for value in outcome.metrics.values())
        assert {*outcome.groups, *outcome.zero_variance, *outcome.too_small} <= names
    else:
        assert not moved and trainer.step == 0
