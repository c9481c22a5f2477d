"""Whatever a batch holds, the parameters stay finite and every refused group has its reason."""

import math
import os

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small import VOCABULARY, a_trainer

from offbeat.objective.presets import PRESETS
from offbeat.trainer.trainer import NoGradient, Refused, Trainer
from offbeat.types import UNKNOWN, Completion, Group, Prompt, Score, Unknown, Unscorable, VersionSpan

BUDGET = 32
EXAMPLES = int(os.environ.get("OFFBEAT_HOSTILE_BATCHES", "40"))

rewards = st.sampled_from([0.0, 1.0, 0.5, -1e30, 1e30, math.nan, math.inf])
scores = st.one_of(st.builds(Score, rewards), st.just(Unscorable("timeout")), st.none())
absurd = st.sampled_from([-1.0, -3.0, 0.0, 1e4, -1e4, -1e30, math.nan, -math.inf, math.inf])


@st.composite
def completions(draw: st.DrawFn, name: str) -> Completion:
    """Empty, one token, too long; log-probs unknown, ordinary or absurd; masked, scored, awaited."""
    size = draw(st.sampled_from([0, 1, 2, 5, BUDGET - 1, BUDGET + 1]))
    tokens = draw(st.lists(st.integers(-1, VOCABULARY), min_size=1, max_size=3))
    ordinary = draw(st.booleans())
    logprobs: list[float] | Unknown = [-2.0] * size
    if not ordinary:
        logprobs = draw(st.one_of(st.just(UNKNOWN), absurd.map(lambda x: [x] * size)))
        tokens = [min(max(t, 0), VOCABULARY - 1) for t in tokens] if draw(st.booleans()) else tokens
    else:
        tokens = [min(max(t, 0), VOCABULARY - 1) for t in tokens]
    mask = np.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), np.bool_) if ordinary else None
    spans = draw(st.sampled_from([(), (VersionSpan(0, 0, size),), (VersionSpan(99, 0, size),)]))
    score = draw(scores) if not ordinary else Score(draw(st.sampled_from([0.0, 1.0])))
    ids = np.resize(np.array(tokens, np.int32), size)
    return Completion(name, ids, logprobs, spans, mask, score=score)  # type: ignore[arg-type]


@st.composite
def batches(draw: st.DrawFn) -> list[Group]:
    def group(g: int) -> Group:
        prompt = draw(st.sampled_from([0, 1, 3, BUDGET - 1, BUDGET]))
        answers = [draw(completions(f"g{g}/{i}")) for i in range(draw(st.integers(0, 3)))]
        return Group(f"g{g}", Prompt("p", np.arange(prompt) % VOCABULARY, "hostile"), tuple(answers))

    return [group(g) for g in range(draw(st.integers(0, 3)))]


@pytest.fixture(scope="module")
def trainers() -> dict[str, Trainer]:
    names = ["grpo", "red-weight-adaptive", "opmd", "tis", "topr", "asymre"]
    return {n: a_trainer(PRESETS[n].objective, token_budget=BUDGET, updates_per_batch=2, rate=1e-4) for n in names}


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(groups=batches(), name=st.sampled_from(["grpo", "red-weight-adaptive", "opmd", "tis", "topr", "asymre"]))
def test_parameters_stay_finite_and_refusals_have_reasons(trainers, groups: list[Group], name: str) -> None:
    trainer = trainers[name]
    try:
        done = trainer.train(groups)
    except NoGradient as nothing:
        assert "0 tokens had gradient" in str(nothing)
    else:
        if isinstance(done, Refused):
            assert done.faults.keys() <= {group.id for group in groups}
            assert done.faults and all(done.faults.values())
        else:
            assert all(math.isfinite(value) for value in done.metrics.values())
    state = [*trainer.scorer.parameters(), *trainer.optimizer.tensors().values()]
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state)
